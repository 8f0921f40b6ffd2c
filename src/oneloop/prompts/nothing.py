"""No requests: recipes that learn from joined rows alone (supervised, offline)."""

from __future__ import annotations

from dataclasses import dataclass

from oneloop.data import Request, State
from oneloop.stages import Prompts, Rng


@dataclass(frozen=True)
class Nothing(Prompts):
    """Samples nothing."""

    def __call__(self, step: int, state: State, rng: Rng) -> tuple[list[Request], State]:
        """An empty list."""
        return [], state
