"""A run with `splice.form: pair`, from locating to a verified export that holds no code."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, NemotronHForCausalLM

from surgery.models.convert import convert
from surgery.models.lookup import geometry_of
from surgery.recipe import Base
from surgery.recipe.loading import load_recipe
from surgery.types import plan_from_json
from tests.integration.conftest import BASE, QUICK, RECIPE, ROOT, assert_all_refused, ran, refused
from tests.support.exports import edit, list_again
from tests.support.pico import pico_family, pico_tokenizer
from tests.support.processes import alone

PAIR = "splice={select: list, heads: [L3H2, L3H0], form: pair, before: 0, head_dim: 16}"
COUNTS = ("parameters", "new parameters", "trainable parameters")
GGUF = (f"export.llama_cpp={ROOT / 'tests' / 'support' / 'fake_llama_cpp'}", "export.pre_tokenizer=gpt-2")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a small quickstart that inserts a pair before layer 0."""
    cwd = tmp_path_factory.mktemp("pair")
    ran("run", str(RECIPE), *QUICK, PAIR, cwd=cwd)
    return cwd / "runs" / "quickstart"


def test_it_starts_as_the_base_and_its_control_has_no_new_layers(pair: Path) -> None:
    gap = json.loads((pair / "splice.json").read_text())
    assert gap["max_logit"] < 1e-4 and abs(gap["kl"]) < 1e-6 and gap["same_top"] == 1.0
    assert json.loads((pair / "no_splice" / "config.json").read_text())["model_type"] == "mamba2"
    history = [json.loads((pair / name).read_text()) for name in ("training.json", "no_splice_training.json")]
    assert {"attention", "answer", "base_kl"} <= set(history[0][0]) and "attention" not in history[1][0]


def test_plan_heads_results_config_report_and_card_say_what_was_inserted(pair: Path) -> None:
    plan = plan_from_json(json.loads((pair / "plan.json").read_text()))
    (graft,) = plan.grafts
    assert (graft.form, graft.before, graft.site.layer, graft.heads) == ("pair", 0, 3, (2, 0))
    results = json.loads((pair / "results.json").read_text())
    assert results["inserted"] == [{"form": "pair", "before": 0}] and results["heads"] == ["L3H2", "L3H0"]
    assert list(results["arms"]) == ["base", "no_splice", "hybrid_heads_off", "hybrid"]
    config = json.loads((pair / "export" / "config.json").read_text())
    (entry,) = config["inserted"]
    assert (entry["form"], entry["layers"], entry["before"], entry["site"]) == ("pair", [0, 1], 0, 3)
    card, page = ((pair / name).read_text() for name in ("export/README.md", "report.html"))
    for text in (card, page):
        assert "pair before layer 0" in text
    assert "| L3H2 | pair before layer 0 | random |" in card and "trust_remote_code" not in card.split("## Recipe")[0]
    recipe = load_recipe(pair / "export" / "recipe.yaml")
    assert recipe.splice is not None and (recipe.splice.form, recipe.export.format) == ("pair", "nemotron_h")
    base = json.loads((BASE / "config.json").read_text())
    assert config["hidden_size"] == base["hidden_size"] + 64 and config["side_channels"] == 64
    assert config["hybrid_override_pattern"] == "M*" + "M" * base["num_hidden_layers"]
    assert config["num_hidden_layers"] == base["num_hidden_layers"] + 2 and "layers_block_type" not in config
    assert config["n_groups"] == config["mamba_n_groups"] == base["n_groups"]
    assert config["conv_kernel"] == config["mamba_d_conv"] == base["conv_kernel"]
    assert config["time_step_min"] == 1e-30 and config["tie_word_embeddings"] is False
    assert not [key for key in config if "expert" in key or "moe" in key or "mtp" in key]
    weights = load_file(pair / "export" / "model.safetensors")  # with the names of NVIDIA's own checkpoints
    assert weights["lm_head.weight"].shape == weights["backbone.embeddings.weight"].shape


def test_convert_gives_a_model_that_was_saved_again_the_config_of_the_export(pair: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(pair / "export").save_pretrained(tmp_path / "again")
    convert(Base(model=str(tmp_path / "again")), tmp_path / "converted")
    exported, again, converted = (
        json.loads((folder / "config.json").read_text())
        for folder in (pair / "export", tmp_path / "again", tmp_path / "converted")
    )
    assert "hybrid_override_pattern" not in again and "n_routed_experts" in again
    assert converted == exported
    files = [load_file(folder / "model.safetensors") for folder in (pair / "export", tmp_path / "converted")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


ALONE = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
folder, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder).eval()
assert type(model).__module__ == "transformers.models.nemotron_h.modeling_nemotron_h", type(model)
ids = torch.randint(3, 900, (3, 17), generator=torch.Generator().manual_seed(0))
mask = torch.ones_like(ids)
for row, padding in enumerate((0, 5, 9)):
    ids[row, :padding], mask[row, :padding] = 0, 0
options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
with torch.no_grad():
    texts = {"logits": model(ids, attention_mask=mask, use_cache=False).logits}
    texts["cached"] = model.generate(ids, attention_mask=mask, **options)[:, -8:].contiguous()
    texts["uncached"] = model.generate(ids, attention_mask=mask, use_cache=False, **options)[:, -8:].contiguous()
    alone = [model.generate(ids[row : row + 1, p:], **options)[:, -8:] for row, p in enumerate((0, 5, 9))]
texts["alone"] = torch.cat(alone).contiguous()
save_file({**texts, "ids": ids, "mask": mask}, out)
"""


def test_it_loads_and_generates_in_a_process_without_this_library(pair: Path, tmp_path: Path) -> None:
    export = pair / "export"
    assert not list(export.rglob("*.py"))
    assert [path.name for path in export.glob("*.safetensors")] == ["model.safetensors"]  # vLLM loads every one
    alone(ALONE, str(export), str(tmp_path / "out"), cwd=tmp_path)
    found = load_file(tmp_path / "out")
    assert torch.equal(found["cached"], found["uncached"]) and torch.equal(found["cached"], found["alone"])
    trained = AutoModelForCausalLM.from_pretrained(pair / "trained").eval()
    assert type(trained) is NemotronHForCausalLM
    with torch.no_grad():
        logits = trained(found["ids"], attention_mask=found["mask"], use_cache=False).logits
    assert torch.equal(logits, found["logits"])


def test_a_copy_is_verified(pair: Path, tmp_path: Path) -> None:
    assert "agree on the splice" in ran("verify", str(pair / "export"), cwd=tmp_path).stdout
    copy = tmp_path / "copy"
    shutil.copytree(pair / "export", copy)
    config, weights = "config.json", "model.safetensors"
    changes: list[tuple[str, Any, tuple[str, ...]]] = [
        (config, lambda c: c.update(auto_map={"AutoModelForCausalLM": "evil.Evil"}), (config, "auto_map")),
        (config, lambda c: c["inserted"][0].update(before=1), ("inserted",)),
        (weights, lambda t: t["backbone.layers.1.mixer.o_proj.weight"].add_(1), ("reloading", "differ")),
    ]
    for name, change, words in changes:
        edit(copy, name, change)
        list_again(copy)
        line = refused("verify", str(copy), cwd=tmp_path)
        assert [word for word in words if word not in line] == [], line
        shutil.copy(pair / "export" / name, copy)


def test_a_pair_that_begins_with_the_output_of_its_heads(tmp_path: Path) -> None:
    copies = "splice={select: list, heads: [L3H2, L3H0], form: pair, init: ssm, output: copy}"
    ran("run", str(RECIPE), *QUICK, copies, "train.read_steps=2", "train.control=false", cwd=tmp_path)
    folder = tmp_path / "runs" / "quickstart"
    assert 1e-3 < json.loads((folder / "splice.json").read_text())["kl"] < 1
    (entry,) = json.loads((folder / "export" / "config.json").read_text())["inserted"]
    assert (entry["output"], entry["before"]) == ("copy", 3)
    ran("verify", str(folder / "export"), cwd=tmp_path)


def test_it_is_trained_further_in_the_same_format(pair: Path, tmp_path: Path) -> None:
    tune = ("run", str(RECIPE), *QUICK, f"base.model={pair / 'export'}", "splice=null")
    assert_all_refused({tune: ("export.format", "nemotron_h")}, tmp_path)
    ran(*tune, "export.format=nemotron_h", "train.control=false", cwd=tmp_path)
    export = tmp_path / "runs" / "quickstart" / "export"
    config = json.loads((export / "config.json").read_text())
    assert config["inserted"] == json.loads((pair / "export" / "config.json").read_text())["inserted"]
    assert config["architectures"] == ["NemotronHForCausalLM"]


def test_a_dry_run_counts_the_new_layers(tmp_path: Path) -> None:
    done = ran("run", str(RECIPE), *QUICK, PAIR, "--dry-run", cwd=tmp_path)
    assert "pair of 2 heads before layer 0 of the base" in done.stdout
    counts = {name: int(re.search(rf" {name} *│ ([0-9,]+)", done.stdout)[1].replace(",", "")) for name in COUNTS}
    assert counts["parameters"] == counts["trainable parameters"] > counts["new parameters"]
    assert not (tmp_path / "runs").exists()


def test_a_base_that_cannot_be_expressed_is_refused_before_locating(tmp_path: Path) -> None:
    base = tmp_path / "limited"
    shutil.copytree(BASE, base)
    edit(base, "config.json", lambda config: config.update(time_step_limit=[0.001, 0.1]))
    run = ("run", str(RECIPE), *QUICK, PAIR)
    given = {
        (f"base.model={base}",): ("time_step_limit", "0.001", "splice.form: head"),
        (f"base.model={BASE}", "base.dtype=bfloat16"): ("base.dtype", "bfloat16", "float32"),
        (f"base.model={BASE}", "splice.before=99"): ("splice.before", "99"),
    }
    assert_all_refused({(*run, *words): said for words, said in given.items()}, tmp_path)


def test_a_nemotron_h_with_experts_is_a_base(tmp_path: Path) -> None:
    """Its own attention and experts stay, and the export names its experts as published checkpoints do."""
    base = tmp_path / "base"
    pico_family("nemotron_h", vocab_size=1024).save_pretrained(base)
    pico_tokenizer().save_pretrained(base)
    code = {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}  # as NVIDIA's have
    edit(base, "config.json", lambda config: config.update(auto_map=code))
    splice = "splice={select: list, heads: [L3H2, L0H1, L3H0], form: pair, init: ssm}"
    run = ("run", str(RECIPE), *QUICK, f"base.model={base}", splice)
    assert_all_refused({(*run, "splice.head_dim=64"): ("splice.head_dim", "64", "8")}, tmp_path)
    ran(*run, cwd=tmp_path)
    folder = tmp_path / "runs" / "quickstart"
    gap = json.loads((folder / "splice.json").read_text())
    assert gap["max_logit"] < 1e-4 and gap["same_top"] == 1.0
    assert json.loads((folder / "no_splice" / "config.json").read_text())["model_type"] == "nemotron_h"
    config = json.loads((folder / "export" / "config.json").read_text())
    assert config["hybrid_override_pattern"] == "M*M-*M*ME" and config["inserted_into"] == "nemotron_h"
    assert (config["n_routed_experts"], config["num_experts_per_tok"], config["num_key_value_heads"]) == (4, 2, 2)
    assert plan_from_json(json.loads((folder / "plan.json").read_text())).geometry == geometry_of(
        AutoModelForCausalLM.from_pretrained(base).config
    )


def test_the_run_is_exported_as_gguf_with_a_stand_in_for_the_converter(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair, tmp_path / "runs" / "quickstart")
    words = (str(RECIPE), *QUICK, PAIR, "export.format=gguf")
    line = refused("export", *words, GGUF[0], cwd=tmp_path)
    assert all(word in line for word in ("export.pre_tokenizer", "gpt-2", "nemotron_h"))
    assert "export.llama_cpp: none" in refused("export", *words, "export.llama_cpp=none", cwd=tmp_path)
    ran("export", *words, *GGUF, cwd=tmp_path)
    export = tmp_path / "runs" / "quickstart" / "export"
    assert "model.gguf: 53 tensors and 973 tokens equal" in ran("verify", str(export), cwd=tmp_path).stdout
    assert "fake_llama_cpp" not in (export / "recipe.yaml").read_text()
    assert "model.gguf" in (export / "README.md").read_text()
