"""Plain rollouts: the policy answers, the environment replies, until the episode is over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from oneloop.data import Ids, Request, Rollout, Score, State, Turn
from oneloop.ops import one_line
from oneloop.stages import Environment, Rng, Rolling, Sampler, setting


@dataclass(frozen=True)
class Plain(Rolling):
    """All rollouts of a request at once; the prompt's keys and values are shared by the sampler."""

    max_turns: int = setting(1, low=1, high=100_000, unit="turns")

    async def __call__(
        self, request: Request, sampler: Sampler, environment: Environment, state: State, rng: Rng
    ) -> list[Rollout]:
        """request.count rollouts. Each draws from a stream of its own, so that it does not depend on its neighbours."""
        streams = rng.spawn(request.count)
        jobs = (self._one(request, i, sampler, environment, streams[i]) for i in range(request.count))
        return list(await asyncio.gather(*jobs))

    async def _one(self, request: Request, index: int, sampler: Sampler, environment: Environment, rng: Rng) -> Rollout:
        """One rollout. Where sampler or environment raises it ends with what it has, and the error as its score."""
        turns, score = list(request.prefix), None
        try:
            await self._play(turns, request, sampler, environment, rng)
        except Exception as error:
            score = Score(error=one_line(error))
        name = f"{request.id}/{index}"
        return Rollout(name, request.prompt, tuple(turns), request.id, request.origin, score=score, noise=request.noise)

    async def _play(self, turns: list[Turn], request: Request, sampler: Sampler, environment: Environment, rng: Rng) -> None:
        """Adds turns until the episode is over."""
        if turns and turns[-1].finish == "open":
            turns[-1] = await _go_on(turns[-1], request, sampler, rng)
        context: Ids | None = request.prompt.ids if not turns else None
        while True:
            if context is None:
                reply = await environment.reply(request.prompt, turns) if len(turns) < self.max_turns else None
                if reply is None:
                    break
                context = turns[-1].context + turns[-1].response + reply
                turns.append(await _turn(context, request, sampler, rng, observed=len(reply)))
            else:
                turns.append(await _turn(context, request, sampler, rng))
            context = None


async def _turn(context: Ids, request: Request, sampler: Sampler, rng: Rng, observed: int = 0) -> Turn:
    turn = await sampler(context, request, rng.random(request.max_tokens))
    return replace(turn, observed=observed)


async def _go_on(half: Turn, request: Request, sampler: Sampler, rng: Rng) -> Turn:
    """The rest of an open turn, by today's weights; what stands keeps its spans and log-probs."""
    room = request.max_tokens - len(half.response)
    if room <= 0:
        return replace(half, finish="length")
    rest = await sampler(half.context, request, rng.random(room), response=half.response)
    old = len(half.response)
    spans = tuple(replace(s, start=s.start + old, stop=s.stop + old) for s in rest.spans)
    recorded = {
        name: np.concatenate([half.recorded.get(name, np.full(old, np.nan)), new]) for name, new in rest.recorded.items()
    }
    return replace(
        rest,
        response=half.response + rest.response,
        spans=half.spans + spans,
        recorded=recorded,
        observed=half.observed,
    )
