"""Rows nobody sampled move no one's credit; a view keeps response ids; a refill advances state once and has a stated end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from oneloop.credit.group_mean import GroupMean
from oneloop.credit.group_normalised import GroupNormalised
from oneloop.credit.leave_one_out import LeaveOneOut
from oneloop.data import Need, Rollout, Score, Source, Turn
from oneloop.join.demonstrations import Demonstrations
from oneloop.loop import attach
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import RecipeError
from oneloop.selection.drop_constant_groups import DropConstantGroups
from oneloop.stages import Assign, Join, Reward
from tests.promises.runs import Parity, batch_of, steps

CREDITS = (GroupMean(), GroupNormalised(), LeaveOneOut())


@dataclass(frozen=True)
class Joined(Join):
    """A row in every group: an oracle's answer with a score of its own, or a gold answer after the trace."""

    kind: str = "oracle"

    def __call__(self, fresh, state, rng):
        firsts = {r.group: r for r in reversed(fresh)}
        out = []
        for g, r in firsts.items():
            context = r.prompt.ids if self.kind == "oracle" else r.turns[0].context + r.turns[0].response
            turn = Turn(context, (4, 5, 1))
            out.append(Rollout(f"{self.kind}.{g}", r.prompt, (turn,), g, self.kind, score=Score(100.0), of=(r.id, 0)))
        return out, state


@pytest.fixture
def session(toy, opened):
    return opened(toy(reward=Parity(), prompts=Epochs(prompts=4, rollouts=4, max_tokens=4)))


def credit(session, assign, joins=()):
    for i, join in enumerate(joins):
        session.run.mechanisms[f"join.{i}"] = join
        session.run.state.mechanisms[f"join.{i}"] = join.init()
    session.run.mechanisms["assign.0"] = assign
    batch = batch_of(session)
    for i in range(len(joins)):
        del session.run.mechanisms[f"join.{i}"]
    ours = np.array([r.origin == "policy" for r in batch.rows])[batch.row_N]
    return batch.columns["credit"][ours], batch.columns["credit"][~ours], batch


@dataclass(frozen=True)
class Everyone(Assign):
    """The planted fault: a group's mean over every row in it, whoever wrote it."""

    needs = frozenset({"score"})
    writes = frozenset({"credit"})

    def __call__(self, batch, state, rng):
        score = batch.columns["score"]
        mean = {g: np.nanmean(score[batch.group_R == g]) for g in set(batch.group_R)}
        return {"credit": (score - np.array([mean[g] for g in batch.group_R]))[batch.row_N]}, state


def injected(session, assign):
    alone, _, _ = credit(session, assign)
    prompts = session.run.mechanisms["prompts"].pool
    demos = Demonstrations(rows=3, pool=tuple((p, (4, 1)) for p in prompts))
    among, others, batch = credit(session, assign, (Joined("oracle"), Joined("gold"), demos))
    assert {r.origin for r in batch.rows} == {"policy", "oracle", "gold", "demonstration"}
    assert np.abs(alone).max() > 0.1
    np.testing.assert_array_equal(among, alone)
    assert (others == 0).all()  # nor do they get any
    return batch


@pytest.mark.parametrize("assign", CREDITS, ids=lambda c: type(c).__name__)
def test_injected_rows_move_no_ones_credit(session, assign):
    batch = injected(session, assign)
    for origin in ("oracle", "gold", "demonstration"):
        assert batch.streams[origin].sum() > 0
        assert (batch.streams["policy"][batch.streams[origin] > 0] == 0).all()


def test_control_credit_that_averages_over_every_row_is_found_out(session):
    with pytest.raises(AssertionError):
        injected(session, Everyone())


# ---------------------------------------------------------------------------- views


def test_a_view_keeps_response_ids(session):
    batch = batch_of(session)
    session.run.mechanisms["view.long"] = lambda row, batch: tuple((4, 5, 6, *t.context) for t in row.turns)
    need = Need("logp", (Source(view="long"),), on="sampled")
    seen = attach(session.run, batch, [need])
    np.testing.assert_array_equal(seen.ids_N, batch.ids_N)
    assert [t.response for r in seen.rows for t in r.turns] == [t.response for r in batch.rows for t in r.turns]
    moved = [replace(r, turns=tuple(replace(t, context=(4, 5, 6, *t.context)) for t in r.turns)) for r in batch.rows]
    by_hand = replace(batch, rows=tuple(moved), cut_N=batch.cut_N + 3)
    expected = session.run.engine.columns(by_hand, [Need("logp")])[Need("logp")]
    on = batch.masks["sampled"]
    np.testing.assert_allclose(seen.columns[need][on], expected[on], atol=1e-5)
    # the control: a view whose context is misplaced by one token gives other numbers
    session.run.mechanisms["view.short"] = lambda row, batch: tuple((4, 5, *t.context) for t in row.turns)
    other = Need("logp", (Source(view="short"),), on="sampled")
    wrong = attach(session.run, batch, [other]).columns[other]
    assert np.abs(wrong - expected)[on].max() > 1e-3


def test_a_view_that_loses_a_turn_is_refused(session):
    session.run.mechanisms["view.lost"] = lambda row, batch: ()
    with pytest.raises(ValueError, match="view lost gave 0 contexts for the 1 turns"):
        attach(session.run, batch_of(session), [Need("logp", (Source(view="lost"),))])


# ---------------------------------------------------------------------------- refill


@dataclass(frozen=True)
class Counter(Assign):
    """State that must advance once a step, however often the step is refilled."""

    writes = frozenset({"count"})

    def init(self):
        return 0

    def __call__(self, batch, state, rng):
        return {"count": np.full(len(batch.rows), state + 1.0)}, state + 1


@dataclass(frozen=True)
class Third(Reward):
    """Varies within every third group only, so that a step of four groups must be refilled."""

    alone = False

    async def __call__(self, group: Sequence[Rollout], state) -> list[Score]:
        place = int(group[0].group.split(".")[1])
        return [Score(float(place % 3 == 0 and i == 0)) for i in range(len(group))]


def refilled(toy, opened, enough=3, max_rounds=4, reward=None):
    recipe = toy(
        reward=reward or Third(),
        assign=(GroupMean(), DropConstantGroups(), Counter()),
        join=(Demonstrations(rows=2),),
        enough=enough,
        max_rounds=max_rounds,
    )
    return opened(recipe)


def test_a_refill_asks_again_and_advances_state_once(toy, opened):
    session = refilled(toy, opened)
    metrics = steps(session, 3)
    assert metrics[0]["collect/rollouts"] > 16
    state = session.run.state.mechanisms
    assert state["assign.2"] == 3
    assert state["join.0"]["place"] + 8 * (state["join.0"]["epoch"] - 1) == 6  # two rows a step, not two a round
    asked = sum(int(m["collect/rollouts"]) for m in metrics) // 4
    assert state["prompts"]["place"] + 8 * (state["prompts"]["epoch"] - 1) == asked  # prompts do advance with each round


def test_a_refill_assigns_anew_over_all_rows(toy, opened):
    session = refilled(toy, opened)
    seen = []

    @dataclass(frozen=True)
    class Seen(Assign):
        def __call__(self, batch, state, rng):
            seen.append((len(batch.rows), set(batch.columns["count"].tolist()), len(set(batch.group_R))))
            return {}, state

    session.run.mechanisms["assign.9"] = Seen()
    session.run.state.mechanisms["assign.9"] = None
    metrics = steps(session)[0]
    assert len(seen) > 1
    assert [rows for rows, *_ in seen] == sorted(rows for rows, *_ in seen)
    assert seen[-1][0] == metrics["collect/rollouts"] + 2
    assert all(count == {1.0} for _, count, _ in seen)


def test_control_state_that_is_carried_through_the_rounds_is_found_out(toy, opened, monkeypatch):
    """The planted fault: each round starts from the state the round before left."""
    from oneloop import loop

    real = loop.assemble
    monkeypatch.setattr(loop, "assemble", lambda run, fresh, before: real(run, fresh, run.state.mechanisms))
    session = refilled(toy, opened)
    steps(session, 1)
    assert session.run.state.mechanisms["assign.2"] != 1


@dataclass(frozen=True)
class Flat(Reward):
    async def __call__(self, group: Sequence[Rollout], state) -> list[Score]:
        return [Score(1.0)] * len(group)


def test_a_refill_ends_after_max_rounds(toy, opened):
    session = refilled(toy, opened, enough=2, max_rounds=3, reward=Flat())
    metrics = steps(session)[0]
    assert metrics["collect/rollouts"] == 3 * 16
    assert metrics["collect/groups_learnt"] == 0


def test_what_no_round_can_give_is_refused_before_weights_load(toy):
    with pytest.raises(RecipeError, match="enough = 9 groups, but 2 rounds of 4 prompts give at most 8"):
        toy(enough=9, max_rounds=2).check()
