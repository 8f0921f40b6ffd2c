"""Groups whose scores are all equal leave the policy stream, with a reason (DAPO's dynamic sampling, 2503.14476, eq. 11).

Evidence grade: FULL. Refilling the step until enough groups vary is the recipe's `enough`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oneloop.data import Batch, Map, State
from oneloop.ops import peers
from oneloop.stages import Assign, Rng


@dataclass(frozen=True)
class DropConstantGroups(Assign):
    """Touches only rows of origin `policy`; a group of one is constant."""

    needs = frozenset({"score"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        """Writes stream.policy (N) and reasons."""
        score_R, keep_R, reasons = batch.columns["score"], np.ones(len(batch.rows)), {}
        for g in peers(batch):
            if np.ptp(score_R[g]) == 0:
                keep_R[g] = 0
                reasons |= {batch.rows[r].id: f"constant group: every score is {score_R[g[0]]:g}" for r in g}
        return {"stream.policy": batch.streams["policy"] * keep_R[batch.row_N], "reasons": reasons}, state
