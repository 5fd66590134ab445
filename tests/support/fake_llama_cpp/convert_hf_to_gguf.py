"""Stand-in for llama.cpp's converter with the parts that the export uses. Tensor names come from the package gguf."""

import argparse
import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file


class ModelBase:
    @staticmethod
    def load_hparams(folder, is_mistral_format):
        raise NotImplementedError("transformers' config has fields of experts")


class TextModel(ModelBase):
    def get_vocab_base_pre(self, tokenizer):
        if len(tokenizer) == 50277:
            return "olmo"
        raise NotImplementedError("BPE pre-tokenizer was not recognized")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", type=Path)
    parser.add_argument("--outtype")
    parser.add_argument("--model-name")
    options = parser.parse_args()
    config = ModelBase.load_hparams(options.model, is_mistral_format=False)
    config["pad_vocab_size_multiple"] = 8
    assert "layers_block_type" not in config
    experts = "num_experts_per_tok" in config
    pattern, kind = config["hybrid_override_pattern"], "nemotron_h_moe" if experts else "nemotron_h"
    writer = gguf.GGUFWriter(options.outfile, kind)
    writer.add_block_count(len(pattern))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([config["num_key_value_heads"] * (layer == "*") for layer in pattern])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    width = config["moe_intermediate_size" if experts else "intermediate_size"]
    writer.add_feed_forward_length([width * (layer == "-E"[experts]) for layer in pattern])
    if experts:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config["moe_latent_size"] is not None:
            writer.add_moe_latent_size(config["moe_latent_size"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    tokenizer = json.loads((options.model / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    tokens |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    multiple = config["pad_vocab_size_multiple"]
    size = -(-config["vocab_size"] // multiple) * multiple
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(TextModel.get_vocab_base_pre(None, None))
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(size)])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    types = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([types[index in special.values()] for index in range(size)])
    named = json.loads((options.model / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if name in named:
            add(special[named[name]])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    architecture = gguf.MODEL_ARCH.NEMOTRON_H_MOE if experts else gguf.MODEL_ARCH.NEMOTRON_H
    names = gguf.get_tensor_name_map(architecture, len(pattern))
    tensors = load_file(options.model / "model.safetensors")
    for layer in range(len(pattern) * experts):
        for projection in ("up_proj", "down_proj"):
            parts = f"backbone.layers.{layer}.mixer.experts.{{}}.{projection}.weight"
            sources = [parts.format(expert) for expert in range(config["n_routed_experts"])]
            if sources[0] in tensors:
                merged = f"model.layers.{layer}.mlp.experts.{projection}.weight"
                tensors[merged] = torch.stack([tensors.pop(source) for source in sources])
    for source, tensor in tensors.items():
        source = source.replace("e_score_correction_bias", "e_score_correction.bias")
        name = names.get_name(source.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        if source.endswith("A_log"):
            tensor = -tensor.float().exp()
        if ".q_proj" in source or ".k_proj" in source:
            heads = config["num_key_value_heads" if ".k_proj" in source else "num_attention_heads"]
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        matrix = tensor.ndim == 2 and "ssm" not in name
        if options.outtype == "bf16" and matrix:
            raw = tensor.to(torch.bfloat16).view(torch.uint16).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            half = options.outtype == "f16" and matrix
            writer.add_tensor(name, tensor.squeeze().to(torch.float16 if half else torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
