"""Credit = score - mean score of the group (Dr. GRPO, 2503.20783, eq. 3: A_i = r_i - mean(r)). Evidence grade: FULL.

A group of one has no peers and so no credit: 0. Rows whose score is an error are no one's peers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oneloop.data import Batch, Map, State
from oneloop.ops import peers
from oneloop.stages import Assign, Rng


@dataclass(frozen=True)
class GroupMean(Assign):
    """The same credit on every token of a rollout."""

    needs = frozenset({"score"})
    writes = frozenset({"credit"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        """Writes credit (N)."""
        credit_R, score_R = np.zeros(len(batch.rows)), batch.columns["score"]
        for g in peers(batch):
            if np.ptp(score_R[g]) > 0:  # equal scores give exactly 0, not the rounding of their mean
                credit_R[g] = score_R[g] - score_R[g].mean()
        return {"credit": credit_R[batch.row_N]}, state
