"""Evolution strategies: the sum of each rollout's noise, weighted by the credit it earned; no gradient.

direction = -mean over rollouts of credit x noise / scale (Salimans et al., 1703.03864, eq. 1). Evidence grade: FULL.
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
        """name -> direction. Raises ValueError where a rollout was sampled without noise."""
        on_N = batch.streams["policy"] > 0
        credit_R = rows_sum(batch, batch.columns["credit"] * on_N) / rows_sum(batch, 1.0 * on_N).clip(1)
        total: dict[Any, float] = {}
        for r, row in enumerate(batch.rows):
            if row.noise is None:
                raise ValueError(f"rollout {row.id} was sampled without noise: its request must name one")
            total[row.noise] = total.get(row.noise, 0.0) - credit_R[r] / abs(row.noise.scale) / len(batch.rows)
        out: dict[str, Any] = {}
        for noise, c in total.items():
            for name, e in engine.noise(model, noise).items():
                out[name] = out[name].add_(e, alpha=c) if name in out else e * c
        return out, {}, state
