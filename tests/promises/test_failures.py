"""A failed reward or environment is excluded and counted, never scored 0; one failure costs itself only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from oneloop.collect import Collected, TooManyErrors
from oneloop.credit.group_mean import GroupMean
from oneloop.data import Ids, Prompt, Rollout, Score, Turn
from oneloop.engine.sandbox import Limits, Sandbox, available
from oneloop.environments.echo import Echo
from oneloop.loop import prepare, step
from oneloop.objective.policy import Policy
from oneloop.prompts.epochs import Epochs
from oneloop.prompts.nothing import Nothing
from oneloop.recipe import learner
from oneloop.rewards.verified import Verified
from oneloop.rollout.plain import Plain
from oneloop.stages import By, Reward, Term
from tests.promises.runs import Parity, batch_of, parity, steps

BYS = (By("token"), By("rollout"), By("group"), By("fixed", length=4))


@dataclass(frozen=True)
class Broken(Reward):
    """Good for all rollouts but the second of the first group (or all of them), where it breaks in one of many ways."""

    how: str = "raise"
    everywhere: bool = False

    async def __call__(self, group: Sequence[Rollout], state) -> list[Score]:
        (rollout,) = group
        is_it = rollout.id.startswith("1.0.") and rollout.id.endswith("/1")
        if not (is_it or self.everywhere):
            return [Score(parity(rollout))]
        if self.how == "raise":
            raise RuntimeError("the grader's\nserver is down")
        values = {"nan": float("nan"), "inf": float("inf"), "none": None, "error": None, "zero": 0.0}
        if self.how == "many":
            return [Score(1.0), Score(1.0)]
        return [Score(values[self.how], error="refused" if self.how == "error" else "")]


def run_of(toy, opened, how="raise", by=BYS[1], everywhere=False, **more):
    recipe = toy(
        reward=Broken(how, everywhere),
        assign=(GroupMean(),),
        prompts=Epochs(prompts=4, rollouts=4, max_tokens=4),
        learners={"policy": learner(Term(Policy(), by=by), lr=1e-2)},
        **more,
    )
    return opened(recipe)


def gradient(session, batch):
    objective = prepare(session.run, batch)["policy"][0]
    return session.run.engine.pull("policy", objective.batch, objective)[0]


def without_failed(session, batch):
    """The same step as if the failed rows had never been asked for."""
    good = tuple(r for r in batch.rows if not r.score.error and r.id != "1.0." + r.prompt.id + "/1")
    assert len(good) == len(batch.rows) - 1
    session.run.mechanisms["prompts"] = Nothing()
    return batch_of(session, Collected(good))


def gap(a, b) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in b) / max(float(x.abs().max()) for x in b.values())


@pytest.mark.parametrize("how", ["raise", "nan", "inf", "none", "many", "error"])
def test_one_failed_reward_is_excluded_and_counted(toy, opened, how):
    session = run_of(toy, opened, how)
    batch = batch_of(session)
    (failed,) = [r for r in batch.rows if r.score.error]
    at = [r.id for r in batch.rows].index(failed.id)
    assert failed.score.value is None
    assert np.isnan(batch.columns["score"][at])
    assert batch.reasons[failed.id] == failed.score.error
    mine = batch.row_N == at
    assert all((w[mine] == 0).all() for w in batch.streams.values())
    assert not any(m[mine].any() for m in batch.masks.values())
    assert (batch.columns["credit"][mine] == 0).all()
    metrics = steps(session)[0]
    assert metrics["collect/error_rate"] == 1 / 16
    good = [r.score.value for r in batch.rows if not r.score.error]
    assert metrics["collect/score"] == pytest.approx(np.mean(good))


@pytest.mark.parametrize("by", BYS, ids=lambda b: b.unit)
def test_the_gradient_is_that_without_the_failed_row(toy, opened, by):
    session = run_of(toy, opened, by=by)
    batch = batch_of(session)
    found = gradient(session, batch)
    assert gap(found, gradient(session, without_failed(session, batch))) < 1e-5


def test_control_a_failure_scored_0_gives_another_gradient(toy, opened):
    session = run_of(toy, opened, "zero")
    batch = batch_of(session)
    found = gradient(session, batch)
    assert gap(found, gradient(session, without_failed(session, batch))) > 1e-2


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_when_all_fail_the_run_ends_with_one_clear_line(toy, opened, how):
    session = run_of(toy, opened, how, everywhere=True)
    before = session.run.engine.networks["policy"].digest()
    with pytest.raises(TooManyErrors) as caught:
        steps(session)
    said = str(caught.value)
    assert said.startswith("16 of 16 rollouts failed (allowed: 50%), 16 of them with: ")
    assert {"raise": "RuntimeError: the grader's server is down", "nan": "nan"}[how] in said
    assert "\n" not in said
    assert session.run.engine.networks["policy"].digest() == before


def test_what_may_fail_is_the_recipes_to_say(toy, opened):
    assert steps(run_of(toy, opened, max_errors=0.1))[0]["collect/error_rate"] == 1 / 16
    with pytest.raises(TooManyErrors):
        steps(run_of(toy, opened, max_errors=0.05))


# ---------------------------------------------------------------------------- a scorer that never returns


@pytest.mark.slow
@pytest.mark.skipif(not available().how, reason="no sandbox here")
def test_a_scorer_that_hangs_costs_its_rollout_only_also_from_a_thread(toy, opened):
    """Signals cannot stop a scorer outside the main thread; a process can be ended from anywhere."""
    session = run_of(toy, opened)
    hung = []

    async def call(target, text, meta):
        if not hung:
            hung.append(text)
            return await box.call("time:sleep", 600)
        return await box.call(target, text, meta)

    with Sandbox(workers=2, limits=Limits(wall_s=1.0)) as box:
        session.run.mechanisms["reward"] = Verified(call=call)
        found = []
        work = threading.Thread(target=lambda: found.append(asyncio.run(step(session.run))))
        work.start()
        work.join(120)
    assert found[0]["collect/error_rate"] == 1 / 16


# ---------------------------------------------------------------------------- rollouts and environments that break


class Once:
    """Breaks at its n-th call."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise ConnectionError("the world went away")


@dataclass(frozen=True)
class Chatty(Echo):
    """Replies once to every rollout; breaks at one of its calls."""

    breaks: Once = field(default_factory=lambda: Once(3), compare=False, repr=False)

    async def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Ids | None:
        self.breaks()
        return (5, 6)


def test_an_environment_that_breaks_costs_one_rollout(toy, opened):
    recipe = toy(
        reward=Parity(), environment=Chatty(), rolling=Plain(max_turns=2), prompts=Epochs(prompts=4, rollouts=4, max_tokens=2)
    )
    batch = batch_of(opened(recipe))
    assert len(batch.rows) == 16
    (failed,) = [r for r in batch.rows if r.score.error]
    assert failed.score.error == "ConnectionError: the world went away"
    assert len(failed.turns) == 1  # what it had is kept
    assert {len(r.turns) for r in batch.rows if r is not failed} == {2}
    fresh = toy(reward=Parity(), environment=Chatty(breaks=Once(3)), rolling=Plain(max_turns=2))
    assert steps(opened(fresh))[0]["collect/error_rate"] == 1 / 16


@dataclass(frozen=True)
class Gathered(Plain):
    """The planted fault, and what it used to be: the first failure of a group is the group's."""

    async def __call__(self, request, sampler, environment, state, rng):
        rows = await super().__call__(request, sampler, environment, state, rng)
        if any(r.score and r.score.error for r in rows):
            raise RuntimeError("one of the group failed")
        return rows


def test_control_a_group_lost_to_one_rollout_is_seen_in_the_rate(toy, opened):
    recipe = toy(reward=Parity(), environment=Chatty(breaks=Once(3)), rolling=Gathered(max_turns=2))
    assert steps(opened(recipe))[0]["collect/error_rate"] == 4 / 16


@dataclass(frozen=True)
class Refuses(Plain):
    """Breaks for one request altogether."""

    async def __call__(self, request, sampler, environment, state, rng):
        if request.id.startswith("1.2."):
            raise OSError("no simulator left")
        return await super().__call__(request, sampler, environment, state, rng)


def test_a_request_that_breaks_costs_its_group_and_the_others_learn(toy, opened):
    session = opened(toy(reward=Parity(), rolling=Refuses()))
    before = session.run.engine.networks["policy"].digest()
    metrics = steps(session)[0]
    assert metrics["collect/error_rate"] == 4 / 16
    assert metrics["collect/rollouts"] == 12
    assert session.run.engine.networks["policy"].digest() != before


def test_a_sampler_that_breaks_costs_the_rollout_it_broke_for(toy, opened, monkeypatch):
    session = opened(toy(reward=Parity()))
    real, breaks = session.run.engine.service.sampler, Once(2)

    def sampler(weights):
        inner = real(weights)

        async def sample(*args, **kwargs):
            breaks()
            return await inner(*args, **kwargs)

        return sample

    monkeypatch.setattr(session.run.engine.service, "sampler", sampler)
    metrics = steps(session)[0]
    assert metrics["collect/error_rate"] == 1 / 16
    assert metrics["collect/rollouts"] == 15  # it left no tokens: counted, not a row


def test_a_decoder_that_breaks_serves_the_next_step(toy, opened, monkeypatch):
    """What breaks in a decode step fails the rollouts in it; nothing of theirs is left in the slots."""
    from oneloop.engine import decode

    session = opened(toy(reward=Parity()))
    steps(session)
    real, breaks = decode.Decoder._collect, Once(1)

    def broken(decoder):
        breaks()
        return real(decoder)

    monkeypatch.setattr(decode.Decoder, "_collect", broken)
    with pytest.raises(TooManyErrors, match="16 of 16 rollouts failed"):
        batch_of(session)
    batch = batch_of(session)
    assert not [r for r in batch.rows if r.score.error]
    assert len(batch.rows) == 16


# ---------------------------------------------------------------------------- bias


@dataclass(frozen=True)
class LongFails(Reward):
    """Fails on half of one task: dropping these rollouts silently would favour the other."""

    async def __call__(self, group: Sequence[Rollout], state) -> list[Score]:
        (r,) = group
        return [Score(error="timed out") if r.prompt.task == "long" and int(r.id[-1]) % 2 else Score(parity(r))]


def test_failures_that_favour_a_task_are_seen(toy, opened):
    session = opened(toy(reward=LongFails()))
    prompts = session.run.mechanisms["prompts"]
    pool = tuple(replace(p, task=("short", "long")[i % 2]) for i, p in enumerate(prompts.pool))
    session.run.mechanisms["prompts"] = replace(prompts, prompts=8, pool=pool)
    metrics = steps(session)[0]
    assert metrics["collect/error_rate"] == 0.25
    assert metrics["collect/error_rate.long"] == 0.5
    assert metrics["collect/error_rate.short"] == 0.0
