// Draws the page from the data element. Text from the data becomes textContent only, never markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const LETTERS = { gather: "G", aggregate: "A", both: "B" };
const ROLES = ["gather", "aggregate", "both", "neither", "unmeasured"].filter((role) => DATA.heads.some((head) => head.role === role));
const PAGE = 100; // rows of the table at a time
const BY_NAME = new Map(DATA.heads.map((head) => [head.name, head]));
const state = { column: DATA.first, sort: "rank", down: false, role: "all", find: "", rows: PAGE, open: null, prompt: 0 };

const byId = (id) => document.getElementById(id);

function el(tag, fields = {}, ...children) {
  const { style, ...rest } = fields;
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(rest)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  Object.assign(node.style, style);
  node.append(...children);
  return node;
}

function button(text, onclick, fields = {}) {
  return el("button", { type: "button", onclick, ...fields }, text);
}

function number(value, digits) {
  return value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−");
}

function digitsOf(column) {
  return DATA.units[DATA.columns[column].unit].digits;
}

function interval(score, digits) {
  return `[${number(score[1], digits)}, ${number(score[2], digits)}]`;
}

// ---- scales: one for all columns of a unit -------------------------------------------------------------------------
const SCALES = {};
for (const [c, column] of DATA.columns.entries()) {
  const scale = (SCALES[column.unit] ??= { limit: 0, low: 0, high: 0 });
  for (const { scores } of DATA.heads) {
    if (!scores[c]) continue;
    scale.limit = Math.max(scale.limit, Math.abs(scores[c][0]));
    scale.low = Math.min(scale.low, scores[c][1]);
    scale.high = Math.max(scale.high, scores[c][2]);
  }
}

function colour(part) {
  // -1 red, 0 white, 1 blue, as in the figures; [background, ink].
  const ends = part < 0 ? [[253, 219, 199], [214, 96, 77], [103, 0, 31]] : [[209, 229, 240], [67, 147, 195], [5, 48, 97]];
  const stops = [[255, 255, 255], ...ends];
  const at = Math.min(Math.abs(part), 1) * 3;
  const i = Math.min(Math.floor(at), 2);
  const rgb = stops[i].map((v, k) => Math.round(v + (stops[i + 1][k] - v) * (at - i)));
  return [`rgb(${rgb})`, at > 2 ? "#fff" : "#1d1f23"];
}

function ticks(low, high) {
  const rough = (high - low) / 7 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const at = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9; i++) at.push(i * step + 0); // + 0: no −0
  return [at, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}

// ---- the map --------------------------------------------------------------------------------------------------------
const MIXERS = [...new Set(DATA.heads.map((head) => head.mixer))].sort((a, b) => parseInt(a.slice(1)) - parseInt(b.slice(1)) || (a < b ? 1 : -1));
const WIDTH = Math.max(...DATA.heads.map((head) => head.index)) + 1;
const ROOMY = WIDTH <= 12 && MIXERS.length <= 16;

function buildMap() {
  const map = byId("map");
  const height = ROOMY ? 36 : MIXERS.length > 40 ? 11 : 19;
  map.style.gridTemplateColumns = `max-content repeat(${WIDTH}, minmax(${ROOMY ? 24 : 9}px, 1fr))`;
  map.style.gridAutoRows = `${height}px`;
  map.classList.toggle("small", !ROOMY);
  map.append(el("span", { class: "axis layer" }, "layer"));
  const every = WIDTH > 16 ? (WIDTH > 48 ? 16 : 4) : 1;
  for (let h = 0; h < WIDTH; h++) map.append(el("span", { class: "axis" }, h % every ? "" : `${h}`));
  const cells = new Map(DATA.heads.map((head) => [`${head.mixer}/${head.index}`, head]));
  for (const [m, mixer] of MIXERS.entries()) {
    map.append(el("span", { class: "axis layer" }, height > 12 || m % 4 === 0 ? mixer.slice(1).replace("H", "") : ""));
    for (let h = 0; h < WIDTH; h++) {
      const head = cells.get(`${mixer}/${h}`);
      map.append(head ? button("", () => open(head.name), { "data-head": head.name, tabindex: "-1" }) : el("span"));
    }
  }
  map.addEventListener("keydown", moveInMap);
}

function moveInMap(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const from = BY_NAME.get(event.target.dataset.head);
  if (!step || !from) return;
  event.preventDefault();
  const mixer = MIXERS[MIXERS.indexOf(from.mixer) + step[0]];
  const next = byId("map").querySelector(`[data-head="${mixer}${from.index + step[1]}"]`);
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function paintMap() {
  const { unit, caption } = DATA.columns[state.column];
  const digits = digitsOf(state.column);
  const limit = SCALES[unit].limit || 1;
  byId("column-note").textContent = caption;
  byId("column").value = state.column;
  for (const cell of byId("map").querySelectorAll("button")) {
    const head = BY_NAME.get(cell.dataset.head);
    const score = head.scores[state.column];
    const [background, ink] = score ? colour(score[0] / limit) : ["", ""];
    Object.assign(cell.style, { background, color: ink });
    cell.className = `${head.place ? "chosen" : ""} ${score ? "" : "unmeasured"}`;
    const text = score ? number(score[0], digits) : "not measured";
    cell.replaceChildren(el("i", {}, LETTERS[head.role] ?? ""), ROOMY && score ? number(score[0], Math.min(digits, 2)) : "");
    cell.title = `${head.name}: ${text}${LETTERS[head.role] ? `, ${head.role}` : ""}${head.place ? ", chosen" : ""}`;
    cell.setAttribute("aria-label", cell.title);
    cell.setAttribute("aria-current", String(head.name === state.open));
    cell.tabIndex = head.name === state.open ? 0 : -1;
  }
  const gradient = [-1, -0.67, -0.33, 0, 0.33, 0.67, 1].map((v) => colour(v)[0]);
  byId("map-legend").replaceChildren(
    el("span", {}, number(-limit, digits), el("span", { class: "scale", style: { background: `linear-gradient(90deg, ${gradient})` } }), number(limit, digits)),
    el("span", {}, el("span", { class: "box" }), "chosen"),
    el("span", {}, el("b", {}, "G"), "Gather"),
    el("span", {}, el("b", {}, "A"), "Aggregate"),
    el("span", {}, el("b", {}, "B"), "both"),
  );
}

// ---- one head -------------------------------------------------------------------------------------------------------
function open(name, byHand = true) {
  state.open = name;
  const head = BY_NAME.get(name);
  if (byHand && location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  byId("head-title").textContent = name;
  const facts = [
    ["rank ", `${head.rank}`, ` of ${DATA.heads.length}${DATA.selected ? "" : ` by ${DATA.method}`}`],
    ["role: ", head.role, ""],
  ];
  if (head.reads) facts.push(["better oracle read: ", head.reads.replace("_", " "), ""]);
  if (head.place) facts.unshift(["", `★ chosen, number ${head.place}`, head.given.length ? ` given ${head.given.join(", ")}` : ""]);
  byId("head-facts").replaceChildren(...facts.flatMap(([a, b, c], i) => [i ? " · " : "", a, el("b", {}, b), c]));
  byId("head-scores").replaceChildren(...Object.keys(DATA.units).map((unit) => scoresOf(head, unit)));
  paintReading();
  paintMap();
  for (const row of byId("table").tBodies[0].rows) row.classList.toggle("open", row.dataset.head === name);
}

function openFromTable(name) {
  open(name);
  byId("head-title").scrollIntoView({ block: "start" });
  byId("head-title").focus({ preventScroll: true });
}

function scoresOf(head, unit) {
  const { low, high } = SCALES[unit];
  const { title, digits } = DATA.units[unit];
  const place = (v) => `${(100 * (v - low)) / (high - low || 1)}%`;
  const [at, decimals] = ticks(low, high);
  const box = el("div", { class: "unit" }, el("h3", {}, title));
  for (const [c, column] of DATA.columns.entries()) {
    const score = head.scores[c];
    if (column.unit !== unit || !score) continue;
    const [value, least, most] = score;
    const plot = el("div", { class: "plot" }, ...at.map((v) => el("span", { class: v === 0 ? "zero" : "grid", style: { left: place(v) } })));
    plot.append(el("span", { class: "span", style: { left: place(least), width: `calc(${place(most)} - ${place(least)})` } }));
    for (const v of [least, most]) plot.append(el("span", { class: "end", style: { left: place(v) } }));
    plot.append(el("span", { class: "dot", style: { left: place(value) } }));
    const text = el("div", { class: "value" }, `${number(value, digits)} `, el("small", {}, interval(score, digits)));
    const name = el("div", { class: "name" }, column.heading, el("small", {}, column.note));
    box.append(el("div", { class: "score" }, name, plot, text));
  }
  if (box.children.length === 1) return el("div");
  const axis = el("div", { class: "plot" }, ...at.map((v) => el("span", { class: "tick", style: { left: place(v) } }, v ? number(v, decimals) : "0")));
  box.append(el("div", { class: "score axis-row", "aria-hidden": "true" }, el("span"), axis, el("span")));
  return box;
}

// ---- the tables -----------------------------------------------------------------------------------------------------
const PLAIN = [["name", "head", "text"], ["rank", "rank", ""], ["role", "role", "text"], ["reads", "reads", "text"]];

function sortBy(key) {
  const score = DATA.columns.findIndex((column) => column.key === key);
  state.down = state.sort === key ? !state.down : score >= 0; // scores begin with the largest
  state.sort = key;
  state.rows = PAGE;
  if (score >= 0) state.column = score;
  paintTable();
  paintMap();
}

function compare(a, b) {
  const score = DATA.columns.findIndex((column) => column.key === state.sort);
  const sign = state.down ? -1 : 1;
  if (score >= 0) {
    const [x, y] = [a.scores[score], b.scores[score]];
    if (!x || !y) return (x ? 0 : 1) - (y ? 0 : 1); // what was not measured comes last in both directions
    return sign * (x[0] - y[0]) || a.rank - b.rank;
  }
  if (state.sort === "name") return sign * (a.layer - b.layer || a.mixer.localeCompare(b.mixer) || a.index - b.index);
  const [x, y] = [a[state.sort] ?? "", b[state.sort] ?? ""];
  return sign * (x < y ? -1 : x > y ? 1 : 0) || a.rank - b.rank;
}

function visible() {
  const hasRole = (head) => state.role === "all" || (state.role === "chosen" ? head.place > 0 : head.role === state.role);
  const prefix = state.find.trim().toUpperCase();
  return DATA.heads.filter((head) => hasRole(head) && head.name.startsWith(prefix)).sort(compare);
}

function paintTable() {
  const heading = (key, text, unit, align) => {
    const sorted = state.sort === key;
    const th = el("th", { scope: "col", "aria-sort": sorted ? (state.down ? "descending" : "ascending") : "none", class: align });
    const again = () => (sortBy(key), byId("table").querySelector(`[data-key="${key}"]`).focus());
    th.append(button(text, again, { "data-key": key }));
    th.firstChild.append(el("small", {}, `${unit} `, el("span", { "aria-hidden": "true" }, sorted ? (state.down ? "▼" : "▲") : "\u00a0")));
    return th;
  };
  const columns = DATA.columns.map((c) => heading(c.key, c.heading, c.unit_label, ""));
  byId("table").tHead.replaceChildren(el("tr", {}, ...PLAIN.map(([key, text, align]) => heading(key, text, "", align)), ...columns));
  const heads = visible();
  byId("table").tBodies[0].replaceChildren(...heads.slice(0, state.rows).map(rowOf));
  byId("count").textContent = `${heads.length} of ${DATA.heads.length} heads${heads.length > state.rows ? `, the first ${state.rows} shown` : ""}`;
  byId("more").hidden = heads.length <= state.rows;
  byId("more").textContent = `Show ${Math.min(PAGE, heads.length - state.rows)} more`;
}

function rowOf(head) {
  const name = el("th", { scope: "row" }, button(head.name, () => openFromTable(head.name), { class: "link" }));
  if (head.place) name.append(" ★", el("span", { class: "hidden" }, ` chosen, number ${head.place}`));
  const row = el("tr", { "data-head": head.name, class: head.name === state.open ? "open" : "" }, name);
  row.append(el("td", {}, `${head.rank}`), el("td", { class: "text" }, head.role), el("td", { class: "text" }, (head.reads ?? "–").replace("_", " ")));
  for (const [c, column] of DATA.columns.entries()) {
    const score = head.scores[c];
    const cell = el("td", { class: column.key === state.sort ? "sorted" : "" }, score ? number(score[0], digitsOf(c)) : "–");
    if (score) cell.append(el("small", {}, interval(score, digitsOf(c))));
    row.append(cell);
  }
  return row;
}

function paintRoles() {
  const counts = { all: DATA.heads.length, chosen: DATA.heads.filter((head) => head.place).length };
  for (const role of ROLES) counts[role] = DATA.heads.filter((head) => head.role === role).length;
  const choose = (role) => () => ((state.role = role), (state.rows = PAGE), paintRoles(), paintTable(), byId("roles").querySelector(`[data-role="${role}"]`).focus());
  byId("roles").replaceChildren(
    ...Object.entries(counts).map(([role, n]) => button(`${role} (${n})`, choose(role), { "aria-pressed": String(state.role === role), "data-role": role })),
  );
}

function buildGroups() {
  byId("groups").hidden = !DATA.groups.length;
  const names = [...new Set(DATA.groups.flatMap((group) => Object.keys(group.scores)))];
  byId("group-table").tHead.append(el("tr", {}, ...["kind", "heads", ...names].map((name) => el("th", { scope: "col" }, name.replace(/_/g, " ")))));
  for (const group of DATA.groups) {
    const heads = group.heads.flatMap((name, i) => [i ? ", " : "", BY_NAME.has(name) ? button(name, () => openFromTable(name), { class: "link" }) : name]);
    const cells = names.map((name) => group.scores[name]).map((s) => el("td", {}, s ? `${number(s[0], 3)} ` : "–", s ? el("small", {}, interval(s, 3)) : ""));
    byId("group-table").tBodies[0].append(el("tr", {}, el("td", {}, group.kind.replace(/_/g, " ")), el("td", {}, ...heads), ...cells));
  }
}

function buildFacts() {
  const facts = [["model", DATA.model], ["revision", DATA.revision], DATA.selected ? ["heads", DATA.selected] : ["ranked by", DATA.method], ["probe seed", `${DATA.seed}`]];
  for (const [name, score] of Object.entries(DATA.clean)) facts.push([`clean ${name}`, `${number(score[0], 2)} ${interval(score, 2)}, ${score[3]} prompts`]);
  byId("facts").replaceChildren(...facts.filter((fact) => fact[1]).flatMap(([name, value], i) => [i ? " · " : "", `${name} `, el("b", {}, value)]));
}

function build() {
  buildFacts();
  buildMap();
  buildGroups();
  for (const unit of Object.keys(SCALES)) {
    const options = DATA.columns.map((column, c) => [column, c]).filter(([column]) => column.unit === unit);
    byId("column").append(el("optgroup", { label: DATA.units[unit].title }, ...options.map(([column, c]) => el("option", { value: c }, column.label))));
  }
  byId("column").addEventListener("change", (event) => ((state.column = Number(event.target.value)), paintMap()));
  byId("find").addEventListener("input", (event) => ((state.find = event.target.value), (state.rows = PAGE), paintTable()));
  byId("more").addEventListener("click", () => ((state.rows += PAGE), paintTable()));
  paintRoles();
  paintTable();
  const first = DATA.heads.find((head) => head.place === 1) ?? DATA.heads[0];
  const linked = () => (BY_NAME.has(location.hash.slice(1)) ? location.hash.slice(1) : null);
  open(linked() ?? first.name, false);
  window.addEventListener("hashchange", () => linked() && open(linked(), false));
  window.addEventListener("resize", paintReading);
}

build();
