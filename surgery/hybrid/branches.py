"""The kinds of attention branch by name, which is `init` in an entry of `config.splice`.

Shipped with every exported checkpoint, so it imports the standard library only.
"""

from collections.abc import Callable
from typing import Any

BUILT_IN = ("ssm", "random", "teacher")  # registered by attention.py and donor.py
BRANCHES: dict[str, type[Any]] = {}


def register_branch(name: str) -> Callable[[type[Any]], type[Any]]:
    """Decorate a subclass of `SplicedAttention`: `splice.init: NAME` then builds it.

    Raises:
        ValueError: another class has this name.
    """

    def register(branch: type[Any]) -> type[Any]:
        present = BRANCHES.get(name, branch)
        if (present.__module__, present.__qualname__) != (branch.__module__, branch.__qualname__):
            taken = f"{present.__module__}.{present.__qualname__}"
            raise ValueError(f"attention branch {name!r}: {taken} has this name already. Choose another name.")
        BRANCHES[name] = branch
        return branch

    return register
