"""Minibatches, epochs, every, follow: updates move on while what was read at the step's start stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from oneloop import loop
from oneloop.credit.group_mean import GroupMean
from oneloop.data import Need, Source
from oneloop.loop import prepare
from oneloop.metrics import Meter
from oneloop.objective.divergence import Divergence
from oneloop.objective.policy import Policy
from oneloop.objective.regress import Regress
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import RecipeError, learner
from oneloop.stages import Assign, By, Follow, Model, Term
from tests.promises.runs import Parity, batch_of, steps

CREDIT = (GroupMean(),)


@dataclass(frozen=True)
class Average(Follow):
    """own + rate x (leader - own)."""

    rate: float = 0.1

    def __call__(self, own, leader, step):
        return {n: w + self.rate * (leader[n] - w) if n in leader else w for n, w in own.items()}


@dataclass(frozen=True)
class Returns(Assign):
    needs = frozenset({"score"})
    writes = frozenset({"return"})

    def __call__(self, batch, state, rng):
        return {"return": batch.columns["score"][batch.row_N]}, state


@pytest.fixture
def start(toy, opened, tiny):
    def make(models=None, learners=None, assign=CREDIT, **more):
        return opened(
            toy(
                prompts=Epochs(prompts=4, rollouts=4, max_tokens=4),
                reward=Parity(),
                assign=assign,
                models=models or {"policy": Model(str(tiny), dtype="float32")},
                learners=learners or {"policy": learner(lr=1e-2)},
                **more,
            )
        )

    return make


def watch(monkeypatch):
    """Counts updates by learner."""
    seen, real = [], loop.learn

    def learn(run, name, objectives, epoch, meter):
        seen.extend((name, run.state.step, epoch, i) for i in range(len(objectives)))
        real(run, name, objectives, epoch, meter)

    monkeypatch.setattr(loop, "learn", learn)
    return seen


def test_minibatches_and_epochs_are_so_many_updates(start, monkeypatch):
    seen = watch(monkeypatch)
    session = start(learners={"policy": learner(lr=1e-3, epochs=3, minibatches=2)})
    steps(session)
    assert seen == [("policy", 0, e, i) for e in range(3) for i in range(2)]
    assert session.run.state.mechanisms["optimiser.policy"]["updates"] == 6


def test_minibatches_deal_whole_groups_each_row_once(start):
    session = start(learners={"policy": learner(minibatches=3)})
    batch = batch_of(session)
    parts = [o.batch for o in prepare(session.run, batch)["policy"]]
    assert len(parts) == 3
    homes = [set(p.group_R) for p in parts]
    assert sum(map(len, homes)) == 4 == len(set().union(*homes))
    assert sorted(r.id for p in parts for r in p.rows) == sorted(r.id for r in batch.rows)
    for p in parts:
        mine = [r.id for r in batch.rows].index(p.rows[0].id)
        np.testing.assert_array_equal(p.columns["credit"][p.row_N == 0], batch.columns["credit"][batch.row_N == mine])


def test_more_minibatches_than_groups_is_refused(toy):
    with pytest.raises(RecipeError, match="9 minibatches of 4 groups a step: at most 4"):
        toy(learners={"policy": learner(minibatches=9)}).check()


def test_start_columns_are_those_of_the_steps_start_in_every_update(start, tiny, monkeypatch):
    """A clipped value loss reads the critic both live and at the start; so does a divergence to the policy's own start."""
    models = {
        "policy": Model(str(tiny), dtype="float32"),
        "critic": Model(str(tiny), dtype="float32", heads=("value",)),
    }
    terms = (Term(Policy()), Term(Divergence("policy"), weight=0.5))
    learners = {
        "critic": learner(Term(Regress(clip=0.2), on="response"), model="critic", lr=1e-2, epochs=2, minibatches=2),
        "policy": learner(*terms, lr=1e-2, epochs=2),
    }
    session = start(models, learners, (GroupMean(), Returns()))
    steps(session)  # the head leaves 0
    batch = batch_of(session)
    value = Need("value.value", (Source("critic"),))
    before = session.run.engine.columns(batch, [value, Need("logp")])
    objectives = prepare(session.run, batch)
    for epoch in range(2):
        loop.learn(session.run, "critic", objectives["critic"], epoch, Meter())
    for o in objectives["critic"]:
        rows = {r.id: i for i, r in enumerate(batch.rows)}
        for i, r in enumerate(o.batch.rows):
            np.testing.assert_allclose(
                o.batch.columns[value][o.batch.row_N == i], before[value][batch.row_N == rows[r.id]], atol=1e-6
            )
    after = session.run.engine.columns(batch, [value])[value]
    assert np.nanmax(np.abs(after - before[value])) > 1e-2  # the control: read again now, they are others
    for epoch in range(2):
        loop.learn(session.run, "policy", objectives["policy"], epoch, Meter())
    start_policy = session.run.engine.starts["policy"]
    assert start_policy.digest() == session.run.state.digests["policy"] != session.run.engine.networks["policy"].digest()


def test_a_divergence_to_ones_own_start_grows_with_the_updates(start):
    """With the start taken anew at each update it would stay 0."""
    terms = (Term(Policy(), weight=lambda step: 1.0), Term(Divergence("policy"), weight=1e-6, by=By("rollout")))
    session = start(learners={"policy": learner(*terms, lr=1e-2)})
    objective = prepare(session.run, batch_of(session))["policy"][0]
    term = replace(session.recipe.learners["policy"], objective=(terms[1],))
    alone = type(objective)(term, objective.batch, session.run.state.mechanisms, "policy")
    sizes = []
    for epoch in range(3):
        sizes.append(session.run.engine.pull("policy", alone.batch, alone)[1]["loss"][0])
        loop.learn(session.run, "policy", [objective], epoch, Meter())
    assert sizes[0] == pytest.approx(0, abs=1e-12)
    assert sizes[2] > sizes[1] > 1e-12
    session.run.engine.starts.clear()  # the control
    assert session.run.engine.pull("policy", alone.batch, alone)[1]["loss"][0] == pytest.approx(0, abs=1e-12)


def test_every_skips(start, monkeypatch, tiny):
    seen = watch(monkeypatch)
    models = {"policy": Model(str(tiny), dtype="float32"), "critic": Model("policy", heads=("value",), dtype="float32")}
    learners = {
        "policy": learner(lr=1e-2),
        "critic": learner(Term(Regress(), on="response"), model="critic", lr=1e-2, every=3),
    }
    session = start(models, learners, (GroupMean(), Returns()))
    digests = []
    for _ in range(5):
        steps(session)
        digests.append(session.run.state.digests["critic"])
    assert [step for name, step, *_ in seen if name == "critic"] == [0, 3]
    assert [step for name, step, *_ in seen if name == "policy"] == [0, 1, 2, 3, 4]
    assert digests[0] == digests[1] == digests[2] != digests[3] == digests[4]


# ---------------------------------------------------------------------------- follow


def trailed(start, tiny, dtype, before=lambda network: None):
    """A follower after six steps, how far it is from the average kept in fp64, and how far from its leader."""
    models = {
        "policy": Model(str(tiny), dtype=dtype),
        "slow": Model("policy", dtype=dtype, follow=("policy", Average(0.02))),
    }
    session = start(models, {"policy": learner(lr=2e-3)})
    engine, digests = session.run.engine, set()
    before(engine.networks["slow"])
    expected = {n: w.clone().double() for n, w in engine.weights("slow").items()}
    for _ in range(6):
        steps(session)
        leader = engine.weights("policy")
        expected = {n: w + 0.02 * (leader[n].double() - w) for n, w in expected.items()}
        digests.add(session.run.state.digests["slow"])
    return far(engine.weights("slow"), expected), far(leader, expected), len(digests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_follows_trails_its_leader(start, tiny, dtype):
    gap, lead, num_digests = trailed(start, tiny, dtype)
    assert gap < 1e-6
    assert lead > 1e-3
    assert num_digests > 1


def test_control_an_average_kept_in_bf16_stands_still(start, tiny):
    gap, *_ = trailed(start, tiny, "bfloat16", lambda network: network.masters.clear())
    assert gap > 1e-5


def far(a: Mapping, b: Mapping) -> float:
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in b)


def test_a_follower_is_saved_and_restored(start, tiny, opened):
    models = {
        "policy": Model(str(tiny), dtype="float32"),
        "slow": Model("policy", dtype="float32", follow=("policy", Average())),
    }
    session = start(models, {"policy": learner(lr=1e-2)})
    steps(session, 2)
    path = session.folder.save(session.run.state, session.run.engine)
    before = session.run.engine.digests["slow"]
    fresh = start(models, {"policy": learner(lr=1e-2)})
    network = fresh.run.engine.networks["slow"]
    assert network.digest() != before
    network.restore(path / "models" / "slow")
    assert network.digest() == before


def test_what_follows_nobody_is_refused(toy, tiny):
    with pytest.raises(RecipeError, match="did you mean 'policy'"):
        toy(models={"policy": Model(str(tiny)), "slow": Model("policy", follow=("polcy", Average()))}).check()
