"""Metrics: every one is a (sum, count) over a named population until it is printed, so that cutting a batch changes none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from oneloop.collect import Collected
from oneloop.data import Array, Batch
from oneloop.ops import rows_sum, weight
from oneloop.stages import Metrics


@dataclass
class Meter:
    """Adds up (sum, count) by name. A `mismatch` counts at a learner's first update only: later the weights differ on purpose."""

    totals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, prefix: str, metrics: Metrics, first: bool = True) -> None:
        """Raises ValueError where a metric has no count."""
        for name, pair in metrics.items():
            if name.endswith("mismatch") and not first:
                continue
            total, count = self.totals.get(f"{prefix}/{name}", (0.0, 0.0))
            self.totals[f"{prefix}/{name}"] = (total + pair[0], count + pair[1])

    def means(self) -> dict[str, float]:
        """Sum / count; a population that is empty has no mean and is left out."""
        return {k: s / n for k, (s, n) in sorted(self.totals.items()) if n > 0 and math.isfinite(s)}


def merge(a: Metrics, b: Metrics) -> dict[str, tuple[float, float]]:
    """Two cuts' metrics as one."""
    out = dict(a)
    for name, (s, n) in b.items():
        total, count = out.get(name, (0.0, 0.0))
        out[name] = (total + s, count + n)
    return out


def group_count(batch: Batch, on_N: Array) -> int:
    """Groups with at least one of these tokens."""
    return len(np.unique(batch.group_R[batch.row_N[on_N]]))


def summary(fresh: Collected, batch: Batch) -> Metrics:
    """What was sampled this step. Populations: rollouts with a score, all rollouts, all sampled tokens, all groups."""
    ours_R = np.array([r.origin == "policy" for r in batch.rows], bool)
    score_R = batch.columns["score"]
    good_R = ours_R & ~np.isnan(score_R)
    failed = len(fresh.errors) + sum(bool(r.score and r.score.error) for r in fresh.rows)
    sampled_N = (batch.columns["version"] >= 0) & ours_R[batch.row_N]  # failed rows too
    length_R = rows_sum(batch, 1.0 * sampled_N)
    last = [r.turns[-1].finish for r in fresh.rows]
    live = weight(batch, "policy") > 0
    varying = [np.ptp(score_R[good_R & (batch.group_R == g)]) > 0 for g in np.unique(batch.group_R[good_R])]
    out = {
        "score": (float(score_R[good_R].sum()), float(good_R.sum())),
        "error_rate": (float(failed), float(len(fresh.rows) + len(fresh.errors))),
        "response_tokens": (float(length_R[ours_R].sum()), float(ours_R.sum())),
        "truncated": (float(sum(f == "length" for f in last)), float(len(last))),
        "entropy": _mean(batch.columns["sampled.entropy"], sampled_N),
        "groups_varying": (float(sum(varying)), float(len(varying))),
        "groups_learnt": (float(group_count(batch, live & (_credit(batch) != 0))), 1.0),
        "rollouts": (float(len(fresh.rows)), 1.0),
        "staleness": _mean(batch.step - batch.columns["version"], sampled_N),
    }
    for name in sorted({p for r in fresh.rows if r.score for p in r.score.parts}):
        values = [r.score.parts[name] for r in fresh.rows if r.score and name in r.score.parts]
        out[f"part.{name}"] = (float(sum(values)), float(len(values)))
    return {**out, **by_task(fresh)}


def by_task(fresh: Collected) -> Mapping[str, tuple[float, float]]:
    """The error rate of each task, so that failures which favour some tasks are seen."""
    seen: dict[str, list[float]] = {}
    for task, _ in fresh.errors:
        seen.setdefault(task, []).append(1.0)
    for r in fresh.rows:
        seen.setdefault(r.prompt.task, []).append(float(bool(r.score and r.score.error)))
    if len(seen) < 2:
        return {}
    return {f"error_rate.{task}": (sum(v), float(len(v))) for task, v in sorted(seen.items())}


def _credit(batch: Batch) -> Array:
    credit = batch.columns.get("credit")
    return np.ones(len(batch.ids_N)) if credit is None else np.nan_to_num(credit)


def _mean(x_N: Array, on_N: Array) -> tuple[float, float]:
    on_N = on_N & ~np.isnan(x_N)
    return float(x_N[on_N].sum()), float(on_N.sum())
