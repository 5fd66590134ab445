"use strict";
// The open head's attention from the query token: bars, tinted tokens, the whole matrix. page.js follows in one script.
const MARKS = ["#d98200", "#3f9b57", "#a4558a", "#5b6fc4"];
const GLYPHS = { "\n": "⏎", "\t": "→", "\r": "␍", " ": "·" };

function shown(token) {
  return [...token].map((c) => GLYPHS[c] ?? c).join("");
}

function unpacked(packed) {
  return packed.rows.map((row) => row.map((v) => (v * packed.top) / 999));
}

function paintReading() {
  const prompt = DATA.prompts[state.prompt];
  byId("reading").hidden = !prompt;
  if (!prompt) return;
  byId("reading-title").textContent = `Attention of ${state.open} from the query token`;
  byId("prompts").replaceChildren(
    ...DATA.prompts.map((_, i) => button(`Prompt ${i + 1}`, () => ((state.prompt = i), paintReading()), { "aria-pressed": String(i === state.prompt) })),
  );
  const packed = prompt.rows[state.open];
  const row = packed ? unpacked(packed)[0] : prompt.tokens.map(() => 0);
  const top = packed && packed.top > 0 ? packed.top : 1;
  const marks = Object.entries(prompt.marks).map(([name, at], i) => ({ name, at, colour: MARKS[i % MARKS.length] }));
  byId("marks").replaceChildren(
    ...marks.map((m) => el("span", {}, el("span", { class: "swatch", style: { background: m.colour } }), `${m.name}: ${packed ? number(row[m.at], 3) : "–"}`)),
  );
  byId("tokens").replaceChildren(...prompt.tokens.flatMap((token, i) => tokenNodes(token, row[i], top, marks.find((m) => m.at === i))));
  const order = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 5);
  const entropy = -row.reduce((sum, v) => sum + (v > 0 ? v * Math.log(v) : 0), 0);
  const most = order.map((i) => `“${shown(prompt.tokens[i])}” ${number(row[i], 3)}`).join(", ");
  byId("most").textContent = packed
    ? `Effective tokens: ${number(Math.exp(entropy), 1)} of ${row.length} (exp of the entropy). Largest shares: ${most}. The darkest tint is ${number(top, 3)}.`
    : "This head's attention was not recorded for this prompt.";
  drawBars(row, top, marks);
  paintMatrix(prompt, marks);
}

function tokenNodes(token, share, top, mark) {
  const node = el("span", { title: `${number(share, 3)}${mark ? `, ${mark.name}` : ""}` }, shown(token));
  node.style.background = `rgba(0, 114, 178, ${(0.68 * share) / top})`;
  if (mark) {
    node.className = "mark";
    node.style.boxShadow = `0 0 0 2px ${mark.colour}`;
  }
  return token.includes("\n") ? [node, "\n"] : [node];
}

function canvasOf(id, ratio) {
  const canvas = byId(id);
  const dense = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = ratio ? width * ratio : canvas.clientHeight;
  [canvas.width, canvas.height] = [Math.round(width * dense), Math.round(height * dense)];
  const context = canvas.getContext("2d");
  context.scale(dense, dense);
  return [context, width, height];
}

function drawBars(row, top, marks) {
  const [context, width, height] = canvasOf("bars");
  const [left, bottom] = [40, height - 20];
  const step = (width - left) / row.length;
  context.font = "11.5px system-ui, sans-serif";
  for (const m of marks) {
    context.fillStyle = m.colour;
    context.globalAlpha = 0.3;
    context.fillRect(left + m.at * step - 1, 0, Math.max(step, 2) + 2, bottom);
    context.globalAlpha = 1;
    context.fillRect(left + m.at * step - 1, bottom + 2, Math.max(step, 2) + 2, 5);
  }
  context.fillStyle = "#0072b2";
  for (const [i, v] of row.entries()) context.fillRect(left + i * step, bottom - (v / top) * (bottom - 6), Math.max(step - 0.6, 1), (v / top) * (bottom - 6));
  context.fillStyle = "#5c626b";
  context.fillRect(left, bottom, width - left, 1);
  context.textAlign = "right";
  context.fillText(number(top, 2), left - 6, 12);
  context.fillText("0", left - 6, bottom);
  context.textAlign = "left";
  context.fillText("first token", left, height - 4);
  context.textAlign = "right";
  context.fillText("query", width - 14, height - 4);
  const shares = marks.map((m) => `${m.name} ${number(row[m.at], 3)}`).join(", ");
  byId("bars").setAttribute("aria-label", `Shares of ${row.length} tokens; largest ${number(top, 3)}; ${shares}`);
}

function paintMatrix(prompt, marks) {
  const packed = prompt.matrices[state.open];
  const canvas = byId("matrix");
  const available = Object.keys(prompt.matrices);
  canvas.hidden = byId("matrix-at").hidden = !packed;
  byId("matrix-box").hidden = !available.length;
  byId("matrix-title").textContent = `Attention matrix of ${state.open}`;
  if (!packed) {
    const links = available.flatMap((name, i) => [i ? ", " : "", button(name, () => open(name), { class: "link" })]);
    byId("matrix-note").replaceChildren("The matrix is available for these heads: ", ...links);
    return;
  }
  const T = prompt.tokens.length;
  const [context, size] = canvasOf("matrix", 1);
  const image = new ImageData(T, T);
  for (const [t, row] of packed.rows.entries()) {
    for (let s = 0; s < T; s++) {
      const part = s <= t ? Math.sqrt(row[s] / 999) : 0;
      image.data.set(s <= t ? [255 - 255 * part, 255 - 160 * part, 255 - 95 * part, 255] : [243, 244, 246, 255], 4 * (t * T + s));
    }
  }
  const pixels = el("canvas", { width: T, height: T });
  pixels.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(pixels, 0, 0, size, size);
  const cell = size / T;
  for (const m of marks) {
    context.fillStyle = m.colour;
    context.fillRect(m.at * cell, 0, Math.min(cell, 2), m.at * cell); // above the diagonal all shares are 0
    context.fillRect(m.at * cell + cell, m.at * cell, size, Math.min(cell, 2));
  }
  byId("matrix-note").textContent = `Rows: the reading token. Columns: the token that is read. White is 0, dark is ${number(packed.top, 2)}; the scale is the square root. Coloured lines: the marked tokens.`;
  canvas.setAttribute("aria-label", `Attention matrix of ${state.open}, ${T} by ${T} tokens; arrow keys read single shares`);
  const cursor = [T - 1, marks[0] ? marks[0].at : 0];
  const describe = () => {
    const [t, s] = cursor;
    const share = s <= t ? number((packed.rows[t][s] * packed.top) / 999, 3) : "not read, since it comes later";
    byId("matrix-at").textContent = `Token ${t} “${shown(prompt.tokens[t])}” reads token ${s} “${shown(prompt.tokens[s])}”: ${share}`;
  };
  const within = (v) => Math.min(Math.max(v, 0), T - 1);
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    cursor[0] = within(Math.floor(((event.clientY - box.top) / box.height) * T));
    cursor[1] = within(Math.floor(((event.clientX - box.left) / box.width) * T));
    describe();
  };
  canvas.onkeydown = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    cursor.forEach((v, i) => (cursor[i] = within(v + step[i])));
    describe();
  };
  describe();
}
