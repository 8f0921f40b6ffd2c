"""The verbs: one Protocol per stage. A mechanism is a frozen dataclass; its state is the loop's: (input, state) -> (output, state).

Inherit from the Protocol of the stage. A field made with `setting` carries its bounds, unit and source, checked on construction.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias

from oneloop.data import Array, Batch, Ids, Map, Need, Noise, Prompt, Request, Rollout, Score, State, Turn

Rng: TypeAlias = Any  # numpy.random.Generator, named by (seed, step, stage, item)
KINDS = {"int": int, "float": int | float, "bool": bool, "str": str}  # what a setting of this type may hold
Metrics: TypeAlias = Mapping[str, tuple[float, float]]  # name -> (sum, count): every metric carries its own denominator


def setting(
    default: Any = MISSING,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    one_of: Sequence[Any] = (),
    unit: str = "",
    source: str = "ours",
) -> Any:
    """A field of a mechanism: its default, bounds (inclusive), the values it may take, its unit and where the default comes from."""
    metadata = {"low": low, "high": high, "one_of": tuple(one_of), "unit": unit, "source": source}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


class Mechanism(Protocol):
    """What all stages share. needs: the columns it reads; a str is one that the sampler or an earlier mechanism writes."""

    needs: frozenset[Need | str] = frozenset()
    writes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse values out of bounds. Raises ValueError with one line that names the field and what it may be."""
        for f in fields(self):  # pyright: ignore[reportArgumentType]
            value, m, where = getattr(self, f.name), f.metadata, f"{type(self).__name__}.{f.name}"
            if m.get("one_of") and value not in m["one_of"]:
                raise ValueError(f"{where} = {value!r}: one of {', '.join(map(repr, m['one_of']))}")
            kind = KINDS.get(str(f.type), object) if "low" in m else object
            if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
                raise ValueError(f"{where} = {value!r}: {f.type} is wanted")
            if "low" in m and isinstance(value, int | float) and not m["low"] <= value <= m["high"]:
                raise ValueError(f"{where} = {value!r}: between {m['low']:g} and {m['high']:g}")

    def open(self, resources: Resources) -> Any:
        """The live object of a run: itself, or one that holds what the value only names (a table of prompts, a sandbox)."""
        return self

    def init(self) -> State:
        """The state of step 0."""
        return None

    def observe(self, batch: Batch, metrics: Map, state: State) -> State:
        """Once a step, after the update, dropped rows included: the feedback path."""
        return state


@dataclass(frozen=True)
class Item:
    """One example of a task: messages for the chat template, and what its scorer needs."""

    id: str
    messages: tuple[Mapping[str, str], ...]
    meta: Map = field(default_factory=dict)
    demonstration: str = ""  # a right answer in full, where the task has one


@dataclass(frozen=True)
class Resources:
    """What a run lends to the mechanisms that open something."""

    prompts: Sequence[Prompt] = ()
    items: Sequence[Item] = ()
    encode: Callable[[str], Ids] = lambda text: tuple(text.encode())
    decode: Callable[[Ids], str] = lambda ids: bytes(ids).decode(errors="replace")
    end: int = 0  # the token that ends a response
    call: Callable[..., Awaitable[Any]] | None = None  # a function run in the sandbox: (target, *arguments) -> Outcome


class Sampler(Protocol):
    """Serves one published version of the weights of one model."""

    async def __call__(self, context: Ids, request: Request, uniforms: Array, *, response: Ids = ()) -> Turn:
        """A turn after `context` (going on after `response`, if given); token j of it is drawn with uniforms[j]."""
        ...


class Prompts(Mechanism, Protocol):
    """1 Which requests next: prompt, how many rollouts, prefix, temperature, length, by whose weights."""

    def __call__(self, step: int, state: State, rng: Rng) -> tuple[list[Request], State]:
        """The requests of a step; called again when the step needs more groups."""
        ...


class Environment(Mechanism, Protocol):
    """3 What answers the policy: the examples of a task, and its reply to a turn."""

    def items(self, split: str) -> Sequence[Item]:
        """The examples of a split ("train", "test"), the same on every call. Splits share no question."""
        ...

    async def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Ids | None:
        """The tokens of the next observation, or None where the episode is over."""
        return None


class Rolling(Mechanism, Protocol):
    """2 How a request becomes rollouts: it drives sampler and environment as often as it likes."""

    async def __call__(
        self, request: Request, sampler: Sampler, environment: Environment, state: State, rng: Rng
    ) -> list[Rollout]:
        """The rollouts of one request: request.count of them, in order."""
        ...


class Reward(Mechanism, Protocol):
    """4 The world's verdict; no model of ours. alone: each rollout by itself, as soon as it ends; else a whole group."""

    alone: bool = True

    async def __call__(self, group: Sequence[Rollout], state: State) -> list[Score]:
        """One Score for each rollout, in order."""
        ...


class Join(Mechanism, Protocol):
    """5 Rollouts nobody sampled now: replayed, oracle, exemplar, demonstration, a gold answer after a trace."""

    def __call__(self, fresh: Sequence[Rollout], state: State, rng: Rng) -> tuple[list[Rollout], State]:
        """Rows to add, each with its origin."""
        ...


class View(Mechanism, Protocol):
    """The same response after other contexts, one per turn; may read other rows."""

    def __call__(self, rollout: Rollout, batch: Batch) -> tuple[Ids, ...]:
        """The contexts; the response's ids stay."""
        ...


class Assign(Mechanism, Protocol):
    """6 Credit and selection, one ordered chain. scores: the least and greatest score it is made for."""

    scores: tuple[float, float] = (-math.inf, math.inf)

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        """What it writes: "score" (R), "credit" or any other named column (N or R), "stream.<name>" (N), "reasons"."""
        ...


class Loss(Mechanism, Protocol):
    """7 A value per token or rollout, differentiated by the engine with respect to its live columns.

    couples: what the engine may not cut through in one pass. silent: a column; where it is 0 the value has no gradient, so the
    token need not be read.
    """

    axis: Literal["token", "rollout"] = "token"
    couples: Literal["token", "rollout", "group", "batch"] = "token"
    silent: str = ""

    def __call__(self, batch: Batch, live: Mapping[Need, Array], state: State) -> tuple[Array, Metrics]:
        """Values (N or R by axis) and metrics, for the array library of `live`."""
        ...


class Objective(Protocol):
    """A learner's terms on one batch, built by the loop. The engine calls it on any allowed cut."""

    live: frozenset[Need]
    couples: Literal["token", "rollout", "group", "batch"]

    def on(self, part: Batch) -> Array:
        """Tokens with weight in some term (bool, N): no other token is read."""
        ...

    def __call__(self, part: Batch, live: Mapping[Need, Array]) -> tuple[Array, Metrics]:
        """The loss of a part (a scalar; parts add up to the whole batch's) and its metrics."""
        ...


class Engine(Protocol):
    """Method-blind: values of columns, pull of coefficients on them, noise, and versions of weights."""

    def columns(self, batch: Batch, needs: Iterable[Need], on: Array | None = None) -> Mapping[Need, Array]:
        """The asked columns, filled in where `on` (or the need's own stream) asks and nothing stands yet."""
        ...

    def pull(
        self, model: str, batch: Batch, objective: Objective, fold: Callable[..., Any] | None = None
    ) -> tuple[Any, Metrics]:
        """The gradient of the objective over the whole batch, name -> array, and metrics."""
        ...

    def noise(self, model: str, noise: Noise) -> Any:
        """A perturbation, name -> array, regenerated from its seed."""
        ...

    def measure(self, model: str, batch: Batch) -> Callable[[Any], float]:
        """The KL (nats a token) that a displacement of the weights would make on this batch."""
        ...

    def weights(self, model: str) -> Mapping[str, Any]:
        """What an optimiser moves, name -> array."""
        ...

    def install(self, model: str, weights: Any) -> None:
        """New weights, for training; samplers see them when they are published."""
        ...

    def keep_start(self, needs: Iterable[Need]) -> None:
        """Before a step's first update: what live needs will also read as it stood at the start."""
        ...

    def publish(self, version: int) -> Mapping[str, str]:
        """The weights as they stand are this version for samplers; model -> digest."""
        ...

    def sampler(self, model: str, version: int, noise: Noise | None = None) -> Sampler:
        """Serves one published version."""
        ...


class Estimate(Mechanism, Protocol):
    """8 How a direction is found: backprop, streamed, sketched, perturbed weights."""

    def early(self, engine: Engine, model: str, rows: Batch, state: State) -> State:
        """Rollouts, just scored; for estimates that work before their groups' credit is known."""
        return state

    def __call__(
        self, engine: Engine, model: str, batch: Batch, objective: Objective, state: State, rng: Rng
    ) -> tuple[Any, Metrics, State]:
        """A direction to descend, name -> array, its metrics, and the state."""
        ...


class Optimiser(Mechanism, Protocol):
    """9 How weights move. It may change `weights` and its state in place; they are the loop's."""

    def __call__(
        self, weights: Any, direction: Any, state: State, measure: Callable[[Any], float]
    ) -> tuple[Any, State, Metrics]:
        """New weights; measure(displacement) = predicted KL of the step on this batch."""
        ...


class Follow(Mechanism, Protocol):
    """A model that trails another: average, copy every k."""

    def __call__(self, own: Any, leader: Any, step: int) -> Any:
        """Its new weights."""
        ...


@dataclass(frozen=True)
class By:
    """How a stream is averaged: over tokens, rollouts, groups or a fixed length; over its own units or all of the learner's.

    It counts tokens, it does not sum weights: doubling a stream doubles its term. `fixed` divides the sum by length x rollouts.
    """

    unit: Literal["token", "rollout", "group", "fixed"] = setting("token", one_of=("token", "rollout", "group", "fixed"))
    over: Literal["own", "all"] = setting("own", one_of=("own", "all"))
    length: int = setting(1, low=1, high=10**9, unit="tokens")
    __post_init__ = Mechanism.__post_init__


@dataclass(frozen=True)
class Term:
    """weight(step) x <by(stream `on`), loss>. A penalty is a term; a route is a stream."""

    loss: Loss
    on: str = "policy"
    by: By = By()
    weight: float | Callable[[int], float] = 1.0


@dataclass(frozen=True)
class Model:
    """A network. source: a path, a hub id, a pulled name, or another model's name here.

    blocks: keep only the first so many. heads: names of scalar heads. adapter: LoRA settings. dtype: "auto", "bfloat16",
    "float32", "float64". follow: (leader, rule). checkpoint: recompute activations in the backward pass.
    """

    source: str
    heads: tuple[str, ...] = ()
    blocks: int | None = None
    adapter: Any = None
    precision: Any = None
    replay: tuple[str, ...] = ()
    follow: tuple[str, Follow] | None = None
    dtype: str = "auto"
    checkpoint: bool = False


@dataclass(frozen=True)
class Learner:
    """What trains on a batch, in the recipe's order; two learners may share a model. trains: a pattern of parameter names."""

    model: str
    objective: tuple[Term, ...]
    estimate: Estimate
    optimiser: Optimiser
    every: int = 1
    epochs: int = 1
    minibatches: int = 1
    trains: str = "*"
