"""The clipped policy loss (PPO, 1707.06347, eq. 7): -min(w A, clip(w, 1 - low, 1 + high) A), w = pi / pi_sampler by token.

Evidence grade: FULL. Differs from the paper in: the bounds may differ (DAPO's clip-higher); the ratio is to the sampler's own
recorded log-prob, at the temperature it sampled with; a token nobody sampled is ratioed to the start of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from array_api_compat import array_namespace

from oneloop.data import LIVE_LOGP, Array, Batch, Need, State
from oneloop.ops import mean_metric, weight
from oneloop.stages import Loss, Metrics, setting

START_GIVEN = Need("logp", on="given")


@dataclass(frozen=True)
class Policy(Loss):
    """credit: the column of advantages. The log-ratio is bounded by `max_log_ratio` before exp, so that one token cannot explode."""

    credit: str = setting("credit")
    low: float = setting(0.2, low=0.0, high=1.0, source="PPO, 1707.06347")
    high: float = setting(0.2, low=0.0, high=math.inf, source="PPO, 1707.06347")
    max_log_ratio: float = setting(10.0, low=0.0, high=80.0, unit="nats")

    @property
    def needs(self) -> frozenset[Need | str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Live log-prob, the sampler's, the start's on given tokens, and the credit."""
        return frozenset({LIVE_LOGP, START_GIVEN, "sampled.logp", self.credit})

    @property
    def silent(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """No credit, no gradient."""
        return self.credit

    def __call__(self, batch: Batch, live: Mapping[Need, Array], state: State) -> tuple[Array, Metrics]:
        """Values (N). Metrics count tokens read: mismatch is |log-ratio| at equal weights (this step's version), ratio the mean w."""
        now_N, a_N = live[LIVE_LOGP], batch.columns[self.credit]
        xp = array_namespace(now_N)
        old_N = batch.columns["sampled.logp"]
        if START_GIVEN in batch.columns:
            old_N = xp.where(batch.masks["sampled"], old_N, batch.columns[START_GIVEN])
        gap_N = xp.where(xp.isnan(old_N), xp.zeros_like(now_N), now_N - old_N)
        w_N = xp.exp(xp.clip(gap_N, -self.max_log_ratio, self.max_log_ratio))
        free_N, held_N = -w_N * a_N, -xp.clip(w_N, 1 - self.low, 1 + self.high) * a_N
        on_N = (weight(batch, "policy") > 0) & (a_N != 0) & ~xp.isnan(old_N)
        sampled_N = on_N & batch.masks["sampled"]
        metrics = {
            "mismatch": mean_metric(xp.abs(gap_N), sampled_N & (batch.columns["version"] == batch.step)),
            "ratio": mean_metric(w_N, sampled_N),
            "abs_log_ratio": mean_metric(xp.abs(gap_N), on_N),
            "clipped": mean_metric(1.0 * (held_N > free_N), on_N),
        }
        return xp.maximum(free_N, held_N), metrics
