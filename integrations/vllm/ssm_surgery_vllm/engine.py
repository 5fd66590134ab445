"""Refuse what vLLM can do and the plugin was not tested with. Needs no vLLM."""

from typing import Any


class EngineChecks:
    """What vLLM calls for each architecture once all arguments are known.

    Attributes:
        base: the same of the base's architecture, or None where it has none.
    """

    base: Any = None

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Raise ValueError with one line, the first reason, for an engine that the plugin does not run in."""
        for reason in reasons(vllm_config):
            raise ValueError(f"ssm-surgery-vllm: {reason}")
        if cls.base is not None:
            cls.base.verify_and_update_config(vllm_config)
        model, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        if ranks > 1 and model.hf_config.own_attention() is None:
            # Every process holds the whole branch. vLLM divides these heads by the processes.
            heads = model.hf_config.attention_shape()[0] * ranks
            model.model_arch_config.total_num_attention_heads = heads
            model.model_arch_config.total_num_kv_heads = heads

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Leave the model's config as it is."""


def reasons(vllm_config: Any) -> list[str]:
    """Return one line for each option that is not served."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    lines = [
        f"{name} {getattr(parallel, name)} is not supported. Set it to 1."
        for name in (
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        )
        if getattr(parallel, name, 1) > 1
    ]
    if parallel.tensor_parallel_size > 1 and model.hf_config.streams:
        text = f"tensor_parallel_size {parallel.tensor_parallel_size} is not supported for {model.hf_config.model_type}"
        lines.append(f"{text}: a branch needs channels that are on other processes. Set it to 1.")
    if vllm_config.speculative_config is not None:
        lines.append("speculative decoding is not supported: the recurrent state cannot return to an earlier token.")
    if not model.enforce_eager and vllm_config.device_config.device_type != "cpu":
        lines.append("CUDA graphs were not tested. Set --enforce-eager.")
    if model.quantization is not None:
        lines.append(f"quantization {model.quantization} is not supported. Serve the weights as they are.")
    if vllm_config.lora_config is not None:
        lines.append("LoRA adapters are not supported. Merge them before the export.")
    # vLLM makes a KV transfer of the size, later.
    if getattr(vllm_config, "kv_transfer_config", None) or getattr(cache, "kv_offloading_size", None) is not None:
        lines.append("KV transfer between engines is not supported.")
    if getattr(cache, "use_replayssm", False):
        lines.append("ReplaySSM is not supported. Remove --use-replayssm.")
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        lines.append(f"kv_cache_dtype {cache.cache_dtype} is not supported. Set it to auto.")
    return lines
