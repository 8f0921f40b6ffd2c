"""With equal weights trainer's and sampler's log-probs agree, at any temperature; measured on every step, and alarmed."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest

from oneloop.data import Need
from oneloop.engine import service
from oneloop.loop import attach
from oneloop.objective.policy import Policy
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import learner
from oneloop.session import train
from oneloop.stages import By, Model, Term
from oneloop.tracking import alarms
from tests.promises.runs import FAMILIES, Parity, batch_of, family, steps

BOUND = {"float32": 1e-4, "bfloat16": 0.25}  # nats, the worst token; the alarm's own bound is on the mean
MISMATCH = "policy/policy.0/mismatch"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {kind: family(root / kind, kind) for kind in FAMILIES}


@pytest.fixture
def start(toy, opened, models):
    def make(kind="llama", heat=1.0, dtype="float32", lr=1e-3, **more):
        return opened(
            toy(
                models={"policy": Model(models[kind], dtype=dtype)},
                prompts=Epochs(prompts=4, rollouts=8, temperature=heat, max_tokens=6),
                reward=Parity(),
                learners={"policy": learner(Term(Policy(), by=By("rollout")), lr=lr)},
                **more,
            )
        )

    return make


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_sampled_token_agrees_at_every_temperature(start, kind, dtype):
    for heat in (0.5, 1.0, 2.0):
        session = start(kind, heat, dtype)
        batch = batch_of(session)
        now = attach(session.run, batch, [Need("logp")]).columns[Need("logp")]
        on = batch.masks["sampled"]
        assert on.sum() > 20
        assert np.abs(now - batch.columns["sampled.logp"])[on].max() < BOUND[dtype]
        metrics = steps(session)[0]
        assert metrics[MISMATCH] < BOUND[dtype] / 3
        assert metrics["policy/policy.0/ratio"] == pytest.approx(1, abs=BOUND[dtype])
        bounds = alarms.bounds_of([session.run.engine.networks["policy"].dtype])
        assert not [k for k in alarms.check(metrics, bounds=bounds) if "mismatch" in k or "ratio" in k]
        if heat != 1:  # the control: read at another temperature they are far apart
            cold = replace(batch, columns={**batch.columns, "temperature": np.ones(len(on))})
            wrong = attach(session.run, cold, [Need("logp")]).columns[Need("logp")]
            assert np.abs(wrong - batch.columns["sampled.logp"])[on].max() > 2 * BOUND[dtype]


def test_the_metric_is_there_on_every_step_and_counts_fresh_tokens_at_the_first_update_only(start):
    first, second = steps(start(lr=3e-2), 2), steps(start(lr=3e-2), 2)
    assert [m[MISMATCH] for m in first] == [m[MISMATCH] for m in second]
    assert all(m[MISMATCH] < 1e-4 for m in first)
    session = start(lr=3e-2)
    again = replace(session.recipe.learners["policy"], epochs=3)
    object.__setattr__(session.run.recipe, "learners", {"policy": again})
    metrics = steps(session)[0]
    assert metrics[MISMATCH] < 1e-4
    assert metrics["policy/policy.0/abs_log_ratio"] > 1e-2  # later updates differ on purpose


def test_stale_tokens_do_not_count_as_mismatch(start):
    found = steps(start(lr=3e-2, lag=1), 3)
    assert MISMATCH in found[0]
    assert all(MISMATCH not in m for m in found[1:])
    assert found[2]["policy/policy.0/abs_log_ratio"] > 1e-3


def heard(session):
    said = []
    asyncio.run(train(session, lambda step, metrics: said.extend(alarms.lines(metrics))))
    return said


def test_control_a_sampler_with_a_wrong_temperature_raises_the_alarm(start, monkeypatch):
    right = [line for line in heard(start(heat=0.5)) if "log-probs" in line]
    real = service.Span
    monkeypatch.setattr(service, "Span", lambda a, b, v, d, heat: real(a, b, v, d, 1.0))
    session = start(heat=0.5)
    wrong = [line for line in heard(session) if "log-probs" in line]
    assert not right
    assert wrong[0].startswith("policy/policy.0: trainer's and sampler's log-probs differ by ")
    assert f"alarm/{MISMATCH}" in session.folder.measured()[0]


def test_control_a_sampler_with_stale_weights_raises_the_alarm(start, monkeypatch):
    real, old = service.DecoderPool.__call__, {}

    def stale(pool, weights):
        served = real(pool, weights)
        if not old:
            module = copy.deepcopy(pool.engine.networks[weights.model].module)
            old["decoder"] = service.Decoder(module, slots=8)
        return service.Served(old["decoder"], served.digest)

    monkeypatch.setattr(service.DecoderPool, "__call__", stale)
    session = start(lr=3e-2)
    said = heard(session)
    assert not [k for k in session.folder.measured()[0] if k == f"alarm/{MISMATCH}"]  # equal weights still
    assert session.folder.measured()[1][f"alarm/{MISMATCH}"] > 0.05
    assert any("stale weights" in line for line in said)
