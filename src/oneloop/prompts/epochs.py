"""Prompts epoch by epoch, without replacement: every prompt once before any comes again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from oneloop.data import Prompt, Request, State
from oneloop.stages import Prompts, Resources, Rng, setting


@dataclass(frozen=True)
class Epochs(Prompts):
    """`prompts` requests of `rollouts` each. A new order is drawn when an epoch begins; the state is that order and the place in it."""

    prompts: int = setting(16, low=1, high=1_000_000, unit="prompts a step")
    rollouts: int = setting(8, low=1, high=100_000, unit="rollouts a prompt")
    temperature: float = setting(1.0, low=0.0, high=100.0)
    max_tokens: int = setting(256, low=1, high=10_000_000, unit="tokens a turn")
    pool: Sequence[Prompt] = field(default=(), repr=False, compare=False)

    def open(self, resources: Resources) -> Epochs:
        """The same, over the run's training prompts."""
        return replace(self, pool=tuple(resources.prompts))

    def init(self) -> State:
        """Before the first epoch."""
        return {"epoch": 0, "place": 0, "order": []}

    def __call__(self, step: int, state: State, rng: Rng) -> tuple[list[Request], State]:
        """The next prompts in order; an epoch's end and the next one's start may meet in one step."""
        if not self.pool:
            raise ValueError("Epochs has no prompts: is the task's training split empty?")
        epoch, place, order, out, passed = state["epoch"], state["place"], list(state["order"]), [], 0
        while len(out) < self.prompts:
            if place == len(order):
                epoch, place, order = epoch + 1, 0, [int(i) for i in rng.permutation(len(self.pool))]
            prompt = self.pool[order[place]]
            if passed >= 2 * len(self.pool) or not self.rests(prompt, step, state):  # where all rest, nobody does
                out.append(self._request(f"{epoch}.{place}.{prompt.id}", prompt))
            else:
                passed += 1
            place += 1
        return out, {**state, "epoch": epoch, "place": place, "order": order}

    def rests(self, prompt: Prompt, step: int, state: State) -> bool:
        """Whether a prompt is passed over this time; never, here."""
        return False

    def _request(self, name: str, prompt: Prompt) -> Request:
        return Request(name, prompt, self.rollouts, temperature=self.temperature, max_tokens=self.max_tokens)
