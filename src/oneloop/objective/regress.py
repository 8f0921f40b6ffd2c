"""Squared error of a scalar head against a column of returns; clipped around the value at the step's start (PPO2's value loss).

loss = max((V - G)^2, (clip(V, V_start - clip, V_start + clip) - G)^2); clip = inf leaves the plain square. Evidence grade: CODE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from array_api_compat import array_namespace

from oneloop.data import Array, Batch, Need, Source, State
from oneloop.stages import Loss, Metrics, setting


@dataclass(frozen=True)
class Regress(Loss):
    """head: a head of `model`; target: the column it should predict, in units of score."""

    head: str = setting("value")
    target: str = setting("return")
    model: str = setting("critic")
    clip: float = setting(math.inf, low=0.0, high=math.inf, unit="score")

    @property
    def live(self) -> Need:
        """The head's live value."""
        return Need(f"value.{self.head}", (Source(self.model, at="live"),))

    @property
    def start(self) -> Need:
        """The head's value at the step's start."""
        return Need(f"value.{self.head}", (Source(self.model),))

    @property
    def needs(self) -> frozenset[Need | str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Live value and target; the start value where it is clipped around."""
        return frozenset({self.live, self.target} | ({self.start} if math.isfinite(self.clip) else set()))

    def __call__(self, batch: Batch, live: Mapping[Need, Array], state: State) -> tuple[Array, Metrics]:
        """Values (N)."""
        v_N, g_N = live[self.live], batch.columns[self.target]
        xp = array_namespace(v_N)
        error_N = (v_N - g_N) ** 2
        if math.isfinite(self.clip):
            start_N = batch.columns[self.start]
            near_N = xp.minimum(xp.maximum(v_N, start_N - self.clip), start_N + self.clip)
            error_N = xp.maximum(error_N, (near_N - g_N) ** 2)
        return error_N, {}
