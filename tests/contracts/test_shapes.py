"""Every shape of shapes.py runs through the real loop and engine, and does what it says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from oneloop.batch import pack
from oneloop.collect import Collected
from oneloop.credit.group_mean import GroupMean
from oneloop.credit.raw_score import RawScore
from oneloop.data import LIVE_LOGP, Need, Noise, Rollout, Score, Source, Span, Turn
from oneloop.estimate.perturbed_weights import PerturbedWeights
from oneloop.loop import assemble, attach, learn, prepare, step
from oneloop.metrics import Meter
from oneloop.objective.divergence import Divergence
from oneloop.objective.nll import Nll
from oneloop.objective.policy import Policy
from oneloop.objective.regress import Regress
from oneloop.optimiser.adamw import AdamW
from oneloop.recipe import learner
from oneloop.stages import By, Learner, Model, Term
from tests.contracts import shapes


def steps(session, n=1):
    return [asyncio.run(step(session.run)) for _ in range(n)][-1]


class NoLog:
    def read(self, step, round_):
        return None

    def write(self, *_):
        pass


def batch_of(session):
    state = replace(session.run.state, mechanisms=dict(session.run.state.mechanisms))
    run = replace(session.run, log=NoLog(), state=state)
    return asyncio.run(assemble(run, Collected(), dict(run.state.mechanisms)))[0]


def known(session, cls):
    """The shape with the run's right answers in it."""
    engine, items = session.run.engine, session.run.environment.items("train")
    prompts = session.run.mechanisms["prompts"].pool
    return cls(tuple((p.id, engine.encode(i.demonstration)) for p, i in zip(prompts, items, strict=True)))


def test_next_observation_loss_reads_observation_tokens_only(opened, toy, tiny):
    recipe = toy(learners={"policy": learner(), "dynamics": learner(Term(Nll(), on="observation"), lr=1e-2)})
    run = opened(recipe).run
    ids = run.mechanisms["prompts"].pool[0].ids
    first = Turn(ids, (4, 5), (Span(0, 2),), {"logp": np.array([-1.0, -2.0])})
    second = Turn((*ids, 4, 5, 6, 7), (8,), (Span(0, 1),), {"logp": np.array([-1.5])}, observed=2)
    row = Rollout("r", run.mechanisms["prompts"].pool[0], (first, second), "g", score=Score(1.0))
    other = replace(row, id="s", score=Score(0.0))
    batch = replace(pack([row, other], 0), columns={**pack([row, other], 0).columns, "credit": np.ones(10)})
    assert batch.ids_N[batch.masks["observation"]].tolist() == [6, 7, 6, 7]
    objective = prepare(run, batch)["dynamics"][0]
    assert objective.on(objective.batch).tolist() == batch.masks["observation"].tolist()
    losses = []
    for _ in range(6):
        meter = Meter()
        learn(run, "dynamics", [objective], 0, meter)
        losses.append(meter.means()["dynamics/loss"])
    assert losses[-1] < losses[0] - 0.1


def test_a_view_keeps_response_ids_and_changes_their_log_probs(opened, toy):
    session = opened(toy())
    session.run.mechanisms["view.shown"] = known(session, shapes.Shown)
    batch = batch_of(session)
    shown = Need("logp", (Source(view="shown"),), on="sampled")
    own = Need("logp", on="sampled")
    batch = attach(session.run, batch, [shown, own])
    on = batch.masks["sampled"]
    assert np.isfinite(batch.columns[shown][on]).all()
    assert np.abs(batch.columns[shown] - batch.columns[own])[on].max() > 1e-3
    np.testing.assert_allclose(batch.columns[own][on], batch.columns["sampled.logp"][on], atol=1e-4)
    # by hand: the row alone, its answer put before its prompt
    row = batch.rows[0]
    context = batch.contexts["shown"][0][0]
    alone = pack([replace(row, turns=(replace(row.turns[0], context=context),))], 0)
    by_hand = session.run.engine.columns(alone, [own])[own]
    np.testing.assert_allclose(by_hand, batch.columns[shown][batch.row_N == 0], atol=1e-5)


def half(session):
    pool = session.run.mechanisms["prompts"].pool
    turn = Turn(pool[0].ids, (4,), (Span(0, 1, 0, "old", 1.0),), {n: np.array([-2.0]) for n in ("logp", "raw_logp", "entropy")})
    return ((pool[0], turn),)


def test_a_stored_prefix_is_given_and_nobody_learns_from_it(opened, toy):
    session = opened(toy(assign=(GroupMean(),)))
    session.run.mechanisms["prompts"] = shapes.FromStored(half(session))
    batch = batch_of(session)
    given = batch.masks["given"]
    assert given.sum() == 4
    assert (batch.ids_N[given] == 4).all()
    assert (batch.streams["policy"][given] == 0).all()
    assert np.isnan(batch.columns["sampled.logp"][given]).all()
    assert {t.response[0] for r in batch.rows for t in r.turns} == {4}


def test_an_interrupted_rollout_is_learnt_from_at_its_own_versions(opened, toy):
    session = opened(toy(assign=(GroupMean(),)))
    steps(session, 1)
    session.run.mechanisms["prompts"] = shapes.Interrupted(half(session))
    batch = batch_of(session)
    first = batch.row_N == 0
    assert batch.columns["version"][first].tolist() == [0] + [1] * (first.sum() - 1)
    assert (batch.streams["policy"][first] == 1).all()
    assert batch.columns["sampled.logp"][first][0] == -2.0
    spans = batch.rows[0].turns[0].spans
    assert [s.version for s in spans] == [0, 1]
    assert len({s.digest for s in spans}) == 2


def test_weight_noise_perturbs_samples_and_is_regenerated(opened, toy):
    recipe = toy(
        assign=(RawScore(),),
        prompts=shapes.Population(prompts=8, rollouts=2, max_tokens=3, scale=1.0),
        learners={"policy": Learner("policy", (), PerturbedWeights(), AdamW(lr=1e-3))},
    )
    session = opened(recipe)
    before = session.run.state.digests["policy"]
    batch = batch_of(session)
    digests = {r.noise: {s.digest for t in r.turns for s in t.spans} for r in batch.rows}
    assert len(digests) == 4
    assert len(set().union(*digests.values())) == 4
    a, b = (session.run.engine.noise("policy", Noise(7, s)) for s in (1.0, -1.0))
    assert all((a[n] == -b[n]).all() for n in a)
    steps(session)
    assert session.run.state.digests["policy"] != before


def test_a_gold_answer_after_a_trace_scores_the_trace(opened, toy):
    session = opened(toy(assign=(shapes.LikelyGold(), GroupMean())))
    session.run.mechanisms["join.0"] = known(session, shapes.Gold)
    session.run.state.mechanisms["join.0"] = None
    batch = batch_of(session)
    ours = [i for i, r in enumerate(batch.rows) if r.origin == "policy"]
    gold = {r.of[0]: i for i, r in enumerate(batch.rows) if r.of}
    need = shapes.LikelyGold.gold
    for i in ours[:3]:
        tokens = batch.row_N == gold[batch.rows[i].id]
        assert batch.columns["score"][i] == pytest.approx(np.exp(batch.columns[need][tokens].sum()))
    assert np.isfinite(steps(session)["policy/loss"])


def test_an_oracle_row_is_learnt_from_without_sampling_log_probs(opened, toy):
    session = opened(toy(assign=(GroupMean(), shapes.OracleCredit())))
    plain = batch_of(opened(toy(assign=(GroupMean(),))))
    session.run.mechanisms["join.0"] = known(session, shapes.Oracle)
    session.run.state.mechanisms["join.0"] = None
    batch = batch_of(session)
    oracle = np.array([r.origin == "oracle" for r in batch.rows])[batch.row_N]
    np.testing.assert_array_equal(batch.columns["credit"][~oracle], plain.columns["credit"])
    objective = prepare(session.run, batch)["policy"][0]
    start = Need("logp", on="given")
    assert np.isfinite(objective.batch.columns[start][oracle]).all()
    _, metrics = session.run.engine.pull("policy", objective.batch, objective)
    assert np.isfinite(metrics["loss"][0])


def test_a_trainable_head_learns_its_target(opened, toy, tiny):
    recipe = toy(
        assign=(shapes.Returns(),),
        models={
            "policy": Model(str(tiny), dtype="float32"),
            "critic": Model("policy", heads=("value",), blocks=1, dtype="float32"),
        },
        learners={
            "policy": learner(lr=0.0),
            "critic": learner(Term(Regress(), on="response"), model="critic", lr=1e-2),
        },
    )
    session = opened(recipe)
    batch = batch_of(session)
    returns = {"return": np.where(batch.ids_N % 2, 1.0, -1.0)}
    batch = replace(batch, columns={**batch.columns, **returns})
    objectives, losses = prepare(session.run, batch)["critic"], []
    for _ in range(12):
        meter = Meter()
        learn(session.run, "critic", objectives, 0, meter)
        losses.append(meter.means()["critic/loss"])
    assert losses[-1] < 0.8 * losses[0]
    assert len(session.run.engine.networks["critic"].module.model.layers) == 1


def test_kl_as_credit_is_zero_at_the_start_and_grows(opened, toy, tiny):
    recipe = toy(
        assign=(GroupMean(), shapes.KlCredit()),
        models={"policy": Model(str(tiny), dtype="float32"), "reference": Model("policy", dtype="float32")},
        learners={"policy": learner(lr=1e-2)},
    )
    session = opened(recipe)
    plain = batch_of(opened(replace(recipe, assign=(GroupMean(),))))
    np.testing.assert_allclose(batch_of(session).columns["credit"], plain.columns["credit"], atol=1e-5)
    session.run.state.step = 0
    steps(session, 2)
    batch = batch_of(session)
    k1 = batch.columns["sampled.logp"] - batch.columns[shapes.KlCredit.reference]
    assert np.abs(k1[batch.masks["sampled"]]).max() > 1e-4


def test_a_functional_of_two_sources_as_column_and_as_loss(opened, toy, tiny):
    recipe = toy(
        assign=(shapes.GapCredit(),),
        models={"policy": Model(str(tiny), dtype="float32"), "reference": Model("policy", dtype="float32")},
        learners={"policy": learner(Term(Policy()), Term(Divergence("reference"), weight=0.5, by=By("rollout")), lr=1e-2)},
    )
    session = opened(recipe)
    batch = batch_of(session)
    on = batch.masks["sampled"]
    np.testing.assert_allclose(batch.columns[shapes.START_GAP][on], 0, atol=1e-6)
    steps(session, 2)
    later = batch_of(session)
    assert later.columns[shapes.START_GAP][later.masks["sampled"]].max() > 1e-6
    objective = prepare(session.run, later)["policy"][0]
    assert {n for n in objective.live if n != LIVE_LOGP}
    assert objective.couples == "token"
