"""Negative log-likelihood of the tokens of a stream: supervised learning, behaviour cloning, next-observation losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oneloop.data import LIVE_LOGP, Array, Batch, Need, State
from oneloop.stages import Loss, Metrics


@dataclass(frozen=True)
class Nll(Loss):
    """-log pi(token)."""

    needs = frozenset({LIVE_LOGP})

    def __call__(self, batch: Batch, live: Mapping[Need, Array], state: State) -> tuple[Array, Metrics]:
        """Values (N)."""
        return -live[LIVE_LOGP], {}
