"""Cut the sources of the kernel packages to what the models use, and split them into files that compile side by side.

One file of causal-conv1d 1.7.0 holds 1,080 backward kernels: three widths, nine pairs of dtypes. Here every function
and pair of dtypes gets a file, for width 4 and weights in fp32 or in the dtype of the input. From the selective scan of
mamba-ssm 2.3.2, complex A goes, and B and C that are the same for every token. What was cut raises an error that says
so. A source that looks different is refused: the cut might remove what a model needs.
"""

from __future__ import annotations

import re
from pathlib import Path

_WTYPE_FLOAT_OR_INPUT = r"""#define DISPATCH_WTYPE_FLOAT_AND_HALF_AND_BF16(WTYPE, NAME, ...) \\
    if (WTYPE == at::ScalarType::Float) { \\
        using weight_t = float; \\
        __VA_ARGS__(); \\
    } else if (WTYPE == c10::CppTypeToScalarType<input_t>::value) { \\
        using weight_t = input_t; \\
        __VA_ARGS__(); \\
    } else { \\
        TORCH_CHECK(false, "this build of causal_conv1d takes weights in fp32 or in the dtype of the input"); \\
    }
"""
_WTYPE_FLOAT = r"""#define DISPATCH_WTYPE_FLOAT_AND_COMPLEX(WTYPE, NAME, ...) \\
    TORCH_CHECK(WTYPE == at::ScalarType::Float && is_variable_B && is_variable_C, \\
                "this build of mamba_ssm takes real A, and B and C of every token"); \\
    { \\
        using weight_t = float; \\
        __VA_ARGS__(); \\
    }
"""


class UnknownSource(Exception):
    """A source looks different from the version that the cut was written for."""


def cut(package: str, folder: Path) -> None:
    """Change the unpacked source of a package, in place. Packages that need no cut stay as they are.

    Raises:
        UnknownSource: a place to change was not found as often as in the known version.
    """
    if package == "causal_conv1d":
        _cut_causal_conv1d(folder)
    elif package == "mamba_ssm":
        _cut_mamba_ssm(folder)


def _cut_causal_conv1d(folder: Path) -> None:
    narrower = r"if \(params\.width == 2\) \{\n[^}]*\} else if \(params\.width == 3\) \{\n[^}]*\} else "
    for kind, functions in (("fwd", 2), ("bwd", 2), ("update", 1)):
        path = folder / "csrc" / f"causal_conv1d_{kind}.cu"
        _replace(path, narrower, "", functions)
        _split(path, 9 * functions, folder / "setup.py")
    cpp = folder / "csrc" / "causal_conv1d.cpp"
    _replace(cpp, r"width >= 2 && width <= 4, .*\)", 'width == 4, "this build of causal_conv1d takes width 4")', 3)
    _replace(cpp, _macro("DISPATCH_WTYPE_FLOAT_AND_HALF_AND_BF16"), _WTYPE_FLOAT_OR_INPUT, 1)


def _split(path: Path, count: int, setup: Path) -> None:
    """Replace a file of `count` explicit instantiations by a file for each that is kept."""
    instance = re.compile(r"^template void \w+<([\w:]+), ([\w:]+)>\(.*\);$", re.M)
    text = path.read_text()
    found = list(instance.finditer(text))
    _expect(path, instance.pattern, len(found), count)
    names = []
    for i, one in enumerate(found):
        if one[2] in ("float", one[1]):
            part = path.with_name(f"{path.stem}_{i}.cu")
            part.write_text(f"{text[: found[0].start()]}\n{one[0]}\n")
            names.append(f'"csrc/{part.name}"')
    _replace(setup, f'"csrc/{path.name}"', ", ".join(names), 1)


def _cut_mamba_ssm(folder: Path) -> None:
    scan = folder / "csrc" / "selective_scan"
    for dtype in ("fp32", "fp16", "bf16"):
        _replace(scan / f"selective_scan_fwd_{dtype}.cu", r"^template void .*, complex_t>.*;", "", 1)
        _replace(folder / "setup.py", f'"csrc/selective_scan/selective_scan_bwd_{dtype}_complex.cu",', "", 1)
    for kind in ("fwd", "bwd"):
        for name in ("B", "C"):
            switch = rf"BOOL_SWITCH\(params\.is_variable_{name}, kIsVariable{name}, \[&\] \{{"
            always = f"[&] {{ static constexpr bool kIsVariable{name} = true;"
            # The switch ends in `});`, which would pass the lambda on; the call of a lambda ends in `}();`.
            path = scan / f"selective_scan_{kind}_kernel.cuh"
            _replace(path, switch, f"ALWAYS({always}", 1)
        _replace(
            path, r'#include "static_switch\.h"', '#include "static_switch.h"\n#define ALWAYS(...) __VA_ARGS__()', 1
        )
    _replace(scan / "selective_scan.cpp", _macro("DISPATCH_WTYPE_FLOAT_AND_COMPLEX"), _WTYPE_FLOAT, 1)


def _macro(name: str) -> str:
    """Pattern of a definition, to its last line."""
    return rf"#define {name}\(.*\\\n(?:.*\\\n)+.*\n"


def _replace(path: Path, pattern: str, new: str, count: int) -> None:
    """Replace a pattern in a file that holds it `count` times."""
    if not path.is_file():
        raise UnknownSource(f"there is no {path.name}")
    text, found = re.subn(pattern, new, path.read_text(), flags=re.M)
    _expect(path, pattern, found, count)
    path.write_text(text)


def _expect(path: Path, pattern: str, found: int, count: int) -> None:
    if found != count:
        raise UnknownSource(f"{path.name} holds {pattern!r} {found} times, not {count}")
