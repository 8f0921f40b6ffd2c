"""The task's own right answers as rows: supervised fine-tuning, and a second term beside RL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from oneloop.data import Ids, Prompt, Rollout, Score, State, Turn
from oneloop.stages import Join, Resources, Rng, setting


@dataclass(frozen=True)
class Demonstrations(Join):
    """`rows` demonstrations a step, epoch by epoch, origin "demonstration"; no span, no log-prob, score 1."""

    rows: int = setting(32, low=1, high=10**7, unit="rows a step")
    pool: Sequence[tuple[Prompt, Ids]] = field(default=(), repr=False, compare=False)

    def open(self, resources: Resources) -> Demonstrations:
        """The same, over the task's items. Raises ValueError where the task has no demonstrations."""
        pairs = zip(resources.prompts, resources.items, strict=True)
        found = tuple((p, (*resources.encode(i.demonstration), resources.end)) for p, i in pairs if i.demonstration)
        if not found:
            raise ValueError("this task has no demonstrations: its items need the field `demonstration`")
        return replace(self, pool=found)

    def init(self) -> State:
        """Before the first epoch."""
        return {"epoch": 0, "place": 0, "order": []}

    def __call__(self, fresh: Sequence[Rollout], state: State, rng: Rng) -> tuple[list[Rollout], State]:
        """The next rows in order."""
        if not self.pool:
            raise ValueError("Demonstrations has no rows: use Demonstrations().open(resources)")
        epoch, place, order, out = state["epoch"], state["place"], list(state["order"]), []
        while len(out) < self.rows:
            if place == len(order):
                epoch, place, order = epoch + 1, 0, [int(i) for i in rng.permutation(len(self.pool))]
            prompt, response = self.pool[order[place]]
            name = f"demonstration.{epoch}.{place}.{prompt.id}"
            out.append(Rollout(name, prompt, (Turn(prompt.ids, response),), name, "demonstration", score=Score(1.0)))
            place += 1
        return out, {"epoch": epoch, "place": place, "order": order}
