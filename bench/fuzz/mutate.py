"""Structure-aware mutation of plain data, text, bytes, safetensors files and folders, from a random generator."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

from bench.fuzz.values import Values

Tree = Any
Place = tuple[Any, Any]  # a container, and a key or an index of it


class Mutator:
    """Mutations with one generator.

    Args:
        marker: a file that a payload writes; if it is there afterwards, code of the input ran.
    """

    def __init__(self, rng: Random, values: Values, marker: Path) -> None:
        self.rng, self.values, self.marker = rng, values, marker
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """What was done, for the report."""
        self.notes.append(text if len(text) < 200 else text[:200] + "...")

    # Payloads: each writes the marker if it is ever run.

    def python(self) -> str:
        return f"open({str(self.marker)!r}, 'w').close()\n"

    def pickled(self) -> bytes:
        return pickle.dumps({"weight": _Touch(str(self.marker))}, protocol=self.rng.choice((0, 2, 4)))

    def jinja(self) -> str:
        command = f"touch {self.marker}"
        return self.rng.choice((
            f"{{{{ cycler.__init__.__globals__.os.system('{command}') }}}}",
            f"{{% for c in ''.__class__.__mro__[1].__subclasses__() %}}{{% if c.__name__=='Popen' %}}"
            f"{{{{ c('{command}', shell=True) }}}}{{% endif %}}{{% endfor %}}",
        ))  # fmt: skip

    def yaml_tag(self) -> str:
        return self.rng.choice((
            f"!!python/object/apply:os.system ['touch {self.marker}']",
            f"!!python/object/new:subprocess.Popen [['touch', '{self.marker}']]",
            "!!python/name:os.system", "!!python/tuple [1]", "!!binary aGk=", "!!set {a, b}", "!!timestamp 2020-01-01",
        ))  # fmt: skip

    # Values

    def value(self, old: Tree = None) -> Tree:
        """Another value in the place of `old`: a near one, or anything."""
        return json.loads(json.dumps(self._value(old)))

    def _value(self, old: Tree) -> Tree:
        rng = self.rng
        if rng.random() < 0.45:
            near = self._near(old)
            if near is not None:
                return near[0]
        kind = rng.random()
        if kind < 0.35:
            return rng.choice(self.values.trees)
        if kind < 0.6:
            return rng.choice(self.values.texts)
        if kind < 0.9:
            return rng.choice(self.values.numbers)
        return rng.choice((None, True, False, [], {}, [[]], [None], {"a": 1}, [1] * 300, nested(rng.choice((30, 300)))))

    def _near(self, old: Tree) -> tuple[Tree] | None:
        rng = self.rng
        if isinstance(old, bool):
            return (rng.choice((not old, int(old), str(old), None)),)
        if isinstance(old, int | float) and abs(old) < 1e300:
            return (rng.choice((old + 1, old - 1, -old, old * 2, old / 2, float(old), str(old), [old], old * 1000, 0)),)
        if isinstance(old, str):
            cut = rng.randrange(len(old) + 1)
            text = rng.choice(self.values.texts)
            return (
                rng.choice(
                    (old + text, old[:cut], old[:cut] + text + old[cut:], old.upper(), [old], {old: old}, old * 50)
                ),
            )
        if isinstance(old, list):
            return (
                rng.choice(
                    (old * 2, old[::-1], old[:-1], [old], dict(enumerate(old)), len(old), [*old, *old[:1], None])
                ),
            )
        if isinstance(old, dict):
            return (rng.choice((list(old), list(old.items()), [old], dict(list(old.items())[:-1]), str(old))),)
        return None

    # Trees

    def tree(self, data: Tree, times: int | None = None) -> Tree:
        """The data with one to three of its nodes changed, removed, added, renamed or exchanged."""
        holder = [json.loads(json.dumps(data))]
        for _ in range(times or self.rng.choice((1, 1, 1, 2, 3))):
            places = list(_places(holder))
            self._change(self.rng.choice(places), places)
        return holder[0]

    def _change(self, place: Place, places: Sequence[Place]) -> None:
        rng, (container, key) = self.rng, place
        kind = rng.random()
        if kind < 0.55:
            container[key] = self.value(container[key])
            self.note(f"{key!r} -> {container[key]!r}")
        elif kind < 0.7 and len(places) > 1:
            self.note(f"without {key!r}")
            if container is not places[0][0]:
                del container[key]
        elif kind < 0.8 and isinstance(container, dict):
            new = rng.choice((*self.values.texts, *(str(k) for _, k in places)))
            container[new] = container.pop(key) if rng.random() < 0.5 else self.value()
            self.note(f"{key!r} renamed or joined by {new!r}")
        elif kind < 0.9:
            other, where = rng.choice(places)
            container[key], other[where] = json.loads(json.dumps((other[where], container[key])))
            self.note(f"{key!r} and {where!r} exchanged")
        elif isinstance(container, list):
            container.insert(rng.randrange(len(container) + 1), self.value(container[key]))
            self.note(f"an entry beside {key!r}")
        else:
            container[key] = [container[key], self.value()]
            self.note(f"{key!r} in a list")

    # Text and bytes

    def json_bytes(self, data: Tree) -> bytes:
        """Mutated JSON: its structure mostly, its text sometimes."""
        if self.rng.random() < 0.85:
            return _dumps(self.tree(data))
        return self.text(json.dumps(data, indent=1))

    def yaml_bytes(self, data: Tree, text: str) -> bytes:
        """Mutated YAML: its structure, its text, or a trap of the format."""
        kind = self.rng.random()
        if kind < 0.6:
            changed = self.tree(data)
            try:
                return yaml.safe_dump(changed, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
            except (yaml.YAMLError, RecursionError):
                return _dumps(changed)
        if kind < 0.75:
            return self.text(self._yaml_trap(text))
        return self.text(text)

    def _yaml_trap(self, text: str) -> str:
        rng, lines = self.rng, text.splitlines()
        at = rng.randrange(len(lines) + 1)
        trap = rng.choice((
            f"x: {self.yaml_tag()}", f"seed: {self.yaml_tag()}", anchor_bomb(), "a: &a [*a]", "<<: {seed: 1}",
            "<<: [1, 2]",
            "? [1, 2]\n: 3", "? {a: b}\n: 3", "seed: 0x_", "seed: 1_000", "seed: 0o17", "seed: 1:30:00", "---", "...",
            "%YAML 9.9", "\tseed: 1", "seed: " + "[" * 3000, "seed: " + "{a: " * 600, "seed: " + "9" * 5000,
            "seed: .inf",
            "name: " + "x" * 300, "base: {model: \"\\0\"}", "base: {model: ''}", "name: ../up", "name: .", "splice: []",
            "train: null", "&b seed: *b", "- - -", "seed: 2020-13-45", "seed: 0001-01-01T99:99:99Z", "\ufeffseed: 1",
        ))  # fmt: skip
        self.note(f"YAML trap {trap[:60]!r}")
        return "\n".join([*lines[:at], trap, *lines[at:]]) + "\n"

    def text(self, text: str) -> bytes:
        """The text with characters or lines changed, or in another encoding."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.3 and text:
            lines = text.splitlines(keepends=True)
            at = rng.randrange(len(lines))
            change = rng.choice(("again", "gone", "indented", "joined", "swapped"))
            if change == "again":
                lines.insert(at, lines[at])
            elif change == "gone":
                del lines[at]
            elif change == "indented":
                lines[at] = rng.choice((" ", "\t", "    ")) + lines[at]
            elif change == "joined":
                lines[at] = lines[at].rstrip("\n")
            else:
                other = rng.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            self.note(f"line {at + 1} {change}")
            return "".join(lines).encode("utf-8", "surrogatepass")
        if kind < 0.55:
            at = rng.randrange(len(text) + 1)
            new = rng.choice((*self.values.texts, *"{}[]:,#&*!|>'\"%@`\\"))
            self.note(f"{new!r} at character {at}")
            return (text[:at] + new + text[at + rng.choice((0, 1, len(new))) :]).encode("utf-8", "surrogatepass")
        if kind < 0.7:
            encoding = rng.choice(("utf-16", "utf-8-sig", "utf-32", "latin-1", "utf-7"))
            self.note(encoding)
            return text.encode(encoding, "replace")
        return self.bytes(text.encode("utf-8", "surrogatepass"))

    def bytes(self, data: bytes) -> bytes:
        """Flipped, cut, repeated or inserted bytes."""
        rng = self.rng
        at = rng.randrange(len(data) + 1)
        kind = rng.choice(("cut", "flip", "insert", "drop", "zero", "twice", "empty", "head"))
        self.note(f"bytes: {kind} at {at} of {len(data)}")
        if kind == "cut":
            return data[:at]
        if kind == "flip" and data:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 8, 64))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        if kind == "insert":
            return data[:at] + rng.randbytes(rng.choice((1, 2, 16))) + data[at:]
        if kind == "drop":
            return data[:at] + data[at + rng.choice((1, 4, 64)) :]
        if kind == "zero":
            return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]
        if kind == "twice":
            return data * 2
        return b"" if kind == "empty" else rng.randbytes(16) + data[16:]

    # Files of tensors

    def safetensors(self, data: bytes) -> bytes:
        """Another header over the same bytes, other bytes under the same header, or a broken length."""
        rng = self.rng
        (length,) = struct.unpack("<Q", data[:8])
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        kind = rng.random()
        if kind < 0.45:
            text = _dumps(self.tree(header))
        elif kind < 0.75:
            text = self._other_tensor(header)
        elif kind < 0.85:
            number = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, len(data)))
            self.note(f"header length {number}")
            return struct.pack("<Q", number) + data[8:]
        elif kind < 0.93 and body:
            words = bytearray(body)
            bad = struct.pack("<f", rng.choice((float("nan"), float("inf"), 3e38, 1e-40)))
            at = 4 * rng.randrange(len(words) // 4)
            words[at : at + 4] = bad
            self.note(f"number at byte {at} of the tensors")
            return data[: 8 + length] + bytes(words)
        else:
            return self.bytes(data)
        return struct.pack("<Q", len(text)) + text + body

    def _other_tensor(self, header: dict[str, Any]) -> bytes:
        rng = self.rng
        name = rng.choice([key for key in header if key != "__metadata__"])
        entry = header[name]
        start, end = entry["data_offsets"]
        change = rng.choice(("dtype", "shape", "offsets", "twice", "gone", "metadata", "overlap"))
        if change == "dtype":
            entry["dtype"] = rng.choice(
                ("F64", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "", None, 7)
            )
        elif change == "shape":
            size = (end - start) // 4
            entry["shape"] = rng.choice(
                ([size], [1, size], [size, 1, 1], [], [0], [-1, -size], [2**62, 4], [size / 2, 2], "x", None)
            )
        elif change == "offsets":
            pairs = (
                [end, start],
                [start, end + 4],
                [start, end - 4],
                [-4, end],
                [0, 2**63],
                [start],
                [None, end],
                ["0", "1"],
            )
            entry["data_offsets"] = rng.choice(pairs)
        elif change == "overlap":
            entry["data_offsets"] = list(rng.choice(list(header.values())).get("data_offsets", [0, 0]))
        elif change == "metadata":
            header["__metadata__"] = rng.choice(
                ({"format": "tf"}, {"format": 1}, {}, [], None, "pt", {"format": "np"}, {"x": "y" * 9999})
            )
        elif change == "twice":
            header[name + rng.choice(("", ".", "2", "\ud800"))] = entry
        else:
            del header[name]
        self.note(f"tensor {name}: {change}")
        return _dumps(header)

    # Folders

    def place(self, path: Path) -> None:
        """Something else in the place of a file: a link, a folder, nothing."""
        kind = self.rng.choice(
            ("gone", "folder", "link away", "link to itself", "dangling", "link to a device", "fifo", "empty")
        )
        self.note(f"{path.name}: {kind}")
        away = path.with_name(path.name).resolve()
        content = path.read_bytes() if path.is_file() else b""
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link away":
            aside = self.marker.parent / "aside" / away.name
            aside.parent.mkdir(exist_ok=True)
            aside.write_bytes(content)
            path.symlink_to(aside)
        elif kind == "link to itself":
            path.symlink_to(path.name)
        elif kind == "dangling":
            path.symlink_to("nowhere")
        elif kind == "link to a device":
            path.symlink_to("/dev/null")
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "empty":
            path.touch()

    def plant(self, folder: Path) -> None:
        """One more file that a loader might take up, with a payload in it."""
        rng = self.rng
        name = rng.choice((
            "evil.py", "custom_generate/generate.py", "modeling_evil.py", "pytorch_model.bin", "adapter_config.json",
            "adapter_model.bin", "chat_template.jinja", "tokenizer.py", "__init__.py", "conftest.py",
            "sitecustomize.py",
            "torch.py", "training_args.bin", "special_tokens_map.json", "processor_config.json", ".hidden.py",
            "additional_chat_templates/x.jinja", "generation_config.json", "params.json", "consolidated.00.pth",
        ))  # fmt: skip
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() or target.is_symlink():
            target.unlink()
        if name.endswith((".bin", ".pth")):
            target.write_bytes(self.pickled())
        elif name.endswith(".jinja"):
            target.write_text(self.jinja())
        elif name.endswith(".json"):
            target.write_bytes(_dumps(self.tree({"auto_map": self.auto_map(), "peft_type": "LORA", "r": 1,
                                                 "base_model_name_or_path": "x",
                                                 "target_modules": ["in_proj"]})))  # fmt: skip
        else:
            target.write_text(self.python())
        self.note(f"planted {name}")

    def auto_map(self) -> dict[str, Any]:
        """What asks a loader for code: the planted file, by every kind of path."""
        module = self.rng.choice(
            ("evil", "modeling_evil", "../evil", f"{self.marker.parent}/aside/evil", "a/b--evil", "os", ".evil")
        )
        kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoModel")
        return {kind: [None, f"{module}.X"] if kind == "AutoTokenizer" else f"{module}.X" for kind in kinds}


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.path, "w")


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def anchor_bomb(levels: int = 9) -> str:
    """Nine nines of YAML: a billion entries if they are ever written out."""
    lines = ["bomb: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"bomb{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    return "\n".join(lines)


def copy_linked(source: Path, target: Path) -> None:
    """A copy of a folder by hard links; `rewrite` gives a file a body of its own."""
    shutil.copytree(source, target, copy_function=os.link)


def rewrite(path: Path, data: bytes) -> None:
    """Replaces a linked file without touching its original."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _places(holder: list[Any]) -> Iterator[Place]:
    stack: list[Any] = [holder]
    while stack:
        node = stack.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            if isinstance(node[key], dict | list):
                stack.append(node[key])


def _dumps(data: Tree) -> bytes:
    return json.dumps(data).encode()
