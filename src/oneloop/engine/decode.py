"""The sampling engine: continuous batching over transformers causal language models, on CPU and CUDA.

A fixed number of slots decodes one token a step, all busy slots in one forward. A context's prompt is prefilled once
and its keys are read by all its responses; a finished slot is refilled at the next step. It knows no method: jobs in,
answers out, the same bits for the same submissions in the same order.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from oneloop.engine.decode_models import choose, evaluating, weights_token
from oneloop.engine.sampling import Sampler


@dataclass(frozen=True)
class Job:
    """One response to sample."""

    context: tuple[int, ...]  # prompt ids, at least one
    max_tokens: int  # >= 1
    temperature: float  # >= 0; 0 is greedy
    uniforms: np.ndarray  # float64 [max_tokens] in [0, 1): token j uses uniforms[j], in whatever slot or batch
    stop: frozenset[int] = frozenset()  # a sampled end token is kept as the last token


@dataclass(frozen=True)
class Answer:
    """A response of L tokens and what was recorded while it was sampled, float64 [L] in nats.

    `logp` is under the distribution that was sampled, softmax(logits / temperature), and 0 for greedy, a point mass;
    `raw_logp` and `entropy` are those of softmax(logits).
    """

    ids: tuple[int, ...]
    finish: Literal["stop", "length", "abort"]
    logp: np.ndarray
    raw_logp: np.ndarray
    entropy: np.ndarray


@dataclass
class Counters:
    """What the engine has done so far, in its own units of work."""

    steps: int = 0
    busy_slot_steps: int = 0
    offered_slot_steps: int = 0  # slots of every step at which a job was waiting or running
    least_busy_while_waiting: int | None = None  # fewest busy slots of a step that left jobs waiting; None: never
    prefilled_tokens: int = 0
    decoded_tokens: int = 0  # sampled tokens
    peak_cache_bytes: int = 0


@dataclass
class _Busy:
    handle: int
    job: Job
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    raw_logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)

    def answer(self, finish: Literal["stop", "length", "abort"]) -> Answer:
        return Answer(tuple(self.ids), finish, *(np.array(x) for x in (self.logp, self.raw_logp, self.entropy)))


class Decoder:
    """Samples jobs from `model` in `slots` slots, first come first served.

    `reason` is '' where contexts are shared through the attention interface; otherwise it says in one line why the
    model takes the slow path through its own cache. The model is used as it stands: its attention implementation,
    training flags and layers are as before after every step.
    """

    def __init__(
        self, model: torch.nn.Module, *, slots: int = 64, prefill_tokens: int = 4096, pack_weights: bool = True
    ) -> None:
        """Probe the model and take the fastest exact path.

        Args:
            model: a causal language model of transformers, or an adapter's wrapper around one.
            slots: responses decoded at once.
            prefill_tokens: most tokens of new contexts in one forward (one longer context goes alone).
            pack_weights: on a CPU in bf16, keep a second copy of the linear weights in the matrix unit's layout.

        """
        if slots < 1 or prefill_tokens < 1:
            raise ValueError(f"slots = {slots} and prefill_tokens = {prefill_tokens} must be at least 1")
        self.slots, self._model = slots, model
        self._rows = choose(model, slots=slots, prefill_tokens=prefill_tokens, pack_weights=pack_weights)
        self.reason = self._rows.reason
        self._config = getattr(model, "config").get_text_config()  # noqa: B009 - not an attribute of nn.Module
        self._sampler, self.counters = Sampler(), Counters()
        self._waiting: deque[tuple[int, Job]] = deque()
        self._wanted: Counter[tuple[int, ...]] = Counter()  # contexts of waiting jobs
        self._busy: list[_Busy] = []
        self._next_handle = 0
        self._token = weights_token(model)

    @property
    def num_waiting(self) -> int:
        """Jobs submitted and not yet in a slot."""
        return len(self._waiting)

    @property
    def num_busy(self) -> int:
        """Jobs in a slot."""
        return len(self._busy)

    def submit(self, job: Job) -> int:
        """Queue a job and return its handle.

        Raises:
            ValueError: the job is not one this model can answer; nothing was queued.

        """
        self._check(job)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._waiting.append((handle, job))
        self._wanted[job.context] += 1
        return handle

    def _check(self, job: Job) -> None:
        if not job.context:
            raise ValueError("a job's context is empty: give at least one token")
        if job.max_tokens < 1:
            raise ValueError(f"max_tokens = {job.max_tokens} must be at least 1")
        limit = getattr(self._config, "max_position_embeddings", None)
        need = len(job.context) + job.max_tokens - 1  # the last token is never read
        if limit is not None and need > limit:
            raise ValueError(
                f"a context of {len(job.context)} tokens and {job.max_tokens} new ones need {need} positions, the "
                f"model has {limit}: shorten the context or lower max_tokens"
            )
        size = self._config.vocab_size
        if min(job.context) < 0 or max(job.context) >= size:
            raise ValueError(f"the context has ids outside [0, {size}): the tokenizer is not this model's")
        if not 0 <= job.temperature < float("inf"):
            raise ValueError(f"temperature = {job.temperature} must be finite and >= 0")
        uniforms = np.asarray(job.uniforms)
        if uniforms.shape != (job.max_tokens,) or uniforms.dtype != np.float64:
            raise ValueError(f"uniforms must be float64 [{job.max_tokens}], not {uniforms.dtype} {uniforms.shape}")
        if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
            raise ValueError("uniforms must lie in [0, 1)")

    def step(self) -> list[tuple[int, Answer]]:
        """Decode one token for every busy slot, admitting waiting jobs first; return those that finished.

        Raises:
            RuntimeError: the weights changed while jobs were in their slots.
            FloatingPointError: the model's logits are not finite.

        """
        if not self._waiting and not self._busy:
            return []
        self._renew()
        with evaluating(self._model):
            logits = [self._rows.advance([busy.ids[-1] for busy in self._busy])] if self._busy else []
            admitted = self._admit()
            if admitted:
                logits.append(self._rows.admit(admitted))
            drawn = self._sampler(
                torch.cat(logits) if len(logits) > 1 else logits[0],
                np.array([busy.job.temperature for busy in self._busy], dtype=np.float64),
                np.array([busy.job.uniforms[len(busy.ids)] for busy in self._busy], dtype=np.float64),
            )
            self._count()
            columns = (drawn.ids.tolist(), drawn.logp.tolist(), drawn.raw_logp.tolist(), drawn.entropy.tolist())
            for busy, token, logp, raw_logp, entropy in zip(self._busy, *columns, strict=True):
                busy.ids.append(token)
                busy.logp.append(logp)
                busy.raw_logp.append(raw_logp)
                busy.entropy.append(entropy)
            return self._collect()

    def _renew(self) -> None:
        """Hold the rule that no cache outlives a weight change: caches belong to one weights token."""
        token = weights_token(self._model)
        if token == self._token:
            return
        if self._busy:
            raise RuntimeError(
                f"the weights changed while {len(self._busy)} jobs were being sampled: step() until they finish, or "
                "abort(), before an update"
            )
        self.forget()

    def _admit(self) -> list[tuple[int, ...]]:
        contexts = []
        while self._waiting and len(self._busy) < self.slots:
            handle, job = self._waiting.popleft()
            self._wanted[job.context] -= 1
            if not self._wanted[job.context]:
                del self._wanted[job.context]
            self._busy.append(_Busy(handle, job))
            contexts.append(job.context)
        return contexts

    def _count(self) -> None:
        counters, busy = self.counters, len(self._busy)
        counters.steps += 1
        counters.busy_slot_steps += busy
        counters.offered_slot_steps += self.slots
        counters.decoded_tokens += busy
        counters.prefilled_tokens = self._rows.num_prefilled
        counters.peak_cache_bytes = max(counters.peak_cache_bytes, self._rows.num_bytes)
        if self._waiting:
            least = counters.least_busy_while_waiting
            counters.least_busy_while_waiting = busy if least is None else min(least, busy)

    def _collect(self) -> list[tuple[int, Answer]]:
        """Take the finished jobs out of their slots, in the order of their handles."""
        finished: list[tuple[int, Answer]] = []
        for row in range(len(self._busy) - 1, -1, -1):
            busy = self._busy[row]
            is_stopped = busy.ids[-1] in busy.job.stop
            if is_stopped or len(busy.ids) == busy.job.max_tokens:
                finished.append((busy.handle, busy.answer("stop" if is_stopped else "length")))
                self._vacate(row)
        return sorted(finished, key=lambda pair: pair[0])

    def _vacate(self, row: int) -> None:
        self._rows.vacate(row, is_wanted=self._busy[row].job.context in self._wanted)
        self._busy[row] = self._busy[-1]
        self._busy.pop()

    def run(self, jobs: Iterable[Job]) -> list[Answer]:
        """Sample all jobs and return their answers in order; every job is checked before the first is sampled.

        Raises:
            RuntimeError: other jobs are waiting or in their slots.
            ValueError: a job is not one this model can answer; nothing was queued.

        """
        if self._waiting or self._busy:
            raise RuntimeError("run() while other jobs are in flight would lose their answers: step() until they finish")
        jobs = list(jobs)
        for job in jobs:
            self._check(job)
        handles = [self.submit(job) for job in jobs]
        answers: dict[int, Answer] = {}
        while len(answers) < len(handles):
            answers.update(self.step())
        return [answers[handle] for handle in handles]

    def abort(self) -> list[tuple[int, Answer]]:
        """Take all jobs out and return what they have so far, with finish 'abort'; waiting ones have no token."""
        in_slots = [(busy.handle, busy.answer("abort")) for busy in self._busy]
        waiting = [(handle, _Busy(handle, job).answer("abort")) for handle, job in self._waiting]
        self._waiting.clear()
        self._wanted.clear()
        self._busy.clear()
        self._rows.clear()
        return sorted(in_slots + waiting, key=lambda pair: pair[0])

    def forget(self) -> None:
        """Drop everything computed from the weights. Changes of weights are noticed, except those made through `.data`.

        Raises:
            RuntimeError: jobs are in their slots.

        """
        if self._busy:
            raise RuntimeError(f"{len(self._busy)} jobs are in their slots: step() until they finish, or abort()")
        self._rows.clear()
        self._token = weights_token(self._model)

    def reset(self) -> None:
        """Abort all jobs, drop all caches and count from zero."""
        self.abort()
        self.forget()
        self.counters, self._rows.num_prefilled = Counters(), 0
