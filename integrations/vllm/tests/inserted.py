"""Exports with inserted layers: stock checkpoints that vLLM loads without the plugin. Used by `reference.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM, PreTrainedModel

from surgery.export.folder import export_model
from surgery.models.loading import load_model, load_tokenizer
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Base, Export
from surgery.splice.insertion import insert_layers
from surgery.types import Graft, Plan
from tests.support.pico import randomise

ROOT = Path(__file__).resolve().parents[3]
HEADS, SITE = (2, 5), 1
TRAINED = ROOT / "integrations" / "pair.yaml"


def random_nemotron_h(vocab_size: int, kind: str) -> PreTrainedModel:
    """Return a random Nemotron-H with layers of a kind (`mlp` or `moe`), and attention of four heads and two keys."""
    ssm, attention = "linear_attention", "full_attention"
    config = NemotronHConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        layers_block_type=[ssm, kind, attention, ssm, kind, ssm],
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 192},
        **{"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "chunk_size": 16},
        **{"n_routed_experts": 8, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
        **{"time_step_min": 1e-30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
    )
    model = randomise(NemotronHForCausalLM(config), 0)
    with torch.no_grad():  # or the next token is the last one, whatever the mixers do
        model.get_input_embeddings().weight.mul_(0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return model.eval()


def inserted_case(
    base: Path, form: str, section: Export | None = None, nemotron_h: str | None = None
) -> Callable[[Path], None]:
    """Return a function that inserts a block or a pair before the second SSM layer of a base, and exports the hybrid.

    The output projection of the attention block is random: its 0 of the beginning would hide a difference. The Gather
    layer of a pair begins with copies, so its output is not 0.

    Args:
        base: checkpoint.
        form: `block` or `pair`.
        section: the recipe's section `export`; None for the format `nemotron_h`.
        nemotron_h: take the tokenizer alone from `base`, and `random_nemotron_h` of this kind as the model.
    """

    def write(folder: Path) -> None:
        model, tokenizer = load_model(Base(model=str(base))), load_tokenizer(Base(model=str(base)))
        if nemotron_h is not None:
            model = random_nemotron_h(model.config.vocab_size, nemotron_h)
        site = family_of(model.config).sites(model.config)[SITE]
        init = "ssm" if form == "pair" else "random"
        graft = Graft(site, HEADS, "add", init, ("segment_end",) * len(HEADS), form=form, before=site.layer)
        plan = Plan(base=base.name, geometry=geometry_of(model.config), grafts=(graft,), seed=0)
        hybrid = insert_layers(model, plan)
        (entry,) = hybrid.config.inserted
        with torch.no_grad():
            randomise(hybrid.get_submodule(f"model.layers.{entry['layers'][-1]}.mixer.o_proj"), SITE)
        export_model(hybrid, tokenizer, folder, section or Export(format="nemotron_h"), plan=plan)

    return write


def trained_case(*overrides: str) -> Callable[[Path], None]:
    """Return a function that copies the export of a trained pair. The first call trains it: minutes of one core.

    Args:
        overrides: recipe values of the export, such as `export.format=gguf`.
    """

    def write(folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "surgery", "run", str(TRAINED), *overrides]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        shutil.copytree(ROOT / "runs" / "served-pair" / "export", folder)

    return write
