"""The task's own scorer on the text of the last response, run in the sandbox. A failure is an error, never a 0."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oneloop.data import Rollout, Score, State
from oneloop.stages import Resources, Reward


@dataclass(frozen=True)
class Verified(Reward):
    """Calls prompt.meta["scorer"], a "module:function" of (text, meta) that returns {"value": float, "parts": {...}}."""

    scorer: str = ""  # overrides the task's own
    call: Callable[..., Awaitable[Any]] | None = field(default=None, repr=False, compare=False)

    def open(self, resources: Resources) -> Verified:
        """The same, with the sandbox's call."""
        return replace(self, call=resources.call)

    async def __call__(self, group: Sequence[Rollout], state: State) -> list[Score]:
        """One score a rollout; the group's are asked at once."""
        return list(await asyncio.gather(*(self._one(r) for r in group)))

    async def _one(self, rollout: Rollout) -> Score:
        if self.call is None:
            raise ValueError("Verified has no sandbox: use Verified().open(resources)")
        target = self.scorer or rollout.prompt.meta.get("scorer", "")
        if not target:
            return Score(error=f"task {rollout.prompt.task!r} names no scorer: give the recipe's reward one")
        outcome = await self.call(target, rollout.turns[-1].info.get("text", ""), dict(rollout.prompt.meta))
        if outcome.error:
            return Score(error=outcome.error)
        return read_verdict(outcome.value, target)


def read_verdict(said: Any, target: str) -> Score:
    """A scorer's reply as a Score: a number, or a mapping with "value" and "parts". Anything else is an error."""
    body = said if isinstance(said, dict) else {"value": said}
    value, parts = body.get("value"), body.get("parts", {})
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if value is None:
        return Score(error=f"{target} gave no value: it must return a number or {{'value': number}}")
    if not is_number:
        return Score(error=f"{target} gave {value!r}: a reward must be a finite number")
    if not isinstance(parts, dict) or not all(isinstance(v, int | float) and math.isfinite(v) for v in parts.values()):
        return Score(error=f"{target} gave parts that are not finite numbers")
    return Score(float(value), parts={str(k): float(v) for k, v in parts.items()})
