"""Exports that somebody has changed, with a list of files that fits."""

import json
from hashlib import sha256
from pathlib import Path


def list_again(folder: Path) -> None:
    """Write the present hashes into export.json, as whoever changes an export on purpose would."""
    record = json.loads((folder / "export.json").read_text())
    for name in record["files"]:
        content = (folder / name).read_bytes()
        record["files"][name] = {"sha256": sha256(content).hexdigest(), "size": len(content)}
    (folder / "export.json").write_text(json.dumps(record))
