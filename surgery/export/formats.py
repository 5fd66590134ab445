"""Export formats: write the files of an exported folder, verify them, and describe them in the model card.

Recipes are validated against the registered names, so importing this module does not load torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from surgery.errors import ModelError, RecipeError
from surgery.export.files import RECORD
from surgery.recipe.export import EXPORT_FORMATS
from surgery.registry import load_plugins
from surgery.types import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from surgery.recipe import Export


class ExportFormat(ABC):
    """Format of exported folders. Subclass it and register the class with `@register_export`.

    `export_model` adds the documents (plan, heads, recipe, results, figures, report, README.md) and export.json, which
    lists every file with its size and SHA-256. `verify_folder` checks these for every format.

    Attributes:
        name: value of `export.format` in a recipe. Set by `register_export`.
        summary: the format in a few words, for the model card and `surgery publish`.
        usage: how to load the folder, as Markdown for the model card.
        limits: sentences for the card's section "Limits" and the report, on the software that loads this format.
        library: `library_name` in the model card; None if the Hub knows no library for this format.
        loadable: file suffixes that the format's loader reads, in addition to those that transformers reads. If
            export.json does not list such a file, verification refuses it, and publishing removes it from the Hub.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    usage: ClassVar[str]
    limits: ClassVar[tuple[str, ...]] = ()
    library: ClassVar[str | None] = None
    loadable: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def write(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, section: Export) -> None:
        """Write the model and its tokenizer into an empty folder.

        Args:
            model: on the CPU, in eval mode, its weights in the precision of `section`.
        """

    @abstractmethod
    def verify(self, folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
        """Check a copy of the folder without the original model. It must not run code of the folder by default.

        Args:
            trust_remote_code: the user allows the folder's own code to run.

        Returns:
            Checked quantities, such as `tensors` (their number), `also_checked` and `not_checked`, lists of sentences.
            All optional.

        Raises:
            ModelError: names the file or tensor that is wrong.
        """

    def check_recipe(self, section: Export, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: B027
        """Check before a run that everything is there that `write` needs, such as another program. Optional.

        Raises:
            RecipeError: names the recipe's field and what is missing.
        """

    def check_base(self, config: PreTrainedConfig) -> None:  # noqa: B027
        """Check before a run that this format can hold hybrids of a base. Optional.

        Args:
            config: of the base, which may be a hybrid already.

        Raises:
            RecipeError: names `export.format` and what the format lacks.
        """

    def check(self, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Compare the written folder with the model. Calls `verify` by default.

        Returns:
            Entries for export.json.

        Raises:
            ModelError: the folder holds another model.
        """
        return self.verify(folder)

    def read_plan(self, folder: Path, trust_remote_code: bool = False) -> tuple[str, Plan] | None:
        """Read the splice from the format's own files, to compare it with plan.json, heads.json and README.md.

        Returns:
            The name of the file that contains it, and the plan; None if only plan.json contains it.
        """
        return None


F = TypeVar("F", bound=type[ExportFormat])


def register_export(name: str) -> Callable[[F], F]:
    """Class decorator that registers an `ExportFormat` under `name`.

    Raises:
        RecipeError: another format has this name, or the class lacks a method or an attribute of `ExportFormat`.
    """

    def register(format_class: F) -> F:
        _check_class(name, format_class)
        format_class.name = name
        return EXPORT_FORMATS.register(name, format_class)

    return register


def _check_class(name: str, format_class: type[ExportFormat]) -> None:
    """Raise RecipeError for what an export would find missing only after training."""
    field = f"export format {name}"
    if not issubclass(format_class, ExportFormat):
        raise RecipeError(field, format_class.__name__, "Make it a subclass of surgery.export.formats.ExportFormat.")
    if format_class.__abstractmethods__:
        missing = ", ".join(sorted(format_class.__abstractmethods__))
        raise RecipeError(field, format_class.__name__, f"Add its methods: {missing}.")
    for attribute in ("summary", "usage"):
        if not isinstance(getattr(format_class, attribute, None), str):
            raise RecipeError(f"{field}: {attribute}", "missing", "Set it to a text for the model card.")
    of_suffixes = "Use a tuple of suffixes, such as ('.gguf',): publishing removes other files with them."
    for attribute, hint in (("limits", "Use a tuple of sentences."), ("loadable", of_suffixes)):
        value = getattr(format_class, attribute)
        fits = isinstance(value, tuple | list) and all(isinstance(entry, str) for entry in value)
        if not fits or (attribute == "loadable" and not all(len(s) > 1 and s.startswith(".") for s in value)):
            raise RecipeError(f"{field}: {attribute}", repr(value), hint)


def format_of(record: dict[str, Any], plugins: Sequence[str] = ()) -> ExportFormat:
    """Find the format that export.json, `record`, names.

    The module that export.json names is never imported automatically, since the folder may come from an untrusted
    source.

    Args:
        plugins: modules to import, named by the user. Formats of this library and of installed plugins are known.

    Raises:
        ModelError: no such format is registered. The error names the module that registered it at export.
        RecipeError: a plugin cannot be imported.
    """
    load_plugins(plugins)
    name = record.get("format", "transformers")
    if isinstance(name, str) and name in EXPORT_FORMATS:
        registered: type[ExportFormat] = EXPORT_FORMATS[name]
        return registered()
    module = str(record.get("plugin"))[:80]
    hint = f"Known formats: {', '.join(EXPORT_FORMATS)}. Download it again, or export again."
    if all(part.isidentifier() for part in module.split(".")) and record.get("plugin"):
        hint = f"The plugin {module} wrote it. Install a copy that you trust, then pass --plugin {module}."
    raise ModelError(RECORD, f"unknown format {str(name)[:80]!r}", hint)


def plugin_of(export_format: ExportFormat) -> str | None:
    """The module outside this library that defines the format; None for a format of this library."""
    module = type(export_format).__module__
    return None if module.startswith("surgery.") else module


class _OwnFormat(ExportFormat):
    """A format of this library. Its module loads torch, so it is imported when it is used."""

    library = "transformers"
    module: ClassVar[str]

    def _call(self, function: str, *arguments: Any) -> Any:
        return getattr(import_module(f"surgery.export.{self.module}"), function)(*arguments)

    def write(self, *arguments: Any) -> None:
        self._call("write_folder", *arguments)

    def verify(self, folder: Path, trust_remote_code: bool = False) -> Any:
        return self._call("verify_copy", folder, trust_remote_code)

    def check(self, *arguments: Any) -> Any:
        return self._call("compare_with_model", *arguments)

    def read_plan(self, folder: Path, trust_remote_code: bool = False) -> Any:
        return self._call("plan_in", folder, trust_remote_code)


_NO_ASSISTED_DECODING = "transformers refuses assisted decoding for stateful models."
_SNIPPET = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "."  # this folder, or its id on the Hub
model = AutoModelForCausalLM.from_pretrained(FOLDER{trusted})
tokenizer = AutoTokenizer.from_pretrained(FOLDER{trusted})
inputs = tokenizer("The value of", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=8)[0]))
```

"""


@register_export("transformers")
class TransformersFormat(_OwnFormat):
    """safetensors, config, tokenizer and modelling files, loadable with stock transformers."""

    module = "transformers_folder"
    summary = "safetensors and modelling files for stock transformers"
    limits = (
        _NO_ASSISTED_DECODING,
        "vLLM needs the plugin ssm-surgery-vllm, which serves six families. SGLang loads no head-level hybrid.",
        "Requires transformers 5.24 or newer: older releases have other names of the cache.",
    )
    usage = (
        _SNIPPET.format(trusted=", trust_remote_code=True")
        + """\
`trust_remote_code=True` runs the `*.py` files of this folder. Read them first, and set `revision` when you load from
the Hub. With `pip install ssm-surgery` and `import surgery.hybrid`, transformers runs the installed code instead.
`surgery verify FOLDER` checks a copy."""
    )


@register_export("nemotron_h")
class NemotronHFormat(_OwnFormat):
    """A Nemotron-H of transformers itself: safetensors, config and tokenizer, without modelling files."""

    module = "transformers_folder"
    summary = "safetensors of transformers' own Nemotron-H, without modelling files"
    limits: ClassVar[tuple[str, ...]] = (
        _NO_ASSISTED_DECODING,
        "In bfloat16 and float16, Nemotron-H rounds norms and residual stream more than a base that is a Mamba-2.",
    )
    usage = (
        _SNIPPET.format(trusted="")
        + """\
The folder holds no code: the model is transformers' own class `NemotronHForCausalLM`. `surgery verify FOLDER` checks a
copy."""
    )


@register_export("gguf")
class GGUFFormat(NemotronHFormat):
    """The files of `nemotron_h`, and one for llama.cpp that its own converter writes."""

    module = "gguf_folder"
    summary = "safetensors of transformers' own Nemotron-H, and a GGUF file for llama.cpp"
    limits: ClassVar[tuple[str, ...]] = (
        *NemotronHFormat.limits,
        "llama.cpp splits text into words by a rule of its own. `surgery verify` prints its name.",
    )
    loadable = (".gguf",)
    usage = (
        NemotronHFormat.usage
        + """

llama.cpp loads the file `model.gguf`:

```
llama-server -m model.gguf
```"""
    )

    def check_recipe(self, section: Export, tokenizer: PreTrainedTokenizerBase) -> None:
        self._call("checked_pre_tokenizer", section, tokenizer)

    def check_base(self, config: PreTrainedConfig) -> None:
        self._call("check_base", config)
