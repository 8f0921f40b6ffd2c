"""The gradient of the objective, by backpropagation over the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oneloop.data import Batch, State
from oneloop.stages import Engine, Estimate, Metrics, Objective, Rng


@dataclass(frozen=True)
class Backprop(Estimate):
    """Exact; the engine cuts the batch where the objective allows it."""

    def __call__(
        self, engine: Engine, model: str, batch: Batch, objective: Objective, state: State, rng: Rng
    ) -> tuple[Any, Metrics, State]:
        """Name -> gradient."""
        direction, metrics = engine.pull(model, batch, objective)
        return direction, metrics, state
