"""Credit = (score - mean) / (std + eps) over the group (GRPO, 2402.03300, section 4.1.2). Evidence grade: FULL.

Differs from the paper in: a group whose scores are all equal gets exactly 0, so that rounding is never divided by eps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oneloop.data import Batch, Map, State
from oneloop.ops import peers
from oneloop.stages import Assign, Rng, setting


@dataclass(frozen=True)
class GroupNormalised(Assign):
    """The same credit on every token of a rollout."""

    eps: float = setting(1e-4, low=1e-8, high=1.0, unit="score", source="TRL 1.16, GRPOTrainer")
    sample_std: bool = setting(True, source="TRL 1.16 (n - 1); the paper does not say")

    needs = frozenset({"score"})
    writes = frozenset({"credit"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        """Writes credit (N)."""
        credit_R, score_R = np.zeros(len(batch.rows)), batch.columns["score"]
        for g in peers(batch):
            if np.ptp(score_R[g]) > 0:
                std = score_R[g].std(ddof=int(self.sample_std))
                credit_R[g] = (score_R[g] - score_R[g].mean()) / (std + self.eps)
        return {"credit": credit_R[batch.row_N]}, state
