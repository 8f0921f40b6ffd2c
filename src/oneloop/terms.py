"""A learner's objective on one batch: loss = sum over terms of weight(step) x <by(stream), loss>.

Every denominator is counted here, once, over the whole batch, so a gradient does not depend on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from oneloop.data import Array, Batch, Need
from oneloop.ops import rows_sum, weight
from oneloop.stages import By, Learner, Metrics, Term

Couples: TypeAlias = Literal["token", "rollout", "group", "batch"]
COUPLES: tuple[Couples, ...] = ("token", "rollout", "group", "batch")


def token_weights(batch: Batch, stream_N: Array, by: By, alive_N: Array) -> Array:
    """What one unit of loss at each token weighs (N): its stream over the tokens of its unit and the number of units.

    alive_N: tokens in any term of the learner, the population of `over="all"`. A batch without such tokens weighs 0.
    """
    on_N = alive_N if by.over == "all" else stream_N != 0
    if not on_N.any():
        return np.zeros(len(stream_N))
    if by.unit == "token":
        return stream_N / on_N.sum()
    unit_R = np.arange(len(batch.rows))
    if by.unit == "group":
        unit_R = np.unique(batch.group_R, return_inverse=True)[1]
    unit_N = unit_R[batch.row_N]
    num_units = len(np.unique(unit_N[on_N]))
    if by.unit == "fixed":
        return stream_N / (by.length * num_units)
    tokens = np.bincount(unit_N, stream_N != 0, unit_R.max() + 1).clip(1)
    return stream_N / tokens[unit_N] / num_units


@dataclass(frozen=True)
class Job:
    """One term with weight on this batch: its place in the learner's objective, and how it was named in the columns."""

    index: int
    term: Term
    state: Any


class Sum:
    """The Objective of a learner on one batch. `batch` holds its weight columns; hand that to the engine."""

    def __init__(self, learner: Learner, batch: Batch, states: Mapping[str, Any], name: str) -> None:
        """Raises ValueError where a term's weight is not finite."""
        found = []
        for i, term in enumerate(learner.objective):
            scale = float(term.weight(batch.step) if callable(term.weight) else term.weight)
            if not np.isfinite(scale):
                raise ValueError(f"the weight of term {i} of learner {name} is {scale} at step {batch.step}")
            stream_N = weight(batch, term.on)
            if scale != 0 and stream_N.any():
                found.append((i, term, scale, stream_N))
        alive_N = np.zeros(len(batch.ids_N), bool)
        for *_, stream_N in found:
            alive_N |= stream_N != 0
        columns: dict[Need | str, Array] = dict(batch.columns)
        for i, term, scale, stream_N in found:
            w_N = scale * token_weights(batch, stream_N, term.by, alive_N)
            columns[f"weight.{i}"] = w_N if term.loss.axis == "token" else rows_sum(batch, w_N)
            read_N = stream_N != 0
            if term.loss.silent:
                read_N &= np.nan_to_num(batch.columns[term.loss.silent]) != 0
            columns[f"on.{i}"] = read_N
        self.jobs = [Job(i, t, states.get(f"{name}.{i}")) for i, t, *_ in found]
        self.batch = replace(batch, columns=columns)
        self.needs = [n for job in self.jobs for n in sorted(job.term.loss.needs, key=str) if isinstance(n, Need)]
        self.live = frozenset(n for n in self.needs if n.is_live)
        self.couples: Couples = max(  # pyright: ignore[reportAttributeAccessIssue]
            (job.term.loss.couples for job in self.jobs), key=COUPLES.index, default="token"
        )

    def on(self, part: Batch) -> Array:
        """Tokens some term reads (bool, N)."""
        out = np.zeros(len(part.row_N), bool)
        for job in self.jobs:
            out = out | (part.columns[f"on.{job.index}"] != 0)
        return out

    def __call__(self, part: Batch, live: Mapping[Need, Array]) -> tuple[Array, Metrics]:
        """The loss of a part and its metrics; live columns are NaN where nobody asked: gathered, never multiplied."""
        total, metrics = 0.0, {}
        for job in self.jobs:
            on_N = part.columns[f"on.{job.index}"] != 0
            if not on_N.any():
                continue
            seen = {n: _only(v, on_N) for n, v in live.items()}
            values, m = job.term.loss(part, seen, job.state)
            w = part.columns[f"weight.{job.index}"]
            keep = on_N if job.term.loss.axis == "token" else w != 0
            total = total + (w[keep] * values[keep]).sum()
            metrics |= {f"{type(job.term.loss).__name__.lower()}.{job.index}/{k}": v for k, v in m.items()}
        return total, metrics


def _only(column_N: Array, on_N: Array) -> Array:
    """The column with 0 where this term does not read it, so that one term's unread tokens cannot poison another's sum."""
    if isinstance(column_N, np.ndarray):
        return np.where(on_N, column_N, 0.0)
    return column_N.where(on_N, column_N.new_zeros(()))
