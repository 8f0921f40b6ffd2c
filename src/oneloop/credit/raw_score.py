"""Credit = score, less a constant (REINFORCE; Williams 1992). Evidence grade: FULL."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oneloop.data import Batch, Map, State
from oneloop.stages import Assign, Rng, setting


@dataclass(frozen=True)
class RawScore(Assign):
    """The same credit on every token of a rollout."""

    baseline: float = setting(0.0, low=-1e9, high=1e9, unit="score")

    needs = frozenset({"score"})
    writes = frozenset({"credit"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        """Writes credit (N); 0 where the score is an error."""
        credit_R = np.nan_to_num(batch.columns["score"] - self.baseline)
        return {"credit": credit_R[batch.row_N]}, state
