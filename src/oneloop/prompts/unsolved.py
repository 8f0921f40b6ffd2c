"""Epochs in which solved prompts rest: a prompt whose whole group was right is passed over for some steps, then asked again.

A group that is all right teaches nothing (its credit is 0), yet costs as much as one that varies. What rests is the question, by its
token ids: its copies rest with it. It comes back, so what is forgotten is noticed. Evidence grade: INFERRED (ours; in the spirit of
DAPO's dynamic sampling, 2503.14476, which samples such groups and drops them).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oneloop.data import Batch, Map, Prompt, State
from oneloop.ops import peers
from oneloop.prompts.epochs import Epochs
from oneloop.stages import setting


@dataclass(frozen=True)
class Unsolved(Epochs):
    """As Epochs, with `rest` steps of rest for a prompt all of whose rollouts scored at least `solved`."""

    rest: int = setting(30, low=0, high=10**9, unit="steps")
    solved: float = setting(1.0, low=-1e9, high=1e9, unit="score")

    def init(self) -> State:
        """Before the first epoch; nobody rests."""
        return {**super().init(), "until": {}}

    def rests(self, prompt: Prompt, step: int, state: State) -> bool:
        """Whether the question was solved of late."""
        return state["until"].get(_key(prompt), 0) > step

    def observe(self, batch: Batch, metrics: Map, state: State) -> State:
        """Sends the questions of all-right groups to rest; wakes those whose time is over."""
        until = {k: v for k, v in state["until"].items() if v > batch.step + 1}
        for g in peers(batch):
            if np.min(batch.columns["score"][g]) >= self.solved:
                until[_key(batch.rows[g[0]].prompt)] = batch.step + 1 + self.rest
        return {**state, "until": until}


def _key(prompt: Prompt) -> str:
    """A question's name: its token ids."""
    return ".".join(map(str, prompt.ids))
