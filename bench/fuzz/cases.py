"""Build cases: one function for each kind of input mutates it and names the command that reads it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from bench.fuzz.corpus import BASE, EXPORT, RECIPES, TINY, Corpus
from bench.fuzz.mutate import Mutator, anchor_bomb, copy_linked, rewrite
from bench.fuzz.values import Values

SMALL_RUN = (
    f"base.model={BASE}",
    "train.steps=2",
    "train.sources=[{task: sentence, split: 0, rows: 2, weights: {base_kl: 1.0}}]",
)
FEW = ("evaluate.tasks=[kv_retrieval]", "evaluate.pairs=[2]", "evaluate.examples=2", "evaluate.sentences=2")
ODD = ("", "-", "--", "--help", "--version", "--runs", "--no-such", "-x", "\udcff\udcfe", "\U0001f40d", "a=b", "=",
       "a" * 300,
       "no/such/folder", "./link", "m", "f.json", "--dtype", "float8", "--overwrite", "--max-new-tokens", "0", "-1",
       "1e9",
       "--from", "--to", "train", "lunch", "--sample", "--dry-run", "name=.", "name=..", "name=a/b", "name=m",
       "seed=-1", "x\x00"[:1],
       "org/x@", "org/x@main", "org/x", "a/b/c", "@", "./m@main", "~", "%s", "\n", "$(id)", "\x1b[2J\x07", "\x9b31m/x",
       "splice=null",
       "train.steps=0")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One command in one folder.

    Attributes:
        arguments: of `surgery`, started inside the folder.
        writes: what the command may write there, whole or not at all.
        notes: what was mutated.
        cold: started as a user starts it, rather than forked.
    """

    target: str
    arguments: tuple[str, ...]
    writes: tuple[str, ...]
    notes: tuple[str, ...]
    cold: bool = False


@dataclass
class Bench:
    """What a target builds a case with; `folder` is empty and its own."""

    folder: Path
    corpus: Corpus
    mutate: Mutator

    @property
    def rng(self) -> Random:
        return self.mutate.rng

    def linked(self, source: Path, name: str = "m") -> Path:
        """A copy of a good folder in the case's own."""
        copy_linked(source, self.folder / name)
        return self.folder / name

    def change(self, path: Path, mutation: Callable[[bytes], bytes]) -> None:
        """Mutates one file."""
        self.mutate.note(f"in {path.name}:")
        rewrite(path, mutation(path.read_bytes()))

    def json(self, path: Path, **fields: Any) -> None:
        """Mutates one JSON file, with these fields set before where it holds an object; other files as bytes."""
        try:
            data = json.loads(path.read_bytes())
        except ValueError:
            self.change(path, self.mutate.bytes)
            return
        if isinstance(data, dict):
            data |= fields
        self.change(path, lambda _: self.mutate.json_bytes(data))


Built = tuple[tuple[str, ...], tuple[str, ...]]


def recipes(bench: Bench) -> Built:
    """A recipe file, mutated as text or as data."""
    rng, name = bench.rng, bench.rng.choice(sorted(bench.corpus.recipes))
    dry = rng.random() < 0.15
    name = rng.choice(("quickstart.yaml", "finetune.yaml")) if dry else name
    text = bench.corpus.recipes[name]
    shutil.copyfile(bench.corpus.folder("data") / "rows.jsonl", bench.folder / "tickets.jsonl")  # of finetune.yaml
    (bench.folder / "r.yaml").write_bytes(bench.mutate.yaml_bytes(yaml.safe_load(text), text))
    return (("run", "r.yaml", "--dry-run") if dry else ("validate", "r.yaml")), ()


def overrides(bench: Bench) -> Built:
    """Good recipes, mutated `key=value` arguments."""
    rng, mutate = bench.rng, bench.mutate
    given = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice(bench.corpus.keys) if rng.random() < 0.85 else rng.choice(mutate.values.texts)
        kind = rng.random()
        if kind < 0.2:
            key += rng.choice((".", ".x", ".0", ".-1", ".99", "..", ".0.0", "[0]", ".\u0661", " ", ".1e1"))
        if kind < 0.75:
            value = rng.choice((json.dumps(mutate.value()), str(mutate.value())))
        else:
            value = rng.choice((
                mutate.yaml_tag(), anchor_bomb().replace("\n", ", ").join("{}"), "[" * 3000, "{a: " * 500,
                "&a [*a]", "*a", "{<<: 1}",
                "? [1]: 2", "!!int x", "9" * 5000, "0x", "1:99:99", "2020-13-45", "!<x> 1", "%a", "@", "`",
                "{1: 2, 1: 3}", "{[1]: 2}",
                "{? {a: b} : 1}", "'", '"\\ud800"', "[1, 2", "!!float nan", "~", "- 1", "|", ">", "null", "{}", "[]",
            ))  # fmt: skip
        given.append(f"{key}={value}".replace("\x00", ""))
    mutate.note(f"overrides {given}")
    if rng.random() < 0.1:
        return ("run", str(RECIPES / "quickstart.yaml"), *SMALL_RUN, *given, "--dry-run"), ()
    recipe = rng.choice(("quickstart", "finetune", "zamba2-7b", "llamba-8b-reproduce", "pretrain-pico", "mamba2-130m"))
    return ("validate", str(RECIPES / f"{recipe}.yaml"), *given), ()


def configs(bench: Bench) -> Built:
    """config.json of every family, plain and spliced."""
    rng = bench.rng
    source = rng.choice([*bench.corpus.folders("models/*", "mamba_ssm/*"), BASE, EXPORT])
    folder = bench.linked(source)
    config = folder / "config.json"
    data = json.loads(config.read_bytes())
    if rng.random() < 0.1:
        data["auto_map"] = bench.mutate.auto_map()
        bench.mutate.plant(folder)
    if rng.random() < 0.3 and data.get("splice"):
        data["splice"] = bench.mutate.tree(data["splice"], 1)
    bench.change(config, lambda _: bench.mutate.json_bytes(data))
    kind = rng.random()
    if kind < 0.72 or not list(folder.glob("*.safetensors")):
        return ("inspect", "./m"), ()
    if kind < 0.8:
        return ("run", str(RECIPES / "quickstart.yaml"), *SMALL_RUN, "base.model=./m", "--dry-run"), ()
    if kind < 0.9:
        return ("generate", "./m", "a 7", "--max-new-tokens", "2"), ()
    return ("convert", "./m", "out"), ("out",)


def tokenizers(bench: Bench) -> Built:
    """Tokenizer files beside a good model."""
    rng, mutate = bench.rng, bench.mutate
    source = rng.choice((BASE, bench.corpus.folder("sharded"), bench.corpus.folder("hybrid")))
    folder = bench.linked(source)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "tokenizer_config.json",
                           "special_tokens_map.json",
                           "added_tokens.json", "chat_template.jinja", "generation_config.json"))  # fmt: skip
        path = folder / name
        if not path.exists():
            rewrite(
                path,
                mutate.jinja().encode()
                if name.endswith("jinja")
                else b'{"pad_token": "<pad>", "eos_token": {"content": "x"}}',
            )
        if path.is_file() and rng.random() < 0.1:
            mutate.place(path)
        elif name == "tokenizer_config.json" and path.is_file():
            extra = {"auto_map": mutate.auto_map(), "chat_template": mutate.jinja(), "tokenizer_class": "X",
                     "pad_token": None,
                     "added_tokens_decoder": {"7": {"content": "x"}}, "model_max_length": 3,
                     "tokenizer_file": "/etc/hosts"}  # fmt: skip
            bench.json(path, **{key: extra[key] for key in rng.sample(sorted(extra), 2)})
        elif path.is_file():
            bench.change(path, mutate.bytes if name.endswith("jinja") else lambda raw: _tokenizer(mutate, raw))
    kind = rng.random()
    if kind < 0.8:
        return ("generate", "./m", "a 7", "--max-new-tokens", "2"), ()
    if kind < 0.9 and source == BASE:
        return ("locate", str(RECIPES / "quickstart.yaml"), *TINY, "base.model=./m"), ("runs",)
    return ("run", str(RECIPES / "quickstart.yaml"), *SMALL_RUN, "base.model=./m", "--dry-run"), ()


def _tokenizer(mutate: Mutator, raw: bytes) -> bytes:
    """Mutated outside its long lists mostly; sometimes with tokens that the model has no rows for."""
    try:
        data = json.loads(raw)
    except ValueError:
        return mutate.bytes(raw)
    vocabulary = data.get("model", {}).get("vocab") if isinstance(data, dict) else None
    if isinstance(vocabulary, dict) and mutate.rng.random() < 0.25:
        word = mutate.rng.choice(sorted(vocabulary))
        vocabulary[word] = mutate.rng.choice((-1, 5000, 2**31, 2**63, None, "7", 1.5))
        mutate.note(f"token {word!r} is {vocabulary[word]}")
        return json.dumps(data).encode()
    if isinstance(data, dict) and mutate.rng.random() < 0.7:
        part = mutate.rng.choice(sorted(data))
        data[part] = mutate.tree(data[part])
        return json.dumps(data).encode()
    return mutate.json_bytes(data)


def weights(bench: Bench) -> Built:
    """Files of tensors: safetensors and pickles."""
    rng, mutate = bench.rng, bench.mutate
    families = [path.parent for path in bench.corpus.folders("models/*/model.safetensors")]
    folder = bench.linked(rng.choice([*families,
                                      *bench.corpus.folders("mamba_ssm/*", "sharded", "hybrid")]))  # fmt: skip
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    path = rng.choice(files)
    kind = rng.random()
    if kind < 0.1:
        mutate.place(path)
    elif path.suffix == ".safetensors":
        bench.change(path, mutate.safetensors)
    elif kind < 0.4:
        bench.change(path, lambda _: mutate.pickled())
    else:
        bench.change(path, mutate.bytes)
    return _load(bench)


def _load(bench: Bench) -> Built:
    kind = bench.rng.random()
    if kind < 0.5:
        dtype = bench.rng.choice(((), (), ("--dtype", "float16"), ("--dtype", "bfloat16")))
        return ("convert", "./m", "out", *dtype), ("out",)
    return ("generate", "./m", "a 7", "--max-new-tokens", "2"), ()


def indexes(bench: Bench) -> Built:
    """Index files of shards."""
    rng, mutate = bench.rng, bench.mutate
    folder = bench.linked(rng.choice([bench.corpus.folder("sharded"), *bench.corpus.folders("mamba_ssm/*sharded*")]))
    index = next(folder.glob("*.index.json"))
    data = json.loads(index.read_bytes())
    if rng.random() < 0.4:
        name = rng.choice(sorted(data["weight_map"]))
        aside = mutate.marker.parent / "aside"
        aside.mkdir()
        shutil.copyfile(folder / data["weight_map"][name], aside / "w.safetensors")
        (folder / "link.safetensors").symlink_to(aside / "w.safetensors")
        data["weight_map"][name] = rng.choice((
            "../aside/w.safetensors", str(aside / "w.safetensors"), "link.safetensors", "/dev/null", "/dev/zero",
            ".", "", "config.json",
            "no.safetensors", "x\u0000y", 7, None, [], {}, True, 1e400, "\ud800.safetensors", "a" * 400,
        ))  # fmt: skip
        mutate.note(f"{name} in {data['weight_map'][name]!r}")
        rewrite(index, json.dumps(data).encode())
    else:
        bench.change(index, lambda _: mutate.json_bytes(data))
    return _load(bench)


def exports(bench: Bench) -> Built:
    """Any file of an export; in half of the cases its record is written anew, so that the hashes agree."""
    rng, mutate = bench.rng, bench.mutate
    folder = bench.linked(EXPORT, "export")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".png", ".html"))
    for path in rng.sample(files, rng.choice((1, 1, 2))):
        kind = rng.random()
        if not path.is_file():
            continue
        if kind < 0.12:
            mutate.place(path)
        elif kind < 0.24:
            mutate.plant(folder)
        elif path.suffix == ".safetensors":
            bench.change(path, mutate.safetensors)
        elif path.suffix == ".json":
            asks = path.name == "config.json" and rng.random() < 0.4
            if asks and rng.random() < 0.5:
                _set_aside(bench, folder)
            bench.json(path, **({"auto_map": mutate.auto_map()} if asks else {}))
        elif path.suffix == ".py":
            bench.change(path, lambda raw: raw + b"\n" + mutate.python().encode())
        else:
            bench.change(path, lambda raw: mutate.text(raw.decode()))
    if rng.random() < 0.6:
        _list_anew(bench, folder)
    if rng.random() < 0.85:
        return rng.choice((("verify", "./export"), ("publish", "./export", "a/b", "--dry-run"))), ()
    return ("generate", "./export", "a 7", "--max-new-tokens", "2"), ()


def _set_aside(bench: Bench, folder: Path) -> None:
    """The planted module lies outside, or behind a link."""
    aside = bench.mutate.marker.parent / "aside"
    aside.mkdir(exist_ok=True)
    (aside / "evil.py").write_text(bench.mutate.python())
    if bench.rng.random() < 0.5:
        (folder / bench.rng.choice(("linked", "custom_generate"))).symlink_to(aside)


def _list_anew(bench: Bench, folder: Path) -> None:
    path = folder / "export.json"
    try:
        record = json.loads(path.read_bytes())
        record["files"] = {}
        for file in sorted(p for p in folder.rglob("*") if p.is_file() and p != path):
            data = file.read_bytes()
            record["files"][file.relative_to(folder).as_posix()] = {
                "sha256": hashlib.sha256(data).hexdigest(),
                "size": len(data),
            }
        if bench.rng.random() < 0.2:
            record["files"] = bench.mutate.tree(record["files"], 1)
        rewrite(path, json.dumps(record).encode())
        bench.mutate.note("listed anew in export.json")
    except (ValueError, TypeError, OSError):
        pass


def runs(bench: Bench) -> Built:
    """Files of a finished run, and the stages that read them."""
    rng = bench.rng
    bench.linked(bench.corpus.folder("runs"), "runs")
    folder = bench.folder / "runs" / "quickstart"
    files = [*sorted(folder.glob("*.json")), *sorted(folder.glob(".stages/*.json")), folder / "heads.json",
             folder / "plan.json",
             folder / "plan.json", folder / "recipe.yaml", folder / "spliced" / "config.json",
             folder / "trained" / "config.json"]  # fmt: skip
    path = rng.choice(files)
    if rng.random() < 0.08:
        bench.mutate.place(path)
    elif path.suffix == ".json":
        bench.json(path)
    else:
        bench.change(path, lambda raw: bench.mutate.text(raw.decode()))
    command = rng.choice(("plan", "plan", "splice", "splice", "train", "evaluate", "export", "run", "run", "dry"))
    if command == "dry":
        return ("run", str(RECIPES / "quickstart.yaml"), *TINY, "--dry-run"), ()
    return (command, str(RECIPES / "quickstart.yaml"), *TINY), ("runs",)


def data(bench: Bench) -> Built:
    """Documents of the user's own, as JSONL and Parquet."""
    rng, mutate = bench.rng, bench.mutate
    if rng.random() < 0.3:
        source = rng.choice(bench.corpus.folders("data/*.parquet"))
        path = bench.folder / source.name
        path.write_bytes(mutate.bytes(source.read_bytes()) if rng.random() < 0.5 else source.read_bytes())
    else:
        lines = [json.loads(line) for line in bench.corpus.folder("data/rows.jsonl").read_text().splitlines()]
        path = bench.folder / rng.choice(("d.jsonl", "d.jsonl", "d.jsonl", "d.json", "d.txt", "d", "\udcff.jsonl"))
        if rng.random() < 0.6:
            for _ in range(rng.choice((1, 1, 3))):
                at = rng.randrange(len(lines))
                lines[at] = mutate.tree(lines[at])
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            path.write_bytes(mutate.text("".join(json.dumps(line) + "\n" for line in lines)))
    given = ["train.steps=1", "train.sources.0.rows=2",
             "train.sources.1={task: sentence, split: 0, rows: 1, weights: {base_kl: 1.0}}",
             *(f"train.sources.{i}.rows=1" for i in (2, 3))]  # fmt: skip
    if rng.random() < 0.6:
        given += ["train.sources.0.data.columns.answer_span=null", "train.sources.0.weights.attention=0"]
    if rng.random() < 0.3:
        key = rng.choice(
            (
                "columns",
                "holdout",
                "on_bad_row",
                "split",
                "streaming",
                "name",
                "columns.text",
                "columns.prompt",
                "limit",
            )
        )
        given.append(f"train.sources.0.data.{key}={json.dumps(mutate.value())}".replace("\x00", ""))
    hybrid = bench.corpus.folder("hybrid")
    if rng.random() < 0.15:  # templates are rendered for such data
        hybrid = bench.linked(hybrid)
        (hybrid / "chat_template.jinja").write_text(mutate.jinja())
        given.append("train.sources.0.data.chat_template=true")
    arguments = ("finetune", str(hybrid), path.name, *given)
    if rng.random() < 0.35:
        return (*arguments, "--dry-run"), ()
    return (*arguments, "--to", "train"), ("runs",)


def comparisons(bench: Bench) -> Built:
    """Mutated checkpoints and settings side by side."""
    rng = bench.rng
    folder = bench.linked(rng.choice((bench.corpus.folder("sharded"), bench.corpus.folder("hybrid"))))
    given = list(FEW)
    if rng.random() < 0.5:
        name = rng.choice(("config.json", "tokenizer.json", "tokenizer_config.json"))
        bench.change(folder / name, lambda raw: bench.mutate.json_bytes(json.loads(raw)))
    else:
        key = rng.choice(("evaluate.tasks", "evaluate.pairs", "evaluate.examples", "name", "seed", "dtype",
                          "evaluate", "models",
                          "evaluate.generate", "evaluate.batch_size", "evaluate.efficiency",
                          "evaluate.sentences"))  # fmt: skip
        given.append(f"{key}={json.dumps(bench.mutate.value())}".replace("\x00", ""))
    other = rng.choice((str(bench.corpus.folder("hybrid")), "./m", "./m/", "m=1", "no/such"))
    return ("compare", "./m", *([other] if rng.random() < 0.5 else []), *given), ("runs",)


def arguments(bench: Bench) -> Built:
    """Command lines; nothing here reaches a folder that is not the case's own."""
    rng = bench.rng
    bench.linked(bench.corpus.folder("hybrid"))
    (bench.folder / "f.json").write_text("{}")
    (bench.folder / "link").symlink_to("m")
    recipe = str(RECIPES / "quickstart.yaml")
    good: dict[str, list[str]] = {
        "validate": [recipe], "inspect": ["./m"], "verify": ["./m"], "convert": ["./m", "out"], "compare": ["./m",
        *FEW],
        "generate": ["./m", "a 7", "--max-new-tokens", "1"], "run": [recipe, *SMALL_RUN, "--dry-run"], "schema": [],
        "finetune": ["./m", "d.jsonl", "--dry-run"], "plan": [recipe, *TINY], "locate": [recipe, *TINY],
        "export": [recipe, *TINY],
        "analyse": [recipe], "publish": ["./m"], "nonsense": [],
    }  # fmt: skip
    command = rng.choice(sorted(good))
    given = list(good[command])
    for _ in range(rng.choice((1, 1, 2, 3))):
        # What makes a run tiny stays: real work takes longer than the limit.
        change = "add" if TINY[1] in given else rng.choice(("add", "add", "drop", "put", "twice", "swap"))
        at = rng.randrange(len(given) + 1)
        odd = rng.choice(ODD)
        if change == "add" or not given:
            given.insert(at, odd)
        elif change == "drop":
            del given[at - 1]
        elif change == "put":
            given[at - 1] = odd
        elif change == "twice":
            given.insert(at, given[at - 1])
        else:
            given[0], given[at - 1] = given[at - 1], given[0]
    if command == "run" and "--dry-run" not in given:
        given.append("--dry-run")
    if command == "publish":
        given = [word for word in given if word != "--trust-remote-code"]
    bench.mutate.note(f"arguments {given}")
    return (command, *given), ("runs", "out", *_named(given))


def _named(words: list[str]) -> tuple[str, ...]:
    """What an argument may name for output: its first part."""
    parts = {word.removeprefix("./").split("/")[0] for word in words}
    return ("quickstart", "compare", *sorted(parts - {"", ".", "..", "m", "link", "f.json"}))


def folders(bench: Bench) -> Built:
    """What a stranger left in the place of a lock, a mark, a temporary folder or an output. It has to stay as it is."""
    rng = bench.rng
    bench.linked(bench.corpus.folder("hybrid"))
    (bench.folder / "dear").write_text("{}")
    for name in rng.sample((".out.lock", ".out.7.tmp", ".out.2024.old", "out", "out/.surgery.json", "out/.lock",
                            ".out.surgery-7.tmp/.surgery.json", "out/export.json"), rng.choice((1, 2, 3))):  # fmt: skip
        path = bench.folder / name
        if os.path.lexists(path) or not (path.parent.is_dir() or not os.path.lexists(path.parent)):
            continue
        path.parent.mkdir(exist_ok=True)
        path.write_text(rng.choice(("", "{", '{"kind": "model"}', '{"pid": 1, "host": "\\u001b[2J"}', "notes")))
        if rng.random() < 0.3:
            path.unlink()
            os.link(bench.folder / "dear", path)
            bench.mutate.note(f"{name}: another name of a file")
        elif rng.random() < 0.8:
            bench.mutate.place(path)
    return rng.choice((("convert", "./m", "out", "--overwrite"), ("examples", "out"), ("show", "out"))), ("out",)


# How often each is drawn, in a hundred.
TARGETS: dict[Callable[[Bench], Built], int] = {
    recipes: 15, overrides: 12, configs: 15, tokenizers: 9, weights: 10, indexes: 5, exports: 13, runs: 4, data: 4,
    comparisons: 3,
    arguments: 5, folders: 5,
}  # fmt: skip
NAMES = tuple(target.__name__ for target in TARGETS)
_COLD = ("validate", "--version", "schema")


def target_of(seed: int, number: int) -> Callable[[Bench], Built]:
    """Which target a case belongs to; the same whatever is left out."""
    return Random(f"{seed}:{number}:target").choices(list(TARGETS), weights=list(TARGETS.values()))[0]


def build(seed: int, number: int, place: Path, corpus: Corpus, values: Values) -> Case:
    """Writes the inputs of a case into `place`/work."""
    rng = Random(f"{seed}:{number}")
    folder = place / "work"
    folder.mkdir(parents=True)
    mutate = Mutator(rng, values, place / "marker")
    target: Callable[[Bench], Any] = target_of(seed, number)
    given, writes = target(Bench(folder, corpus, mutate))
    cold = given[0] in _COLD and rng.random() < 0.12
    given = tuple(os.fsdecode(word.replace("\x00", "").encode("utf-8", "surrogatepass")) for word in given)
    return Case(target.__name__, given, writes, tuple(mutate.notes), cold)
