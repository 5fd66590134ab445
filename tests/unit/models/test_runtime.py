"""Releases of transformers that compute a family wrongly are refused."""

from __future__ import annotations

import pytest

from surgery.errors import ModelError
from surgery.models import runtime
from surgery.models.runtime import check_release
from surgery.testing.pico import pico_family_config


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
