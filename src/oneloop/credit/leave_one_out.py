"""Credit = score - mean score of the group's OTHER rollouts (RLOO, 2402.14740, eq. 8). Evidence grade: FULL."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oneloop.data import Batch, Map, State
from oneloop.ops import peers
from oneloop.stages import Assign, Rng


@dataclass(frozen=True)
class LeaveOneOut(Assign):
    """The same credit on every token of a rollout. A group of one has no others and so no credit: 0."""

    needs = frozenset({"score"})
    writes = frozenset({"credit"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        """Writes credit (N) = n / (n - 1) x (score - group mean), which is the same number."""
        credit_R, score_R = np.zeros(len(batch.rows)), batch.columns["score"]
        for g in peers(batch):
            if len(g) > 1 and np.ptp(score_R[g]) > 0:
                credit_R[g] = (score_R[g] - score_R[g].mean()) * len(g) / (len(g) - 1)
        return {"credit": credit_R[batch.row_N]}, state
