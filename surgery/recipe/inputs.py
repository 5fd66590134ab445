"""Find the local files and folders that a recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgery.recipe.section import Section

# Recipe keys whose value may be a file or folder.
_READ = ("model", "tokenizer", "tokenizer_text", "path", "heads", "chat_template", "llama_cpp")


def inputs_of(recipe: Section, file: Path | None = None) -> dict[str, str]:
    """List the models, tokenizers, heads, data, chat templates and converters that a recipe names.

    Args:
        recipe: any kind of recipe.
        file: the recipe's own file, listed under the key `recipe`.

    Returns:
        Path or Hub id by key, such as `base.model`.
    """
    inputs = {} if file is None else {"recipe": str(file)}

    def walk(prefix: str, data: Any) -> None:
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            if key in _READ and isinstance(value, str):
                inputs[f"{prefix}{key}"] = value
            elif isinstance(value, dict | list):
                walk(f"{prefix}{key}.", value)

    walk("", recipe.model_dump(mode="json"))
    return inputs
