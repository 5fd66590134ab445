"""Chunks are shorter where there is no kernel, without a change of the function or of the config."""

from __future__ import annotations

import pytest
import torch

from surgery.errors import ModelError
from surgery.models import runtime
from surgery.models.runtime import CHUNK_WITHOUT_KERNELS, check_release, restore_chunks, shorten_chunks
from surgery.testing.pico import pico_family, pico_family_config, tokens

FAMILIES = {"mamba2": "chunk_size", "zamba2": "chunk_size", "bamba": "mamba_chunk_size", "nemotron_h": "chunk_size"}


@torch.no_grad()
@pytest.mark.parametrize(("name", "field"), FAMILIES.items())
def test_the_function_and_the_config_stay(name: str, field: str) -> None:
    model, ids = pico_family(name, **{field: 64}), tokens(2, 50)
    published = model(ids).logits
    shorten_chunks(model)
    chunks = {m.chunk_size for _, m in model.named_modules() if "chunk_size" in vars(m)}
    assert chunks == {CHUNK_WITHOUT_KERNELS} and getattr(model.config, field) == 64
    torch.testing.assert_close(model(ids).logits, published, atol=1e-4, rtol=1e-4)
    restore_chunks(model)
    assert torch.equal(model(ids).logits, published)


def test_shorter_chunks_stay_and_other_models_too() -> None:
    model = pico_family("mamba2", chunk_size=8)
    shorten_chunks(model)
    assert model.backbone.layers[0].mixer.chunk_size == 8
    shorten_chunks(pico_family("llama"))
    shorten_chunks(pico_family("mamba"))


@pytest.mark.parametrize(("name", "fields"), [("mamba2", {"n_groups": 2}), ("bamba", {}), ("granite", {})])
def test_a_release_that_computes_another_model_is_refused(
    name: str, fields: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(requirement: str) -> None:
        raise ImportError(requirement)

    monkeypatch.setattr(runtime, "require_version", older)
    config = pico_family_config(name, **fields)
    with pytest.raises(ModelError, match=rf"{config.model_type} with 2 groups\. .*transformers>=5\.23"):
        check_release(config)
    one = {"n_groups": 1} if name == "mamba2" else {"mamba_n_groups": 1}
    check_release(pico_family_config(name, **one))
    monkeypatch.setattr(runtime, "require_version", lambda _: None)
    check_release(config)


def test_a_release_that_decodes_a_batch_as_one_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(requirement: str) -> None:
        raise ImportError(requirement)

    monkeypatch.setattr(runtime, "require_version", older)
    with pytest.raises(ModelError, match=r"falcon_h1 with a gated norm .*transformers>=5\.23"):
        check_release(pico_family_config("falcon_h1", mamba_rms_norm=True))
    check_release(pico_family_config("falcon_h1", mamba_rms_norm=False))


@pytest.mark.parametrize("name", ["zamba2", "nemotron_h", "falcon_h1", "llamba", "mamba", "llama"])
def test_families_that_were_always_right_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(requirement: str) -> None:
        raise ImportError(requirement)

    monkeypatch.setattr(runtime, "require_version", older)
    assert check_release(pico_family_config(name)) is None
