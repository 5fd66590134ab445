"""The tests of all families over the family of docs/EXTENDING.md, as its page says to run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import ROOT, with_path
from tests.integration.test_extending import block


def test_a_family_from_outside_passes_the_tests_of_all_families(tmp_path: Path) -> None:
    for name in ("twin_hybrid", "twin_family"):
        (tmp_path / f"{name}.py").write_text(block("A model family", f'python title="{name}.py"'))
    tests = [f"tests/integration/test_{name}.py" for name in ("families", "family_hybrids")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "twin_family", "-p", "no:cacheprovider", "-k", "twin"]
    done = subprocess.run([*command, *tests], cwd=ROOT, env=with_path(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0 and "......" in done.stdout, done.stdout[-3000:]
