"""Greedy accuracy on a task's held-out problems, with the rates that explain it: format, truncation, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oneloop.data import Prompt, Request, Rollout
from oneloop.evaluation.intervals import wilson
from oneloop.stages import Reward


@dataclass(frozen=True)
class Measured:
    """One measurement: problem ids, whether each was solved, ended by itself, had the format, and failed to be scored."""

    ids: tuple[str, ...]
    solved: tuple[bool, ...]
    truncated: tuple[bool, ...]
    formatted: tuple[bool, ...]
    failed: tuple[bool, ...]
    lengths: tuple[int, ...]
    texts: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """Rates with 95% intervals. Accuracy counts a problem whose scoring failed as unsolved, and says how many there were."""
        n = len(self.ids)
        of_format = [s for s, f in zip(self.solved, self.formatted, strict=True) if f]
        return {
            "problems": n,
            "accuracy": rate(sum(self.solved), n),
            "format": rate(sum(self.formatted), n),
            "accuracy_given_format": rate(sum(of_format), len(of_format)),
            "truncated": rate(sum(self.truncated), n),
            "scoring_errors": sum(self.failed),
            "mean_tokens": float(np.mean(self.lengths)) if n else 0.0,
        }

    def plain(self) -> dict[str, Any]:
        """JSON values."""
        return {"summary": self.summary(), **asdict(self)}


def rate(successes: int, n: int) -> dict[str, Any]:
    """A proportion with Wilson's interval."""
    low, high = wilson(successes, n)
    return {"value": successes / n if n else None, "low": low, "high": high, "of": n}


async def measure(
    prompts: Sequence[Prompt], sampler: Any, reward: Reward, *, max_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Measured:
    """One answer a problem, greedy by default."""

    async def one(i: int, prompt: Prompt) -> Rollout:
        request = Request(f"eval.{prompt.id}", prompt, 1, temperature=temperature, max_tokens=max_tokens)
        turn = await sampler(prompt.ids, request, np.random.default_rng([seed, i]).random(max_tokens))
        return Rollout(request.id, prompt, (turn,), request.id)

    rows = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
    if reward.alone:
        scores = [s[0] for s in await asyncio.gather(*(reward([r], None) for r in rows))]
    else:
        scores = await reward(rows, None)
    last = [r.turns[-1] for r in rows]
    return Measured(
        ids=tuple(p.id for p in prompts),
        solved=tuple(s.value == 1.0 for s in scores),
        truncated=tuple(t.finish == "length" for t in last),
        formatted=tuple(s.parts.get("format", float(not s.error)) == 1.0 for s in scores),
        failed=tuple(bool(s.error) for s in scores),
        lengths=tuple(len(t.response) for t in last),
        texts=tuple(t.info.get("text", "") for t in last),
    )
