"""Collection: requests become scored rollouts (stages 2 to 4), concurrently.

Consumes: requests, and the published weights of the version that the step's lag names.
Waits for: the sampler's decode steps, the environment's replies, the sandbox's verdicts.
Is unblocked by: the last rollout's score. A rollout is scored as soon as it ends, while others are still sampled.
Produces: rows, in the order of the requests whatever order they ended in, already written to the step's log.
A rollout that fails costs itself only: it is excluded, counted and its error is kept. It is never scored 0.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oneloop.data import Request, Rollout, Score
from oneloop.ops import one_line
from oneloop.state import rng


class TooManyErrors(RuntimeError):
    """Most rollouts of a step failed: going on would learn from what is left of it."""


class OtherRequests(ValueError):
    """A log that answers other requests than the run asks now."""


@dataclass(frozen=True)
class Collected:
    """What a step has collected so far: rows (failed ones too), requests that died whole, and time in seconds."""

    rows: tuple[Rollout, ...] = ()
    errors: tuple[tuple[str, str], ...] = ()  # (task, error) of rollouts that left no tokens
    rounds: int = 0
    seconds: float = 0.0
    replayed: bool = False


async def collect(run: Any, requests: Sequence[Request], fresh: Collected) -> Collected:
    """The rollouts of these requests, added to `fresh`: sampled now, or read from the log where a killed run left them."""
    step, begin = run.state.step, time.perf_counter()
    logged = run.log.read(step, fresh.rounds)
    if logged is None:
        found = await asyncio.gather(*(_request(run, q, fresh.rounds) for q in requests))
        rows = tuple(r for rows, _ in found for r in rows)
        errors = tuple(e for _, errors in found for e in errors)
    else:
        rows, errors = logged
        _same_requests(requests, rows, errors, step)
    seconds = fresh.seconds + time.perf_counter() - begin
    out = Collected(fresh.rows + rows, fresh.errors + errors, fresh.rounds + 1, seconds, logged is not None)
    _alarm(out, run.recipe.max_errors)
    if logged is None:  # after the alarm: a resumed run must be able to score again what failed
        run.log.write(step, fresh.rounds, rows, errors)
    return out


async def _request(run: Any, request: Request, round_: int) -> tuple[list[Rollout], list[tuple[str, str]]]:
    """One group: rolled, then scored, alone or as a whole. What left no tokens comes back as an error."""
    version = max(run.state.first_version, run.state.step - run.recipe.lag)
    sampler = run.engine.sampler(request.model, version, request.noise)
    rolling, reward, s = run.mechanisms["rolling"], run.mechanisms["reward"], run.state.mechanisms
    draws = rng(run, "rollout", request.id, round_)
    try:
        rows = await rolling(request, sampler, run.environment, s["rolling"], draws)
    except Exception as error:
        return [], [(request.prompt.task, one_line(error))] * request.count
    empty = [(r.prompt.task, r.score.error if r.score else "no tokens") for r in rows if not tokens(r)]
    rows = [r for r in rows if tokens(r)]
    waiting = [i for i, r in enumerate(rows) if r.score is None]
    groups = [[i] for i in waiting] if reward.alone else [waiting] if waiting else []
    for group, scores in zip(groups, await asyncio.gather(*(_score(run, rows, g) for g in groups)), strict=True):
        for i, score in zip(group, scores, strict=True):
            rows[i] = replace(rows[i], score=score)
    return rows, empty


async def _score(run: Any, rows: Sequence[Rollout], group: Sequence[int]) -> list[Score]:
    """The group's scores. A reward that raises, or returns the wrong number of scores, is an error of these rollouts alone."""
    try:
        said = await run.mechanisms["reward"]([rows[i] for i in group], run.state.mechanisms["reward"])
    except Exception as error:
        said = [Score(error=one_line(error))] * len(group)
    if len(said) != len(group):
        said = [Score(error=f"the reward gave {len(said)} scores for {len(group)} rollouts")] * len(group)
    return [_checked(s) for s in said]


def _checked(score: Score) -> Score:
    """A score that is a finite number or an error, and nothing else."""
    value = score.value
    if score.error:
        return replace(score, value=None, error=" ".join(score.error.split())[:500])
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return Score(error=f"the reward gave {value}: it must be a finite number")
    return score


def tokens(rollout: Rollout) -> int:
    """Response tokens of a rollout."""
    return sum(len(t.response) for t in rollout.turns)


def _same_requests(requests: Sequence[Request], rows: Sequence[Rollout], errors: Sequence[Any], step: int) -> None:
    """Raises OtherRequests where a log belongs to other requests than the ones asked now."""
    asked, groups = {q.id for q in requests}, {r.group for r in rows}
    if not groups <= asked or len(rows) + len(errors) != sum(q.count for q in requests):
        raise OtherRequests(
            f"the log of step {step} answers other requests: it was written by another recipe, seed or version. "
            "Start a new run, or resume with the versions in run.json"
        )


def _alarm(collected: Collected, allowed: float) -> None:
    """Raises TooManyErrors where more than the allowed share failed; names the commonest error."""
    failed = [e for _, e in collected.errors] + [r.score.error for r in collected.rows if r.score and r.score.error]
    total = len(collected.rows) + len(collected.errors)
    if total and len(failed) / total > allowed:
        worst, count = Counter(failed).most_common(1)[0]
        raise TooManyErrors(
            f"{len(failed)} of {total} rollouts failed (allowed: {allowed:.0%}), {count} of them with: {worst}. "
            "Mend the cause, or start a new run with another reward or a higher max_errors"
        )
