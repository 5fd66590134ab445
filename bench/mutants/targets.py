"""The modules that are mutated, and the unit tests that have to notice."""

from __future__ import annotations

_HYBRID = "tests/unit/hybrid"
_LOCATE = "tests/unit/locate"
_TRAIN = "tests/unit/train"
_HYBRIDS = tuple(
    f"tests/unit/hybrid/test_{name}.py"
    for name in (
        "attention",
        "packing",
        "sites",
        "modeling_llamba",
        "modeling_mamba2_hybrid",
        "donor",
        "stock_tools",
        "common_properties",
    )
)
_STEP = tuple(
    f"{_TRAIN}/test_{name}.py"
    for name in (
        "teacher",
        "micro_batches",
        "shared_prefix",
        "logits_cache",
        "packing_rows",
        "packing",
        "trainer",
        "training",
    )
)
_FOLDERS = (
    "tests/unit/files/test_atomic.py",
    "tests/unit/run/test_stages.py",
    "tests/unit/models/test_convert.py",
)

# By target: each module with its tests, the quickest and most specific first. Tests of other modules follow where they
# check this one too, and last those that run a model from end to end.
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        "surgery.hybrid.configuration_hybrid": _HYBRIDS,
        "surgery.hybrid.modeling_hybrid": _HYBRIDS,
        "surgery.hybrid.modeling_mamba_hybrid": _HYBRIDS,
    },
    "losses": {
        "surgery.train.losses": (
            f"{_TRAIN}/test_losses.py",
            f"{_TRAIN}/test_micro_batches.py",
            f"{_TRAIN}/test_teacher.py",
        ),
        "surgery.train.divergence": (
            f"{_TRAIN}/test_divergence.py",
            f"{_TRAIN}/test_losses.py",
            f"{_TRAIN}/test_logits_cache.py",
        ),
        "surgery.train.objectives": (f"{_TRAIN}/test_losses.py", *_STEP),
        "surgery.train.targets": _STEP,
    },
    "sweep": {
        "surgery.locate.ablation_sweep": (
            f"{_LOCATE}/test_ablation_sweep.py",
            f"{_LOCATE}/test_long_values.py",
            f"{_LOCATE}/test_locating.py",
        ),
        "surgery.locate.clean_run": (
            f"{_LOCATE}/test_ablation_sweep.py",
            f"{_LOCATE}/test_long_values.py",
        ),
        "surgery.locate.ablation": (f"{_LOCATE}/test_ablation_sweep.py", f"{_LOCATE}/test_long_values.py"),
    },
    "plan": {
        "surgery.splice.plan": (
            "tests/unit/splice/test_plan.py",
            "tests/unit/splice/test_graft.py",
            f"{_HYBRID}/test_donor.py",
            f"{_TRAIN}/test_teacher.py",
        ),
        "surgery.splice.source": (
            "tests/unit/splice/test_graft.py",
            f"{_HYBRID}/test_donor.py",
            "tests/unit/splice/test_plan.py",
        ),
        "surgery.models.spliced": ("tests/unit/splice/test_plan.py", "tests/unit/splice/test_graft.py"),
        "surgery.types": (
            "tests/unit/test_types.py",
            "tests/unit/splice/test_plan.py",
            "tests/unit/splice/test_graft.py",
        ),
    },
    "run folder": {
        "surgery.run.folder": _FOLDERS,
        "surgery.files.atomic": _FOLDERS,
        "surgery.files.ownership": _FOLDERS,
        "surgery.recipe.inputs": _FOLDERS,
    },
}
