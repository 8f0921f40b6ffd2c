"""The same response after the prompt with a hint put before it: a coach, a privileged teacher, on-policy self-distillation."""

from __future__ import annotations

from dataclasses import dataclass

from oneloop.data import Batch, Ids, Rollout
from oneloop.stages import View, setting


@dataclass(frozen=True)
class Hint(View):
    """The ids in prompt.meta[key] go before every context of the row; a prompt without them keeps its own."""

    key: str = setting("hint_ids")

    def __call__(self, rollout: Rollout, batch: Batch) -> tuple[Ids, ...]:
        """One context a turn."""
        hint = tuple(rollout.prompt.meta.get(self.key, ()))
        return tuple(hint + t.context for t in rollout.turns)
