"""Alarms: what a person should be told about a step, read off its metrics and those of the steps before.

`check` gives each alarm a name and its number, which go into the step's metrics; `lines` says them in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PREFIX = "alarm/"


MISMATCH = {  # nats a token, on average; SmolLM2-135M in bf16 measures 0.04 at temperature 1, a wrong temperature above 0.3
    "torch.bfloat16": 0.1,
    "torch.float16": 0.02,
    "torch.float32": 0.002,
    "torch.float64": 1e-5,
}


@dataclass(frozen=True)
class Bounds:
    """Where an alarm begins. All ours.

    mismatch: mean |trainer's - sampler's log-prob| at equal weights, nats. drift: times the run's first measurement, once it
    is above `floor` nats. low_ratio, high_ratio: mean importance ratio. entropy: share of the run's start. errors, truncated:
    shares of the rollouts.
    """

    mismatch: float = MISMATCH["torch.bfloat16"]
    drift: float = 3.0
    floor: float = 0.01
    low_ratio: float = 0.5
    high_ratio: float = 2.0
    entropy: float = 0.1
    errors: float = 0.05
    truncated: float = 0.8


BOUNDS = Bounds()


def bounds_of(dtypes: Iterable[object]) -> Bounds:
    """The bounds of a run whose networks compute in these dtypes: the loosest one's."""
    return Bounds(mismatch=max(MISMATCH.get(str(d), BOUNDS.mismatch) for d in dtypes))


def check(
    metrics: Mapping[str, float], history: Sequence[Mapping[str, float]] = (), bounds: Bounds = BOUNDS
) -> dict[str, float]:
    """The alarms of a step, name -> the number that raised it. history: the metrics of the steps before, oldest first."""
    out: dict[str, float] = {}
    for key, x in metrics.items():
        stem, _, name = key.rpartition("/")
        if _is_raised(stem, name, x, bounds):
            out[PREFIX + key] = x
        elif name == "mismatch" and x > bounds.floor and x > bounds.drift * _first(history, key, x):
            out[f"{PREFIX}{stem}/drift"] = x / _first(history, key, x)
    now = metrics.get("collect/entropy")
    if now is not None and now < bounds.entropy * (start := _first(history, "collect/entropy", now)):
        out[f"{PREFIX}collect/entropy"] = now / start
    return out


def _is_raised(stem: str, name: str, x: float, bounds: Bounds) -> bool:
    """Whether a metric is out of its bound, whatever came before."""
    if stem == "collect":
        limit = {"error_rate": bounds.errors, "truncated": bounds.truncated}.get(name.split(".")[0])
        return x > limit if limit is not None else name == "groups_learnt" and x == 0
    return {
        "mismatch": x > bounds.mismatch,
        "ratio": not bounds.low_ratio <= x <= bounds.high_ratio,
        "skipped": x > 0,
    }.get(name, False)


def _first(history: Sequence[Mapping[str, float]], key: str, default: float) -> float:
    """The run's first measurement of a metric."""
    return next((m[key] for m in history if key in m), default)


WORDS = {
    "mismatch": "{where}: trainer's and sampler's log-probs differ by {x:.3g} nats a token at equal weights: temperature, "
    "stale weights or an inexact kernel",
    "drift": "{where}: the mismatch of trainer and sampler is {x:.1f} times that of the first step",
    "ratio": "{where}: the mean importance ratio is {x:.3g}: are the sampler's weights those it names?",
    "skipped": "{where}: {x:.0%} of the updates had no finite gradient and moved nothing",
    "entropy": "entropy has fallen to {x:.0%} of its start: lower the learning rate or raise the clip's upper bound",
    "error_rate": "{x:.0%} of the rollouts{task} failed: their errors are in the log",
    "truncated": "{x:.0%} of the rollouts ended at the token limit: raise max_tokens",
    "groups_learnt": "no group's scores vary: nothing was learnt from this step",
    "replay_differs": "learnt again from its log, {x:.0f} metrics of this step differ from before: other versions or machine?",
}


def lines(metrics: Mapping[str, float]) -> list[str]:
    """The alarms among a step's metrics in words, one line each."""
    out = []
    for key, x in metrics.items():
        if key.startswith(PREFIX):
            where, _, name = key.removeprefix(PREFIX).rpartition("/")
            name, _, task = name.partition(".")
            out.append(WORDS[name].format(x=x, where=where, task=f" of {task}" if task else ""))
    return out
