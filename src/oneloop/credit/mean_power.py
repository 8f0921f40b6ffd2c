"""Credit = (score - m) / m^q, m the mean score of the group, for scores in [0, 1] (MaxRL is q = 1; Dr. GRPO is q = 0).

A prompt that is seldom solved counts for more: with q = 1 the expected direction is that of log(success). Evidence grade: PARTIAL.
A group whose mean is 0 has nothing to go towards: exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oneloop.data import Batch, Map, State
from oneloop.ops import peers
from oneloop.stages import Assign, Rng, setting


@dataclass(frozen=True)
class MeanPower(Assign):
    """The same credit on every token of a rollout. Raises ValueError on a score outside [0, 1]."""

    q: float = setting(1.0, low=0.0, high=1.0)

    needs = frozenset({"score"})
    writes = frozenset({"credit"})
    scores = (0.0, 1.0)

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        """Writes credit (N)."""
        credit_R, score_R = np.zeros(len(batch.rows)), batch.columns["score"]
        for g in peers(batch):
            low, high = score_R[g].min(), score_R[g].max()
            if low < 0 or high > 1:
                raise ValueError(f"MeanPower wants scores between 0 and 1, not {low if low < 0 else high:g}")
            if high > low:
                mean = score_R[g].mean()
                credit_R[g] = (score_R[g] - mean) / mean**self.q
        return {"credit": credit_R[batch.row_N]}, state
