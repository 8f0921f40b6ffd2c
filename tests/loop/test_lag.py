"""Lag 0 is the plain loop; with lag k every token says which version sampled it and is ratioed to that version's log-prob."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from oneloop import session as sessions
from oneloop.batch import pack
from oneloop.data import Need, Score
from oneloop.engine.core import TorchEngine
from oneloop.loop import attach, prepare
from oneloop.objective.policy import Policy
from oneloop.optimiser.adamw import AdamW
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import learner
from oneloop.rollout.plain import Plain
from oneloop.session import train
from oneloop.stages import By, Term
from oneloop.state import stream
from oneloop.terms import Sum
from tests.promises.runs import Parity, batch_of, parity, steps

LR = 3e-2


@pytest.fixture
def start(toy, opened):
    def make(lag=0, **more):
        fields = {
            "prompts": Epochs(prompts=4, rollouts=4, max_tokens=4),
            "reward": Parity(),
            "learners": {"policy": learner(Term(Policy(), by=By("rollout")), lr=LR)},
            "steps": 4,
        }
        return opened(toy(lag=lag, **{**fields, **more}))

    return make


def plain_loop(session, n):
    """GRPO written out: ask, sample, score, normalise, differentiate, move; nothing of the loop's."""
    recipe, pool = session.recipe, session.run.mechanisms["prompts"]
    engine = TorchEngine(recipe.models, recipe.learners, slots=recipe.slots, token_budget=recipe.token_budget)
    engine.publish(0)
    asked, moments, losses = pool.init(), AdamW(lr=LR).init(), []

    async def sample(requests, step):
        draws = [stream(recipe.seed, step, "rollout", q.id, 0) for q in requests]
        jobs = (
            Plain()(q, engine.sampler("policy", step), session.run.environment, None, d)
            for q, d in zip(requests, draws, strict=True)
        )
        return [r for rows in await asyncio.gather(*jobs) for r in rows]

    for step in range(n):
        requests, asked = pool(step, asked, stream(recipe.seed, step, "prompts", 0))
        rows = [replace(r, score=Score(parity(r))) for r in asyncio.run(sample(requests, step))]
        scores = np.array([r.score.value for r in rows]).reshape(4, 4)
        spread = scores.std(1, ddof=1, keepdims=True)
        credit = np.where(spread > 0, (scores - scores.mean(1, keepdims=True)) / (spread + 1e-4), 0.0).reshape(-1)
        batch = pack(rows, step)
        batch = replace(batch, columns={**batch.columns, "credit": credit[batch.row_N]})
        objective = Sum(recipe.learners["policy"], batch, {}, "policy")
        gradient, metrics = engine.pull("policy", objective.batch, objective)
        weights, moments, _ = AdamW(lr=LR)(engine.weights("policy"), gradient, moments, lambda d: 0.0)
        engine.install("policy", weights)
        engine.publish(step + 1)
        losses.append(metrics["loss"][0])
    return losses, engine.digests["policy"]


def test_lag_0_is_the_plain_loop(start):
    session = start()
    losses, digest = plain_loop(session, 3)
    metrics = steps(session, 3)
    assert [m["policy/loss"] for m in metrics] == losses
    assert session.run.state.digests["policy"] == digest


def test_control_lag_1_is_not_the_plain_loop(start):
    session = start(lag=1)
    losses, digest = plain_loop(session, 3)
    assert [m["policy/loss"] for m in steps(session, 3)] != losses
    assert session.run.state.digests["policy"] != digest


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_versions_and_staleness_are_those_of_the_lag(start, lag):
    session = start(lag)
    for step in range(4):
        version = max(0, step - lag)
        batch = batch_of(session)
        assert set(batch.columns["version"][batch.masks["sampled"]]) == {version}
        assert steps(session)[0]["collect/staleness"] == step - version


def test_the_ratio_is_to_the_log_probs_of_the_weights_that_sampled(start):
    session = start(lag=2)
    steps(session, 3)
    batch = batch_of(session)
    now = attach(session.run, batch, [Need("logp")]).columns[Need("logp")]
    gap = np.abs(now - batch.columns["sampled.logp"])[batch.masks["sampled"]]
    assert gap.max() > 1e-2
    # what was recorded is what the version that sampled says: an engine put back to it agrees
    engine = session.run.engine
    (snapshot,) = [s for v, s, _ in engine.kept["policy"] if v == 1]
    then = {n: w.clone() for n, w in engine.weights("policy").items()}
    found = pull(session, batch)
    engine.install("policy", snapshot)
    clean = replace(batch, columns={k: v for k, v in batch.columns.items() if not isinstance(k, Need)})
    old = attach(session.run, clean, [Need("logp")]).columns[Need("logp")]
    np.testing.assert_allclose(old[batch.masks["sampled"]], batch.columns["sampled.logp"][batch.masks["sampled"]], atol=1e-4)
    engine.install("policy", then)
    # the control: ratioed to today's own log-probs, every ratio is 1 and the gradient another
    fresh = np.where(batch.masks["sampled"], now, np.nan)
    wrong = pull(session, replace(batch, columns={**batch.columns, "sampled.logp": fresh}))
    size = max(float(g.abs().max()) for g in found.values())
    assert max(float((found[n] - wrong[n]).abs().max()) for n in found) > 1e-2 * size


def pull(session, batch):
    objective = prepare(session.run, batch)["policy"][0]
    return session.run.engine.pull("policy", objective.batch, objective)[0]


def test_after_a_resume_rollouts_are_made_by_the_checkpoints_weights(start, tmp_path):
    """Not by the base model's, and never staler than the lag."""
    first = start(lag=2, steps=6)

    def stop(step, metrics):
        first.stopped_by = 2 if step == 2 else 0

    asyncio.run(train(first, stop))
    base, last = first.folder.asked()["digests"]["policy"], first.run.state.digests["policy"]
    out = first.folder.folder
    first.close()
    second = sessions.resume(out)
    try:
        assert second.run.state.step == 3
        assert second.run.state.digests["policy"] == last != base
        for step in (3, 4, 5):
            batch = batch_of(second)
            (span,) = {(s.version, s.digest) for r in batch.rows for t in r.turns for s in t.spans}
            assert span[0] == 3  # 3 - 2 and 4 - 2 are gone with the process; never older than the lag
            if step == 3:
                assert span[1] == last
            metrics = steps(second)[0]
            assert metrics["collect/staleness"] == step - 3 <= 2
    finally:
        second.close()
