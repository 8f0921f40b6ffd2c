"""Evolution strategies: the sum of each rollout's noise, weighted by the credit it earned; no gradient.

direction = -mean over rollouts of credit x normal / scale (Salimans et al., 1703.03864, eq. 1), where the weights that answered
were weights + scale x normal. Evidence grade: FULL. Rows outside the policy stream (errors, joined rows) count nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oneloop.data import Batch, State
from oneloop.ops import rows_sum
from oneloop.stages import Engine, Estimate, Metrics, Objective, Rng


@dataclass(frozen=True)
class PerturbedWeights(Estimate):
    """Reads column "credit"; every rollout must come from a request with noise."""

    def __call__(
        self, engine: Engine, model: str, batch: Batch, objective: Objective, state: State, rng: Rng
    ) -> tuple[Any, Metrics, State]:
        """Name -> direction. Raises ValueError where a rollout of the policy stream was sampled without noise."""
        on_N = batch.streams["policy"] > 0
        tokens_R = rows_sum(batch, 1.0 * on_N)
        credit_R = rows_sum(batch, batch.columns["credit"] * on_N) / tokens_R.clip(1)
        total: dict[Any, float] = {}
        for r in (tokens_R > 0).nonzero()[0]:
            noise = batch.rows[r].noise
            if noise is None or noise.scale == 0:
                raise ValueError(f"rollout {batch.rows[r].id} was sampled without noise: its request must name one")
            # engine.noise returns scale x normal, hence the square
            total[noise] = total.get(noise, 0.0) - float(credit_R[r]) / noise.scale**2 / int((tokens_R > 0).sum())
        out: dict[str, Any] = {}
        for noise, c in total.items():
            for name, e in engine.noise(model, noise).items():
                out[name] = out[name].add_(e, alpha=c) if name in out else e * c
        return out, {}, state
