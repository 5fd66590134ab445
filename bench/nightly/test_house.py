"""The script that measures a checkout, on a small tree whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from bench import house, house_source

FILES = {
    "surgery/__init__.py": '"""Light."""\n',
    "surgery/low/__init__.py": "",
    "surgery/low/values.py": """
        class Wide:
            a: int
            b: ClassVar[int]

            def __init__(self):
                self.c, self.d = 1, 2
                self.e = 3
    """,
    "surgery/middle/__init__.py": "from ..low.values import Wide\n",
    "surgery/middle/work.py": '''
        from __future__ import annotations
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from surgery.other import g

        def public(x: int, found: int = 0) -> int:
            """Add.

            Args:
                x: a number.

            Returns:
                More.
            """
            found = _once(x)  # a comment after code
            # a comment
            return _twice(found) + _twice(x) + sum(map(_passed, [x]))

        def _once(x):
            return x
        def _twice(x):
            return x
        def _passed(x):
            return x
    ''',
    "surgery/other.py": """
        def g():
            import surgery.middle.work
    """,
    "surgery/top.py": "import surgery.other\n",
    "surgery/moved.py": """
        import warnings
        from surgery.top import *
        warnings.warn("surgery.moved is deprecated", DeprecationWarning)
    """,
    "bench/a.py": "x = 1\n",
    "tests/test_a.py": "\n# only a comment\n",
    "README.md": dedent("""
        Two words 1,000 and [a link](https://x.org/99) of Mamba-2, 3.5%.
        ```
        fenced 12 words
        ```
        | cell 7 | of a table |
    """),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return tmp_path


def test_layout_and_imports(tree: Path) -> None:
    measured = house.measure(tree, static=True)
    assert measured["layout"] == {"root modules": 3, "old paths": 1, "packages": 2, "modules": 8}
    every, early = measured["imports"]["all"], measured["imports"]["module level"]
    assert every["cycles"] == every["mutual"] == 1 and every["units in cycles"] == "middle, other"
    assert (every["arrows"], every["floors"], every["floors of units"]) == (5, 4, 5)
    assert (early["arrows"], early["cycles"], early["floors"]) == (3, 0, 3)


def test_functions_classes_and_docstrings(tree: Path) -> None:
    sources = house_source.sources_of(tree / "surgery")
    functions = house_source.functions(sources)
    assert (functions["number"], functions["called once"]) == (6, 1)  # _passed is named, not called
    assert (functions["median"], functions["max"], functions["longest"]) == (2, 4, "surgery.middle.work: public")
    wide = house_source.sources_of(tree / "surgery")["surgery.low.values"][1].body[0]
    assert house_source.fields_of(wide) == {"a", "c", "d", "e"}  # type: ignore[arg-type]
    assert house_source.vague_assignments(sources) == {"total": 1, "found": 1}
    documented = house_source.docstrings(sources)
    assert (documented["functions"], documented["functions with a docstring"], documented["classes"]) == (2, 1, 1)
    assert (documented["with parameters"], documented["with Args"], documented["with Returns"]) == (1, 1, 1)


def test_two_measurements_stand_side_by_side(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, seconds = (tree / f"{name}.json" for name in ("before", "after", "seconds"))
    seconds.write_text('{"seconds": 340}')
    house.main([str(tree), "--static", "--json", str(before)])
    house.main([str(tree), "--static", "--json", str(after), "--tests", str(seconds)])
    capsys.readouterr()
    house.main(["--compare", str(before), str(after)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "| measure | before | after |"
    assert "| packages | 2 | 2 |" in printed and "| seconds of `make test` | - | 340 |" in printed
    assert len(printed) == len(house.ROWS) + 2 and json.loads(after.read_text())["tests"] == {"seconds": 340}
