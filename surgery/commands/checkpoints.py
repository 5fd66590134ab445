"""Commands that read, convert, check and upload checkpoints: `surgery inspect`, `generate`, `convert` and others."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from surgery.commands.arguments import Plugins, Runs, TrustRemoteCode
from surgery.commands.progress import Bars, out
from surgery.commands.tables import print_comparison, print_model
from surgery.commands.threads import set_up_cpu
from surgery.errors import SurgeryError, naming, reading
from surgery.recipe import Base


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Print family, mixers, heads, parameters and cache size of a model."""
    from surgery.models.loading import open_checkpoint
    from surgery.models.sizes import meta_model
    from surgery.models.tensor_faults import checked_model

    with naming("MODEL", "base.model"):
        stored = open_checkpoint(Base(model=model, revision=revision, trust_remote_code=trust_remote_code))
        if stored.has_local_weights:
            built = checked_model(stored, trust_remote_code)[0]
        else:  # the config alone can be inspected too
            built = meta_model(stored.config, trust_remote_code)
        print_model(model, stored.config, built)


def generate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder or a Hub id.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Prompt text. \\n stands for a newline.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 16,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of greedy decoding.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Generate text with a checkpoint."""
    set_up_cpu()
    import torch

    from surgery.data.offsets import tokenized
    from surgery.models.loading import check_vocabulary, load_model, load_tokenizer
    from surgery.models.runtime import run_device

    base = Base(model=checkpoint, dtype="auto", trust_remote_code=trust_remote_code).named("CHECKPOINT")
    model, tokenizer = load_model(base).to(run_device()), load_tokenizer(base)  # type: ignore[arg-type]
    with naming("CHECKPOINT", "base.tokenizer"):
        check_vocabulary(tokenizer, model.config)
    (prompt_tokens,) = tokenized(tokenizer, [prompt.replace("\\n", "\n")])
    if not prompt_tokens.ids:
        raise SurgeryError("PROMPT", repr(prompt), "The prompt has no tokens. Pass some text.")
    ids_BT = torch.tensor([prompt_tokens.ids], device=model.device)
    with reading("CHECKPOINT", checkpoint, "Generation failed. Correct config.json and generation_config.json."):
        tokens = model.generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=max_new_tokens, do_sample=sample
        )
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder, Hub id, or repo@revision.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Checkpoint folder to write.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. By default as stored.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that this toolkit wrote.")] = False,
) -> None:
    """Convert a checkpoint to safetensors for transformers. Reads the mamba_ssm format too."""
    from surgery.models.convert import convert as work

    with naming("MODEL", "base.model"):
        done = work(Base(model=model), folder, dtype, overwrite)
    out.print(f"wrote {folder}: {done.tensors} tensors in {done.shards} file(s)")
    if not done.tokenizer:
        out.print(f"note: {model} has no tokenizer, so none was written. Save one into {folder}.")


def compare(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL... [KEY=VALUE]...", help="Checkpoints, then recipe values to set.")
    ],
    runs: Runs = Path("runs"),
) -> None:
    """Evaluate checkpoints on the same prompts. Choose tasks with 'evaluate.tasks=[kv_retrieval]'."""
    set_up_cpu()
    from surgery.run.compare import compare_models, load_comparison

    # A path may contain `=`. A key never contains a slash.
    named = [word for word in models if "=" not in word or "/" in word.split("=")[0] or os.path.isdir(word)]
    loaded = load_comparison(named, [word for word in models if word not in named])
    with Bars() as bars, naming("MODEL", "base.model"):
        results = compare_models(loaded, runs / loaded.name, bars)
    print_comparison(results, runs / loaded.name)


def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An exported folder or a copy of one.")],
    trust_remote_code: TrustRemoteCode = False,
    plugins: Plugins = None,
) -> None:
    """Verify an export: check every file and reload the model in stock transformers."""
    set_up_cpu()
    from surgery.export.verify import verify_folder

    checks = verify_folder(folder, trust_remote_code, plugins or ())
    if checks["files"] is not None:
        out.print(f"{checks['files']} files match the export record")
    if checks["tensors"] is not None:
        out.print(f"{checks['tensors']} tensors are present and finite")
    if checks["agree"]:
        out.print(f"{', '.join(checks['agree'])} agree on the splice")
    if "max_logit_difference" in checks:
        same = f"logits differ by at most {checks['max_logit_difference']:.1g} standard deviations"
        out.print(f"in stock transformers: {same}, {checks['generated_tokens']} generated tokens are equal")
    for sentence in checks.get("also_checked", ()):
        out.print(sentence)
    for sentence in checks["not_checked"]:
        out.print(f"not checked: {sentence}")


def publish(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An exported folder, such as runs/NAME/export.")],
    repo_id: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub. Created if it does not exist.")
    ],
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch to commit to. Created from main if it does not exist.")
    ] = None,
    pr: Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing to main.")] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Verify, and list what would be uploaded.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    plugins: Plugins = None,
) -> None:
    """Upload an export to the Hub (private by default) and verify it. Safe to re-run."""
    set_up_cpu()
    from surgery.export.publish import check_request
    from surgery.export.publish import publish as work
    from surgery.export.verify import check_publishable

    say = partial(out.print, soft_wrap=True)
    if dry_run:
        check_request(repo_id, revision, pr, message)
        for name in check_publishable(folder, trust_remote_code, plugins or (), say)[0]:
            say(f"{(folder / name).stat().st_size:>14,}  {name}")
        say(f"nothing was uploaded to {repo_id}")
        return
    done = work(folder, repo_id, public, revision, pr, message, trust_remote_code, say=say, plugins=plugins or ())
    for label, names in (("removed", done.removed), ("not changed", done.kept)):
        if names:
            say(f"{label}: {', '.join(names)}")
    say(done.url)
