"""The modules that are mutated, and the unit tests that have to notice."""

from __future__ import annotations

_HYBRID = "tests/unit/hybrid"
_LOCATE = "tests/unit/locate"
_TRAIN = "tests/unit/train"

# By target: each module with its tests, the quickest and most specific first. Tests of other modules follow where they
# check this one too, and last those that run a model from end to end.
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        "surgery.hybrid.attention": (
            f"{_HYBRID}/test_attention.py",
            f"{_HYBRID}/test_packing.py",
            f"{_HYBRID}/test_modeling_llamba_splice.py",
            f"{_HYBRID}/test_modeling_mamba2_hybrid.py",
            f"{_HYBRID}/test_donor.py",
            f"{_HYBRID}/test_stock_tools.py",
            f"{_HYBRID}/test_common_properties.py",
        ),
        "surgery.hybrid.mixins": (
            f"{_HYBRID}/test_packing.py",
            f"{_HYBRID}/test_sites.py",
            f"{_HYBRID}/test_modeling_mamba2_hybrid.py",
            f"{_HYBRID}/test_modeling_llamba_splice.py",
            f"{_HYBRID}/test_stock_tools.py",
            f"{_HYBRID}/test_common_properties.py",
        ),
    },
    "losses": {
        "surgery.train.objectives": (
            f"{_TRAIN}/test_objectives.py",
            f"{_TRAIN}/test_micro_batches.py",
            f"{_TRAIN}/test_teacher.py",
        ),
        "surgery.train.divergence": (
            f"{_TRAIN}/test_divergence.py",
            f"{_TRAIN}/test_objectives.py",
            f"{_TRAIN}/test_logits_cache.py",
        ),
        "surgery.train.terms": (
            f"{_TRAIN}/test_teacher.py",
            f"{_TRAIN}/test_micro_batches.py",
            f"{_TRAIN}/test_prefix.py",
            f"{_TRAIN}/test_logits_cache.py",
            f"{_TRAIN}/test_packed.py",
            f"{_TRAIN}/test_loop.py",
            f"{_TRAIN}/test_train.py",
        ),
    },
    "sweep": {
        "surgery.locate.sweep": (
            f"{_LOCATE}/test_sweep.py",
            f"{_LOCATE}/test_query_only.py",
            f"{_LOCATE}/test_backup.py",
            f"{_LOCATE}/test_long_values.py",
            f"{_LOCATE}/test_locate.py",
        ),
        "surgery.removal": (f"{_LOCATE}/test_sweep.py", f"{_LOCATE}/test_long_values.py"),
    },
    "plan": {
        "surgery.plan": (
            "tests/unit/test_plan.py",
            "tests/unit/test_splice.py",
            f"{_HYBRID}/test_donor.py",
            f"{_TRAIN}/test_teacher.py",
        ),
        "surgery.heads": ("tests/unit/test_heads.py", "tests/unit/test_plan.py", "tests/unit/test_splice.py"),
    },
    "run folder": {
        "surgery.rundir": ("tests/unit/test_rundir.py", "tests/unit/test_stages.py", "tests/unit/test_convert.py"),
    },
}
