"""Sampling as a service: rollouts await their turns, one decoder at a time works for all of them.

Consumes: jobs, each for one version of one model's weights. Waits for: nothing; it decodes while anybody waits. Is unblocked by: a
job. Produces: turns whose span names the version, digest and temperature that sampled every token. Jobs of one version are served
before the next version's; within a version first come, first served. No keys and values outlive a change of weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oneloop.data import Array, Ids, Noise, Request, Span, Turn
from oneloop.engine.decode import Answer, Decoder, Job


@dataclass(frozen=True)
class Weights:
    """Whose weights: model, version, and the noise on them."""

    model: str
    version: int
    noise: Noise | None = None


@dataclass
class Served:
    """A decoder over a module that holds these weights, and their digest."""

    decoder: Decoder
    digest: str


@dataclass
class Service:
    """open: makes (or finds) the decoder for weights; what it returned before may no longer be used. decode: ids to text."""

    open: Callable[[Weights], Served]
    decode: Callable[[Ids], str]
    stop: frozenset[int]
    waiting: dict[Weights, list[tuple[Job, asyncio.Future[Turn]]]] = field(default_factory=dict)
    pump: asyncio.Task[None] | None = None
    sampled_tokens: int = 0

    def sampler(self, weights: Weights) -> Any:
        """A Sampler for one version of one model."""

        async def sample(context: Ids, request: Request, uniforms: Array, *, response: Ids = ()) -> Turn:
            job = Job(context + response, len(uniforms), request.temperature, np.asarray(uniforms), self.stop)
            turn = await self._ask(weights, job)
            said = turn.response[:-1] if turn.finish == "stop" else turn.response
            info = {**turn.info, "text": self.decode(response + said)}  # the whole turn's, what stood before included
            return Turn(context, turn.response, turn.spans, turn.recorded, turn.finish, info=info)

        return sample

    async def _ask(self, weights: Weights, job: Job) -> Turn:
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(weights, []).append((job, future))
        if self.pump is None or self.pump.done():
            self.pump = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        """Decodes until nobody waits. A decoder that breaks fails the jobs that were waiting for it, not the service."""
        for _ in range(4):  # lets every rollout of the step ask before the first token: fuller batches, a fixed order
            await asyncio.sleep(0)
        while self.waiting:
            weights = next(iter(self.waiting))
            flying: dict[Any, tuple[Job, asyncio.Future[Turn]]] = {}
            served: Served | None = None
            try:
                served = self.open(weights)
                await self._serve(weights, served, flying)
            except Exception as error:
                if served is not None:
                    served.decoder.abort()
                for _, future in [*flying.values(), *self.waiting.pop(weights, [])]:
                    if not future.done():
                        future.set_exception(error)

    async def _serve(self, weights: Weights, served: Served, flying: dict[Any, Any]) -> None:
        """All jobs for one version, those that come while it works included."""
        while flying or self.waiting.get(weights):
            for job, future in self.waiting.pop(weights, []):
                try:
                    flying[served.decoder.submit(job)] = (job, future)
                except ValueError as error:  # this job alone cannot be served
                    future.set_exception(error)
            for handle, answer in served.decoder.step() if flying else []:
                job, future = flying.pop(handle)
                self.sampled_tokens += len(answer.ids)
                if not future.done():
                    future.set_result(self._turn(job, answer, weights, served.digest))
            await asyncio.sleep(0)
        self.waiting.pop(weights, None)

    def _turn(self, job: Job, answer: Answer, weights: Weights, digest: str) -> Turn:
        span = Span(0, len(answer.ids), weights.version, digest, job.temperature)
        recorded = {"logp": answer.logp, "raw_logp": answer.raw_logp, "entropy": answer.entropy}
        return Turn(job.context, answer.ids, (span,), recorded, answer.finish)


class DecoderPool:
    """Opens decoders for the service: over the live module where it holds the weights asked, else over a second copy of it."""

    def __init__(self, engine: Any, slots: int) -> None:
        """engine: the TorchEngine whose networks and snapshots are served."""
        self.engine, self.slots = engine, slots
        self.live: dict[str, tuple[Decoder, str]] = {}
        self.shadow: dict[str, Any] = {}

    def __call__(self, weights: Weights) -> Served:
        """Raises ValueError where the version is no longer kept."""
        network = self.engine.networks[weights.model]
        digest = self.engine.digests[weights.model]
        if weights.version == self.engine.version and weights.noise is None:
            decoder, known = self.live.get(weights.model, (None, ""))
            if decoder is None:
                decoder = Decoder(network.module, slots=self.slots)
            if known != digest:
                decoder.forget()
            self.live[weights.model] = (decoder, digest)
            return Served(decoder, digest)
        module, digest = self.engine.shadow_of(weights)
        decoder = self.shadow.get(weights.model)
        if decoder is None or decoder[0] is not module:
            decoder = (module, Decoder(module, slots=self.slots))
            self.shadow[weights.model] = decoder
        decoder[1].forget()
        return Served(decoder[1], digest)
