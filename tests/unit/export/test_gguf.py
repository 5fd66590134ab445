"""The format `gguf`, with a stand-in for llama.cpp's converter. `make gguf-test` runs the real one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import PreTrainedTokenizerFast

from surgery.errors import ModelError, RecipeError
from surgery.export import pre_tokenizers as pre_tokenizers_of_llama_cpp
from surgery.export import reload as reloading
from surgery.export.folder import export_model
from surgery.export.gguf_converter import SCRIPT, find_converter, pre_tokenizer_of
from surgery.export.gguf_folder import FILE, compare_with_files
from surgery.export.pre_tokenizers import RULES, nearest_rule
from surgery.export.verify import verify_folder
from surgery.models.lookup import family_of, geometry_of
from surgery.recipe import Export
from surgery.splice.insertion import insert_layers
from surgery.types import Graft, Plan
from tests.support.exports import edit, list_again, refusal
from tests.support.pico import pico_base, pico_family, pico_tokenizer, randomise
from tests.support.processes import ROOT, Reloads, stock

LLAMA_CPP = ROOT / "tests" / "support" / "fake_llama_cpp"
SECTION = Export(format="gguf", llama_cpp=str(LLAMA_CPP), pre_tokenizer="gpt-2")


def hybrid(base: Any = None) -> tuple[Any, Plan]:
    """A pico model, by default a Mamba-2, with a pair whose weights are random, and its plan."""
    base = base or pico_base(vocab_size=1021)  # no multiple of 8, to which the converter pads
    site = family_of(base.config).sites(base.config)[0]
    graft = Graft(site, (1, 3), "add", "random", ("segment_end",) * 2, form="pair", before=1)
    plan = Plan(base="pico", geometry=geometry_of(base.config), grafts=(graft,), seed=0)
    model = insert_layers(base, plan)
    with torch.no_grad():
        randomise(model, 1)
    return model, plan


@pytest.fixture(scope="module", autouse=True)
def forked_converters() -> Iterator[None]:
    """Run the converter in a forked child of a process that has imported transformers, not in a new process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reloading, "subprocess", Reloads(stock().address))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, plan = hybrid()
    folder = tmp_path_factory.mktemp("gguf") / "export"
    export_model(model, pico_tokenizer(), folder, SECTION, plan=plan)
    return folder


def test_an_export_holds_a_gguf_file_that_equals_the_model(whole: Path) -> None:
    record = json.loads((whole / "export.json").read_text())
    assert record["format"] == "gguf" and record["pre_tokenizer"] == "gpt-2" and FILE in record["files"]
    assert [path.name for path in whole.glob("*.safetensors")] == ["model.safetensors"]
    (sentence,) = compare_with_files(whole)["also_checked"]
    assert f"{len(load_file(whole / 'model.safetensors'))} tensors" in sentence


MOE = {
    "n_routed_experts": 12,
    "n_group": 2,
    "norm_topk_prob": False,
    "moe_latent_size": 12,
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize(
    ("kind", "config", "names"),
    [
        ("mlp", {"mlp_bias": True}, {"up_proj.bias": "ffn_up.bias"}),
        (
            "moe",
            MOE,
            {
                "experts.10.down_proj.weight": "ffn_down_exps.weight",
                "fc2_latent_proj.weight": "ffn_latent_up.weight",
                "gate.e_score_correction_bias": "exp_probs_b.bias",
            },
        ),
    ],
)
def test_layers_of_a_nemotron_h(kind: str, config: dict[str, Any], names: dict[str, str], tmp_path: Path) -> None:
    """MLPs, experts, and attention whose heads share keys."""
    kinds = ["linear_attention", kind, "full_attention", "linear_attention"]
    model, plan = hybrid(pico_family("nemotron_h", vocab_size=1024, layers_block_type=kinds, **config))
    folder = tmp_path / "export"
    export_model(model, pico_tokenizer(), folder, SECTION, plan=plan)
    stored = load_file(folder / "model.safetensors")
    experts = [tensor for tensor in stored if ".experts." in tensor]
    (sentence,) = compare_with_files(folder)["also_checked"]
    assert f"{len(stored) - len(experts) + (2 if experts else 0)} tensors" in sentence
    weights = (folder / "model.safetensors").read_bytes()
    for name, in_gguf in names.items():
        source = f"backbone.layers.3.mixer.{name}"  # after the pair
        edit(folder, "model.safetensors", lambda tensors: tensors[source].view(-1)[0].add_(0.01))  # noqa: B023
        with pytest.raises(ModelError, match=f"tensor blk.3.{in_gguf}. It differs from backbone.layers.3.mixer."):
            compare_with_files(folder)
        (folder / "model.safetensors").write_bytes(weights)
    if kind == "moe":
        edit(folder, "config.json", lambda data: data.update(num_experts_per_tok=1))
        with pytest.raises(ModelError, match=r"expert_used_count is 2\. config\.json needs 1"):
            compare_with_files(folder)


def test_other_tensors_vocabularies_and_special_tokens_are_found(whole: Path, copy: Path) -> None:
    """llama.cpp would not load the file, stop at another token, or compute something else."""

    def swap(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        one, other = [token for token, index in vocab.items() if index in (20, 21)]
        vocab[one], vocab[other] = vocab[other], vocab[one]

    def rename(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"][1]["content"] = "<|stop|>"

    def add(tokenizer: dict[str, Any]) -> None:
        (text,) = [token for token, index in tokenizer["model"]["vocab"].items() if index == 20]
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 20, "content": text})

    def interleave(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors["backbone.layers.2.mixer.k_proj.weight"]
        weight.copy_(weight.view(2, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape))

    changes: list[tuple[str, Any, str]] = [
        ("model.safetensors", interleave, "tensor blk.2.attn_[qk].weight. Query and key have their channels"),
        ("tokenizer.json", swap, f"{FILE}: token 2[01] is"),
        ("tokenizer.json", rename, "token 1 is '<.endoftext.>'. tokenizer.json has '<.stop.>'"),
        ("tokenizer.json", add, "token 20.*type 1"),
        ("tokenizer.json", lambda data: data["model"]["merges"].pop(), "its merges differ"),
    ]
    for field, value, message in (
        ("conv_kernel", 3, "nemotron_h.ssm.conv_kernel is 4. config.json needs 3"),
        ("layer_norm_epsilon", 1e-6, "nemotron_h.attention.layer_norm_epsilon is"),
        ("hybrid_override_pattern", "M*MM", "nemotron_h"),
        ("vocab_size", 1, "but the tensors have 1"),
    ):
        changes.append(("config.json", lambda data, f=field, v=value: data.update({f: v}), message))
    for name, in_gguf in (
        ("backbone.layers.0.mixer.A_log", "blk.0.ssm_a"),
        ("backbone.layers.1.mixer.conv1d.weight", "blk.1.ssm_conv1d.weight"),
        ("backbone.layers.2.mixer.q_proj.weight", "blk.2.attn_q.weight"),
        ("backbone.layers.2.mixer.o_proj.weight", "blk.2.attn_output.weight"),
        ("lm_head.weight", "output.weight"),
    ):
        said = f"{FILE}: tensor {in_gguf}. It differs from {name}"
        changes.append(("model.safetensors", lambda data, n=name: data[n].view(-1)[0].add_(0.01), said))
    for name, change, message in changes:
        edit(copy, name, change)
        with pytest.raises(ModelError, match=message):
            compare_with_files(copy)
        shutil.copy(whole / name, copy)
    for name, in_gguf in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        edit(copy, "config.json", lambda config: config.update({f"{name}_token_id": 7}))  # noqa: B023
        edit(copy, "tokenizer_config.json", lambda config: config.pop(f"{name}_token", None))  # noqa: B023
        with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.{in_gguf}_token_id is .*\. The model's is 7\."):
            compare_with_files(copy)
        for file in ("config.json", "tokenizer_config.json"):
            shutil.copy(whole / file, copy)


def test_a_copy_without_it_or_with_a_damaged_one_does_not_verify(copy: Path) -> None:
    data = (copy / FILE).read_bytes()
    (copy / "other.gguf").write_bytes(data)
    assert "other.gguf" in refusal(copy)
    (copy / "other.gguf").unlink()
    (copy / FILE).write_bytes(data[:1000])
    list_again(copy)
    assert refusal(copy).startswith(f"{FILE}: ")
    (copy / FILE).unlink()
    list_again(copy)
    assert refusal(copy).startswith(f"{FILE}: missing")


def test_code_and_what_names_it_are_refused(copy: Path) -> None:
    """Such an export holds none, and would run it where it is loaded with trust."""
    for name, text in (
        ("custom_generate/generate.py", "def generate(model): ..."),
        ("processor_config.json", '{"auto_map": {"AutoProcessor": "generate.A"}}'),
    ):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text)
        list_again(copy)
        assert refusal(copy).startswith(f"{name}: ")
        verify_folder(copy, trust_remote_code=True)
        (copy / name).unlink()


def test_without_the_converter_the_error_names_the_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RecipeError, match=r"export\.llama_cpp: not set\. .*Clone https://github.com/ggml-org/llama.cpp"
    ):
        find_converter(None)
    with pytest.raises(RecipeError, match=r"export\.llama_cpp: .* Set it to a folder of llama.cpp that holds"):
        find_converter(str(tmp_path))
    with pytest.raises(RecipeError, match=r"export\.llama_cpp: ~nobody-here/x\. Set it to"):
        find_converter("~nobody-here/x")
    script = tmp_path / SCRIPT
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert find_converter(None) == find_converter(str(tmp_path)) == find_converter(str(script)) == script


def test_an_error_of_the_converter_is_one_line(tmp_path: Path) -> None:
    (tmp_path / SCRIPT).write_text("raise KeyError('hparams')\n")
    section = SECTION.model_copy(update={"llama_cpp": str(tmp_path), "pre_tokenizer": None})
    with pytest.raises(ModelError, match=f"{SCRIPT}: KeyError: 'hparams'. Use another version of llama.cpp") as caught:
        pre_tokenizer_of(pico_tokenizer(), section)
    assert len(str(caught.value).splitlines()) == 1


def byte_level(pattern: str | None) -> PreTrainedTokenizerFast:
    """A byte-level BPE over a text with numbers, which splits as a pattern says; None for GPT-2's own rule."""
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    splits = [Split(Regex(pattern), "isolated")] if pattern else []
    level = ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    tokenizer.decoder = Decoder()
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    text = [f"The key of box {n} is {n * 7919 % 100000}, and it's in\n\n  row {n % 13}." for n in range(500)]
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_the_rule_of_a_tokenizer_is_found_or_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pre_tokenizers_of_llama_cpp, "_RANDOM_TEXTS", 200)
    # Without tokens of two digits, both of the last rules give the same tokens.
    for pattern, names in ((None, ["gpt-2"]), (RULES["qwen2"][0], ["qwen2", "smaug-bpe"])):
        name, share, text = nearest_rule(byte_level(pattern))
        assert name in names and (share, text) == (1.0, "")
    tokenizer = byte_level(r" ?\p{L}+|\p{N}{1,2}|\s|[^\s\p{L}\p{N}]")
    section = SECTION.model_copy(update={"pre_tokenizer": None})
    unknown = r"export\.pre_tokenizer: no rule of llama\.cpp .* for '.*\d{3}.*'\. Set it to"
    with pytest.raises(RecipeError, match=unknown):
        pre_tokenizer_of(tokenizer, section)
    assert pre_tokenizer_of(tokenizer, SECTION) == "gpt-2", "unless one is set"
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(ModelError, match=r"base\.tokenizer: WordLevel .*byte-level BPE"):
        nearest_rule(other)
