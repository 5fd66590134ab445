"""Arms against one another, prompt by prompt. Owns: differences with intervals, exact tests, the gap that is closed.

Must never know: models, files. Every arm answered the same prompts, so that prompts are resampled and counted in pairs.
Shape legend: C tasks, N prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgery.stats import bootstrap_mean, holm, mcnemar

LEVEL = 0.05
_RESAMPLES = 2000
Flags = NDArray[np.bool_]


def contrast(arm_CN: Flags, than_CN: Flags, seed: int = 0) -> list[dict[str, Any]]:
    """How much more often `arm` is right than `than`, on each of C tasks with as many prompts.

    Returns:
        For each task: `difference` of the accuracies with its 95% percentile interval `low` to `high` (prompts
        resampled in pairs); `won` and `lost`: prompts that only `arm`, or only `than`, has right; exact McNemar
        p-values from these: `p_better` (one-sided, `arm` is better) and `p_two_sided`.
    """
    found = []
    differences = bootstrap_mean(arm_CN.astype(float) - than_CN, seed, _RESAMPLES)
    for difference, arm_N, than_N in zip(differences, arm_CN, than_CN, strict=True):
        p_better, p_worse = mcnemar(arm_N, than_N), mcnemar(than_N, arm_N)
        row = {"difference": difference.value, "low": difference.low, "high": difference.high}
        row |= {"won": int((arm_N & ~than_N).sum()), "lost": int((~arm_N & than_N).sum())}
        found.append(row | {"p_better": p_better, "p_two_sided": min(1.0, 2 * min(p_better, p_worse))})
    return found


def contrasts(
    correct: Mapping[str, Mapping[str, Flags]], pairs: Sequence[tuple[str, str]], seed: int = 0
) -> dict[str, dict[str, dict[str, Any]]]:
    """Every task of pairs of arms: arm -> than -> task -> `contrast` and `significant`.

    `significant`: the two-sided p-value falls at 0.05 with Holm's correction over the whole table.

    Args:
        correct: arm -> task -> (N,) right or wrong by prompt.
        pairs: (arm, than); those with an arm that is not there are left out.
    """
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for arm, than in [pair for pair in pairs if set(pair) <= correct.keys()]:
        given = correct[arm]
        found: dict[str, dict[str, Any]] = {}
        for length in sorted({len(x) for x in given.values()}):  # prompts of one length are resampled together
            tasks = [task for task, x in given.items() if len(x) == length]
            arm_CN, than_CN = (np.stack([correct[name][task] for task in tasks]) for name in (arm, than))
            rows = contrast(arm_CN, than_CN, seed)
            found |= dict(zip(tasks, rows, strict=True))
        table.setdefault(arm, {})[than] = {task: found[task] for task in given}
    rows = [row for by_arm in table.values() for by_task in by_arm.values() for row in by_task.values()]
    for row, falls in zip(rows, holm([row["p_two_sided"] for row in rows], LEVEL), strict=True):
        row["significant"] = falls
    return table


def gap_closed(hybrid_N: Flags, control_N: Flags, teacher_N: Flags, seed: int = 0) -> dict[str, Any]:
    """The share of the way from the control to the teacher that the hybrid has gone.

        (accuracy of the hybrid - that of the control) / (accuracy of the teacher - that of the control)

    0 is the control, 1 the teacher; it may lie outside. The interval is the 95% percentile one over resampled prompts;
    resamples in which the teacher is not above the control (1 in 40 at most) have no share and are left out.

    Returns:
        `value`, `low`, `high`, `n`; or `value` None and the `reason`, where the interval of the teacher's lead reaches
        0: what is divided by nothing would be noise.
    """
    lead, gain = teacher_N.astype(float) - control_N, hybrid_N.astype(float) - control_N
    N = len(lead)
    counts_RN = np.random.default_rng(seed).multinomial(N, np.full(N, 1 / N), size=_RESAMPLES)
    leads_R, gains_R = counts_RN @ lead, counts_RN @ gain
    low, high = np.percentile(leads_R, [2.5, 97.5]) / N
    if low <= 0:
        text = f"the teacher is not above the control: it leads by {lead.mean():.3f} [{low:.3f}, {high:.3f}]"
        return {"value": None, "reason": text}
    above = leads_R > 0
    low, high = np.percentile(gains_R[above] / leads_R[above], [2.5, 97.5])
    return {"value": float(gain.mean() / lead.mean()), "low": float(low), "high": float(high), "n": N}


__all__ = ["LEVEL", "contrast", "contrasts", "gap_closed"]
