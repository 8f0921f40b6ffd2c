"""The nouns. Token ids are carried from the sampler to the loss, never recomputed; text is for people and environments.

Axes, as suffixes on every array of a mechanism: P prompts, R rollouts (the rows of a batch), N packed tokens, C a chunk of
tokens, V vocabulary, K top-k, G groups. Log-probabilities and KL in nats, time in seconds, sizes in bytes, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Array: TypeAlias = Any  # numpy on the host; torch inside the engine's passes
State: TypeAlias = Any  # None, or numbers, text, arrays, lists and dicts of these: what state.py can save
Ids: TypeAlias = tuple[int, ...]
Map: TypeAlias = Mapping[str, Any]
Finish: TypeAlias = Literal["stop", "length", "abort", "open"]


@dataclass(frozen=True)
class Prompt:
    """What the policy is asked: token ids, the task it belongs to, and what its scorer needs (`meta`, JSON values)."""

    id: str
    ids: Ids
    task: str = ""
    meta: Map = field(default_factory=dict)


@dataclass(frozen=True)
class Noise:
    """Perturbed weights, named by what regenerates them: weights + scale x normal(seed)."""

    seed: int
    scale: float


@dataclass(frozen=True)
class Request:
    """`count` rollouts of a prompt = ONE GROUP: from which prefix, how hot, how long, by whose weights.

    `prefix` holds turns to go on from. A turn that keeps its spans is learnt from (an interrupted rollout, resumed); a turn
    stripped of them is given (a stored prefix). A last turn that is `open` is continued in the middle of its response.
    """

    id: str
    prompt: Prompt
    count: int = 1
    prefix: tuple[Turn, ...] = ()
    temperature: float = 1.0
    max_tokens: int = 256
    model: str = "policy"
    noise: Noise | None = None
    origin: str = "policy"


@dataclass(frozen=True)
class Span:
    """Response tokens [start, stop) of a turn that one set of weights sampled. A token in no span is GIVEN."""

    start: int
    stop: int
    version: int = 0
    digest: str = ""
    temperature: float = 1.0


@dataclass(frozen=True)
class Turn:
    """One response in its context.

    context, response: token ids. observed: how many of the context's last tokens the environment wrote since the turn before.
    spans: which weights sampled which response tokens. recorded: the sampler's arrays, one entry per response token (logp at
    the sampling temperature, raw_logp, entropy; NaN where given). finish: `open` = not ended, to be continued.
    """

    context: Ids
    response: Ids
    spans: tuple[Span, ...] = ()
    recorded: Mapping[str, Array] = field(default_factory=dict)
    finish: Finish = "stop"
    observed: int = 0
    reward: float = 0.0
    info: Map = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """A value or an error, never a silent 0. parts: named numbers. marks: flagged token ranges. note: words, as ids."""

    value: float | None = None
    error: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    marks: tuple[tuple[int, int], ...] = ()
    note: Ids = ()


@dataclass(frozen=True)
class Rollout:
    """A row of the batch. `origin` names the stream its response starts in; it need not have been sampled.

    group: the request it answers. of: (rollout id, turn) it was made from. kept: columns [one entry per response token] that a
    memory stored with it. score None = not scored yet.
    """

    id: str
    prompt: Prompt
    turns: tuple[Turn, ...]
    group: str
    origin: str = "policy"
    of: tuple[str, int] | None = None
    score: Score | None = None
    noise: Noise | None = None
    kept: Map = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Which model reads which view of the rows, and when: at the step's start as a constant, or in every update, live.

    A model name may hold one template, `teacher.{task}`: the prompt's task chooses the model.
    """

    model: str = "policy"
    view: str = "own"
    at: Literal["start", "live"] = "start"


LIVE = Source(at="live")


@dataclass(frozen=True)
class Need:
    """One column: what is read, off which sources.

    what: "logp", "entropy", "value.<head>", "hidden.<head>", "router", or a vocabulary functional: a frozen, hashable
    callable f(*logits_CV, ids_C, *also_C) -> C or CK that runs inside the engine's chunked pass over the logits of `of`.
    also: named columns handed into the chunk. on: the stream or mask that asks; a demand, not identity: where two askers differ,
    the missing rows are filled in later.
    """

    what: str | Callable[..., Array]
    of: tuple[Source, ...] = (Source(),)
    also: tuple[str, ...] = ()
    on: str = field(default="", compare=False)

    @property
    def is_live(self) -> bool:
        """Whether a learner's update reads it with gradient."""
        return self.of[0].at == "live"


LIVE_LOGP = Need("logp", (LIVE,))


@dataclass(frozen=True)
class Batch:
    """The packed rows of one step: flat arrays, no padding.

    The N tokens are, row by row and turn by turn, the tokens the environment wrote (from the second turn on) and the response.
    ids_N: the token. row_N, turn_N: where it belongs. cut_N: its index in context + response of its turn, so that it is
    predicted from everything before cut. group_R: name of the group. masks (bool, N): response, sampled, given, observation,
    turn_start. columns: by Need (engine) or by name (sampler, mechanisms), over N or R; NaN where nobody asked. streams: N
    weights >= 0, which tokens feed which loss term. reasons: row id -> why it was dropped. contexts: view -> row -> turn -> ids.
    """

    rows: tuple[Rollout, ...]
    step: int
    ids_N: Array
    row_N: Array
    turn_N: Array
    cut_N: Array
    group_R: Array
    masks: Mapping[str, Array]
    columns: Mapping[Need | str, Array]
    streams: Mapping[str, Array]
    reasons: Mapping[str, str] = field(default_factory=dict)
    contexts: Mapping[str, Any] = field(default_factory=dict)
