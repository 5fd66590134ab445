"""Paired differences between arms, with intervals and exact tests, and the fraction of a gap that an arm closes.

An arm is one evaluated model. All arms answer the same prompts, so tests and bootstrap are paired by prompt.

Shape legend: C tasks, N prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgery.stats import bootstrap_mean, holm, mcnemar, resampled_counts

Flags = NDArray[np.bool_]


def contrast(arm_CN: Flags, reference_CN: Flags, seed: int = 0) -> list[dict[str, Any]]:
    """Compare the accuracy of an arm with a reference, on C tasks with N prompts each.

    Returns:
        One dict for each task:

        - `difference` of the accuracies, with its 95% percentile interval `low` to `high` (paired bootstrap).
        - `won` and `lost`: number of prompts that only the arm, or only the reference, answers correctly.
        - `p_better` (one-sided, the arm is better) and `p_two_sided`: exact McNemar p-values.
    """
    rows = []
    differences = bootstrap_mean(arm_CN.astype(float) - reference_CN, seed)
    for difference, arm_N, reference_N in zip(differences, arm_CN, reference_CN, strict=True):
        p_better, p_worse = mcnemar(arm_N, reference_N), mcnemar(reference_N, arm_N)
        row = {"difference": difference.value, "low": difference.low, "high": difference.high}
        row |= {"won": int((arm_N & ~reference_N).sum()), "lost": int((~arm_N & reference_N).sum())}
        rows.append(row | {"p_better": p_better, "p_two_sided": min(1.0, 2 * min(p_better, p_worse))})
    return rows


def contrasts(
    correct: Mapping[str, Mapping[str, Flags]], pairs: Sequence[tuple[str, str]], seed: int = 0
) -> dict[str, dict[str, dict[str, Any]]]:
    """Compare pairs of arms on every task.

    Args:
        correct: arm -> task -> (N,) True for each prompt that the arm answers correctly.
        pairs: (arm, reference). Pairs with a missing arm are skipped.

    Returns:
        arm -> reference -> task -> the result of `contrast`, with `significant`: True if the arms differ at 0.05, by
        the two-sided test with Holm's correction over all entries.
    """
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for arm, reference in [pair for pair in pairs if set(pair) <= correct.keys()]:
        by_task: dict[str, dict[str, Any]] = {}
        for count in sorted({len(x) for x in correct[arm].values()}):  # tasks of one size share resamples
            tasks = [task for task, x in correct[arm].items() if len(x) == count]
            arm_CN, reference_CN = (np.stack([correct[name][task] for task in tasks]) for name in (arm, reference))
            by_task |= dict(zip(tasks, contrast(arm_CN, reference_CN, seed), strict=True))
        table.setdefault(arm, {})[reference] = {task: by_task[task] for task in correct[arm]}
    rows = [row for by_arm in table.values() for by_task in by_arm.values() for row in by_task.values()]
    for row, rejected in zip(rows, holm([row["p_two_sided"] for row in rows]), strict=True):
        row["significant"] = rejected
    return table


def gap_closed(hybrid_N: Flags, control_N: Flags, teacher_N: Flags, seed: int = 0) -> dict[str, Any]:
    """Fraction of the accuracy gap between control and teacher that the hybrid closes.

        (hybrid - control) / (teacher - control)

    0 is the accuracy of the control, 1 that of the teacher. Values outside this range are possible. The 95% percentile
    interval resamples prompts. Resamples without a gap (at most 1 in 40) are dropped.

    Returns:
        `value`, `low`, `high`, `n`. If the interval of the gap includes 0: `value` None and the `reason`.
    """
    lead, gain = teacher_N.astype(float) - control_N, hybrid_N.astype(float) - control_N
    N = len(lead)
    counts_RN = resampled_counts(N, seed)
    leads_R, gains_R = counts_RN @ lead, counts_RN @ gain
    low, high = np.percentile(leads_R, [2.5, 97.5]) / N
    if low <= 0:
        text = f"the teacher is not above the control: it leads by {lead.mean():.3f} [{low:.3f}, {high:.3f}]"
        return {"value": None, "reason": text}
    above = leads_R > 0
    low, high = np.percentile(gains_R[above] / leads_R[above], [2.5, 97.5])
    return {"value": float(gain.mean() / lead.mean()), "low": float(low), "high": float(high), "n": N}
