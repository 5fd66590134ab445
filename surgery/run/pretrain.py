"""Pretrain the small bases of this repository. A pretraining that was killed resumes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from surgery.data.files import local_files
from surgery.data.tokenizer import build_tokenizer
from surgery.errors import RunError, SurgeryError, reading
from surgery.evaluate.evaluation import evaluate_model, mark_seen
from surgery.evaluate.prompts import make_prompts
from surgery.files.atomic import delete, digest, fingerprint, new_folder, read_mapping, sweep, write_json, write_text
from surgery.files.lock import hold
from surgery.files.ownership import check_replaceable, kind_of, mark
from surgery.probes.registry import PROBES
from surgery.recipe import PretrainRecipe, TinyMamba2, TinyTransformer, to_yaml
from surgery.recipe.inputs import inputs_of
from surgery.recipe.public import public_recipe
from surgery.report.progress_lines import ProgressLines
from surgery.report.results import cell_of, entries, label_of
from surgery.run.evaluate_stage import versions
from surgery.train.training import make_accelerator, train_model


def build_model(shape: TinyMamba2 | TinyTransformer, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Initialise a small model from the section `model` of a recipe, with the tokenizer's vocabulary."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    common |= shape.model_dump(exclude={"kind", "vocab_size", "looks_back", "time_step", "decay"})
    if isinstance(shape, TinyTransformer):
        llama = LlamaForCausalLM(LlamaConfig(attention_bias=bool(shape.looks_back), **common))
        if shape.looks_back:
            _look_back(llama, shape.looks_back)
        return llama
    # With the usual initialisation (dt of 0.001 to 0.1, A of 1 to H), a head reads a hundredth as much from its state
    # as passes through the skip connection D. Only long runs overcome this, so dt is larger here and A smaller.
    common |= dict(zip(("time_step_min", "time_step_max"), shape.time_step, strict=True))
    model = Mamba2ForCausalLM(Mamba2Config(num_heads=2 * shape.hidden_size // shape.head_dim, **common))
    with torch.no_grad():
        for block in model.backbone.layers:
            a_log = block.mixer.A_log
            a_log.copy_(torch.linspace(*(math.log(a) for a in shape.decay), a_log.shape[-1]))
    return model


@torch.no_grad()
def _look_back(model: LlamaForCausalLM, offsets: tuple[int, ...]) -> None:
    """Set biases so that head h of layer 0 reads the token `offsets[h]` places before its query.

    The bias of the key is one direction, rotated by the key's position. The bias of the query is the same direction,
    rotated back by `offsets[h]` places. Their product is largest where the rotations agree, by about 4 over the
    neighbouring places.
    """
    attention, frequencies = model.model.layers[0].self_attn, model.model.rotary_emb.inv_freq
    width = attention.head_dim
    size = math.sqrt(4.0 * math.sqrt(width) / float((1 - frequencies.cos()).sum()))
    zeros = torch.zeros_like(frequencies)
    for head, offset in enumerate(offsets):
        rows, turn = slice(head * width, (head + 1) * width), -offset * frequencies
        attention.k_proj.bias[rows] = size * torch.cat([zeros + 1, zeros])
        attention.q_proj.bias[rows] = size * torch.cat([turn.cos(), turn.sin()])


def pretrain(
    recipe: PretrainRecipe,
    folder: Path,
    reporter: ProgressLines | None = None,
    overwrite: bool = False,
    file: Path | None = None,
) -> None:
    """Pretrain a base from scratch, and write its checkpoint folder atomically.

    Args:
        recipe: the validated recipe.
        folder: checkpoint folder. `FOLDER.steps` next to it has the checkpoints to resume from.
        reporter: receives progress.
        overwrite: replace a model that this toolkit wrote into `folder`. `file`, the recipe's, must not lie there.

    Raises:
        RunError: the folder has other files, or a model and `overwrite` is not set; another process writes into it;
            `FOLDER.steps` has other files.
        TrainingDiverged: loss or gradient is not finite, or the loss has grown.
    """
    with hold(folder, "--to"):
        if check_replaceable("--to", folder, "model", inputs_of(recipe, file)) and not overwrite:
            hint = "The folder already holds a model. Set another folder, or pass --overwrite."
            raise RunError("--to", str(folder), hint)
        _pretrain(recipe, folder, reporter or ProgressLines())


def _pretrain(recipe: PretrainRecipe, folder: Path, reporter: ProgressLines) -> None:
    accelerator = make_accelerator()
    if accelerator.num_processes > 1:
        hint = "Pretraining runs in one process. Launch it without torchrun."
        raise RunError("num_processes", accelerator.num_processes, hint)
    text = ""  # that the tokenizer is trained on, besides generated text
    if recipe.tokenizer_text is not None:
        with reading("tokenizer_text", recipe.tokenizer_text, "Use a text file in UTF-8.", RunError):
            text = Path(recipe.tokenizer_text).read_text(encoding="utf-8")
    tokenizer = build_tokenizer(recipe.model.vocab_size, text)
    model = build_model(recipe.model, tokenizer, recipe.seed)
    steps = folder.with_name(folder.name + ".steps")
    if steps.is_dir() and not steps.is_symlink():
        sweep(steps)  # a mark that a killed process was writing
    if steps.is_symlink() or (any(steps.glob("*")) and kind_of(steps) != "checkpoints"):
        raise RunError("--to", str(folder), f"{steps} is no folder of pretraining checkpoints. Set another folder.")
    for entry in steps.glob("*"):  # the folder is deleted at the end
        if not re.match(r"(broken_)?step_\d|\d+-|(scores|inputs)\.json$|\.", entry.name):
            raise RunError("--to", str(folder), f"{entry} is not a pretraining checkpoint. Set another folder.")
    mark(steps, "checkpoints")
    prompts = make_prompts(recipe.evaluate, recipe.seed, tokenizer=tokenizer)
    inputs_file = steps / "inputs.json"
    data = [file for own in recipe.train.own_data for file in local_files(own)]
    # What the first weights and the documents depend on, besides the section `train`.
    begin = [recipe.model.model_dump(mode="json"), recipe.seed, tokenizer.backend_tokenizer.to_str()]
    inputs = {"model": fingerprint([*begin, digest(*data) if data else ""])}
    begun = any(steps.rglob("step_*"))  # those of stages lie in folders of their own
    if begun and read_mapping(inputs_file).get("model", inputs["model"]) != inputs["model"]:
        hint = f"{steps} has checkpoints of another model, tokenizer or data. Delete it, or set another folder."
        raise RunError("--to", str(folder), hint)
    write_json(inputs_file, inputs)

    def on_step(step: int, entries: list[dict[str, float]]) -> None:
        reporter.progress(step, recipe.train.num_all_steps, f"loss {entries[-1]['loss']:.3f}")

    reporter.start("pretrain", f"pretraining {recipe.name}")
    try:
        history = train_model(
            model, tokenizer, recipe.train, seed=recipe.seed, folder=steps, accelerator=accelerator, on_step=on_step
        )
    except SurgeryError:
        if not any(steps.rglob("step_*")):
            delete(steps)
        raise
    from surgery.report.figures.curves import training_curve  # matplotlib is slow to import

    scores = evaluate_model(model, tokenizer, recipe.evaluate, recipe.seed, prompts).summary
    mark_seen(scores, recipe.evaluate, recipe.train)
    with new_folder(folder) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        GenerationConfig(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id).save_pretrained(new)
        training_curve(history, new, "training")
        for extra in ("training.svg", "training.csv"):
            (new / extra).unlink()
        write_json(new / "scores.json", scores)
        write_text(new / "README.md", base_card(recipe, scores, history, model))
        mark(new, "model")
    delete(steps)


def base_card(
    recipe: PretrainRecipe, scores: Mapping[str, Any], history: list[dict[str, float]], model: PreTrainedModel
) -> str:
    """Render README.md of the checkpoint: command, time, versions, and `scores`, the evaluation."""
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "license": "apache-2.0"}
    minutes = sum(h["seconds"] for h in history) / 60
    rows = "".join(f"| {label_of(place, entry)} | {cell_of(entry)} |\n" for place, entry in entries(scores))
    sources = [source for stage in recipe.train.sequence for source in stage.sources]
    tasks = dict.fromkeys(source.task for source in sources if source.task is not None)
    kinds = [PROBES[task].label.split(", ")[0] for task in tasks]  # without the half that an evaluation uses
    files = dict.fromkeys(source.data.public_name for source in sources if source.data is not None)
    texts = ([f"generated text: {', '.join(kinds)}"] if kinds else []) + [f"documents of {file}" for file in files]
    return (
        "---\n" + yaml.safe_dump(front, sort_keys=False) + "---\n\n"
        f"# {recipe.name}\n\n"
        f"{model.num_parameters():,} parameters (`{type(model).__name__}`), trained from scratch on "
        f"{'; '.join(texts)}. Its only use is to try the toolkit.\n\n"
        f"Made with `surgery pretrain` and the recipe below, seed {recipe.seed}, in "
        f"{minutes:.0f} minutes with {torch.get_num_threads()} threads ({json.dumps(versions())}).\n\n"
        f"Accuracy on the evaluation split ({recipe.evaluate.examples} prompts each):\n\n"
        f"| task | score |\n|---|---|\n{rows}\n"
        "![Training losses](training.png)\n\n"
        "## Recipe\n\n```yaml\n" + to_yaml(public_recipe(recipe)) + "```\n"
    )
