"""How terms add up: every unit and population of By by hand, and that no cut, mask or neighbour changes a denominator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oneloop.batch import cut, pack, write
from oneloop.data import LIVE_LOGP
from oneloop.estimate.backprop import Backprop
from oneloop.objective.nll import Nll
from oneloop.objective.policy import Policy
from oneloop.optimiser.adamw import AdamW
from oneloop.recipe import override
from oneloop.stages import By, Learner, Term
from oneloop.terms import Sum, token_weights
from tests.build import groups, row

# rows of 2, 1 and 3 tokens; a and b are one group, c another
BATCH = pack([row("a", "g", 1.0, 2), row("b", "g", 0.0, 1), row("c", "h", 1.0, 3)], 0)
STREAM = np.array([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])  # the second token of a left
ALIVE = np.ones(6, bool)
ALL_BYS = [By(u, o, 4) for u in ("token", "rollout", "group", "fixed") for o in ("own", "all")]

BY_HAND = {
    ("token", "own"): [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5],
    ("token", "all"): [1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6],
    ("rollout", "own"): [1 / 3, 0, 1 / 3, 1 / 9, 1 / 9, 1 / 9],
    ("rollout", "all"): [1 / 3, 0, 1 / 3, 1 / 9, 1 / 9, 1 / 9],
    ("group", "own"): [1 / 4, 0, 1 / 4, 1 / 6, 1 / 6, 1 / 6],
    ("group", "all"): [1 / 4, 0, 1 / 4, 1 / 6, 1 / 6, 1 / 6],
    ("fixed", "own"): [1 / 12, 0, 1 / 12, 1 / 12, 1 / 12, 1 / 12],  # length 4 x 3 rollouts
    ("fixed", "all"): [1 / 12, 0, 1 / 12, 1 / 12, 1 / 12, 1 / 12],
}


@pytest.mark.parametrize("by", ALL_BYS, ids=str)
def test_by_hand(by):
    assert token_weights(BATCH, STREAM, by, ALIVE).tolist() == pytest.approx(BY_HAND[by.unit, by.over])


def test_own_and_all_differ_where_a_unit_left_whole():
    left = np.array([0.0, 0, 0, 1, 1, 1])  # only c remains; its group too
    assert token_weights(BATCH, left, By("rollout"), ALIVE).sum() == pytest.approx(1)
    assert token_weights(BATCH, left, By("rollout", "all"), ALIVE).sum() == pytest.approx(1 / 3)
    assert token_weights(BATCH, left, By("group"), ALIVE).sum() == pytest.approx(1)
    assert token_weights(BATCH, left, By("group", "all"), ALIVE).sum() == pytest.approx(1 / 2)
    assert token_weights(BATCH, left, By("fixed", length=3), ALIVE).sum() == pytest.approx(1)
    assert token_weights(BATCH, left, By("fixed", "all", 3), ALIVE).sum() == pytest.approx(1 / 3)


@pytest.mark.parametrize("by", ALL_BYS, ids=str)
def test_doubling_a_stream_doubles_its_term(by):
    once, twice = (token_weights(BATCH, k * STREAM, by, ALIVE) for k in (1, 2))
    assert twice.tolist() == (2 * once).tolist()


@pytest.mark.parametrize("by", ALL_BYS, ids=str)
def test_an_empty_stream_weighs_nothing(by):
    nobody = np.zeros(6)
    assert token_weights(BATCH, nobody, by, ALIVE).tolist() == [0] * 6
    assert token_weights(BATCH, nobody, by, np.zeros(6, bool)).tolist() == [0] * 6


@pytest.mark.parametrize("unit", ["token", "rollout", "group"])
def test_a_mean_of_ones_is_one(unit):
    """Half of the rows masked for truncation: the mean is over what is kept."""
    for kept in (STREAM, np.array([0.0, 0, 1, 1, 1, 1]), np.array([1.0, 1, 0, 0, 0, 0])):
        assert token_weights(BATCH, kept, By(unit), ALIVE).sum() == pytest.approx(1)


def test_the_loss_of_a_half_masked_batch_is_the_mean_over_what_is_kept():
    batch = write(BATCH, {"stream.policy": [1, 1, 1, 0, 0, 0]})
    objective = one(batch, Term(Nll()))
    loss, _ = objective(objective.batch, {LIVE_LOGP: np.array([-1.0, -2, -6, np.nan, np.nan, np.nan])})
    assert loss == pytest.approx(3.0)  # 9 / 3, not 9 / 6


def test_units_agree_where_they_must():
    even = pack([row(str(i), str(i), 1.0, 2) for i in range(3)], 0)
    ones = np.ones(6)
    expected = token_weights(even, ones, By("token"), ones > 0).tolist()
    for by in (By("rollout"), By("group"), By("fixed", length=2)):
        assert token_weights(even, ones, by, ones > 0).tolist() == pytest.approx(expected)


def one(batch, *terms, step=0):
    return Sum(Learner("policy", terms, Backprop(), AdamW()), replace(batch, step=step), {}, "policy")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_denominators_over_the_whole_batch_equal_sums_over_cuts(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=7), "tokens of each row")
    homes = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)), "groups")
    by = data.draw(st.sampled_from(ALL_BYS), "by")
    deal = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)), "cut"))
    batch = pack([row(f"r{i}", f"g{homes[i]}", float(i), n) for i, n in enumerate(sizes)], 0)
    keep_N = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=sum(sizes), max_size=sum(sizes)), "stream"))
    batch = write(batch, {"stream.policy": keep_N, "credit": np.arange(sum(sizes)) - 2.0})
    objective = one(batch, Term(Policy(), by=by), Term(Nll(), on="response", by=by, weight=0.25))
    x_N = -np.linspace(0.1, 1.0, sum(sizes))
    whole, metrics = objective(objective.batch, {LIVE_LOGP: x_N})
    summed, counted = 0.0, {}
    for d in np.unique(deal):
        rows = np.flatnonzero(deal == d)
        token = np.concatenate([np.flatnonzero(batch.row_N == r) for r in rows])
        loss, m = objective(cut(objective.batch, rows.tolist()), {LIVE_LOGP: x_N[token]})
        summed += loss
        for k, (s, n) in m.items():
            counted[k] = np.add(counted.get(k, (0.0, 0.0)), (s, n))
    assert summed == pytest.approx(whole, rel=1e-12, abs=1e-12)
    for k, pair in metrics.items():
        assert tuple(counted[k]) == pytest.approx(pair, rel=1e-9, abs=1e-12)


def test_a_mean_of_means_would_not_add_up():
    """The planted fault: each part divides by its own tokens."""
    x_N = np.array([-1.0, -1, -2, -3, -3, -3])
    whole, parts = one(BATCH, Term(Nll())), [[0, 1], [2]]
    right = whole(whole.batch, {LIVE_LOGP: x_N})[0]
    token = [np.isin(BATCH.row_N, p) for p in parts]
    wrong = np.mean(
        [(o := one(cut(BATCH, p), Term(Nll())))(o.batch, {LIVE_LOGP: x_N[t]})[0] for p, t in zip(parts, token, strict=True)]
    )
    assert right == pytest.approx(13 / 6)
    assert wrong == pytest.approx((4 / 3 + 3) / 2)


def test_terms_add_with_their_weights():
    x_N = np.array([-1.0, -1, -2, -3, -3, -3])
    objective = one(BATCH, Term(Nll(), by=By("fixed")), Term(Nll(), by=By("token"), weight=lambda step: 0.5 * step), step=4)
    # 13 tokens' nats over 1 x 3 rollouts, plus 2 x 13 / 6
    assert objective(objective.batch, {LIVE_LOGP: x_N})[0] == pytest.approx(13 / 3 + 2 * 13 / 6)
    first = one(BATCH, Term(Nll(), by=By("fixed")), Term(Nll(), weight=lambda step: 0.5 * step))
    assert len(first.jobs) == 1, "a term of weight 0 is not computed"


def test_all_counts_the_tokens_of_every_term_of_the_learner():
    batch = write(BATCH, {"stream.policy": [1, 1, 0, 0, 0, 0], "stream.other": [0, 0, 1, 0, 0, 0]})
    objective = one(batch, Term(Nll(), by=By("token", "all")), Term(Nll(), on="other", by=By("token", "all")))
    x_N = np.array([-3.0, -3, -6, np.nan, np.nan, np.nan])
    assert objective(objective.batch, {LIVE_LOGP: x_N})[0] == pytest.approx((6 + 6) / 3)


def test_one_terms_unread_tokens_do_not_poison_anothers_sum():
    batch = write(BATCH, {"stream.policy": [1, 1, 0, 0, 0, 0]})
    objective = one(batch, Term(Nll()))
    assert objective(objective.batch, {LIVE_LOGP: np.array([-1.0, -3, *[np.nan] * 4])})[0] == 2.0


def test_rows_without_credit_are_not_read_and_still_count():
    batch = write(BATCH, {"credit": [1, 1, 0, 0, 0, 0]})
    objective = one(batch, Term(Policy(), by=By("rollout")))
    assert objective.on(objective.batch).tolist() == [True, True, False, False, False, False]
    assert objective(objective.batch, {LIVE_LOGP: np.full(6, -0.5)})[0] == pytest.approx(-1 / 3)


def test_extra_rows_outside_the_stream_leave_the_loss_alone():
    """Padding, errors and joined rows: not in the stream, not in a denominator."""
    x_N = np.array([-1.0, -1, -2, -3, -3, -3])
    more = pack([*BATCH.rows, row("e", "g", "broke", 5), row("o", "h", 1.0, 4, origin="oracle")], 0)
    for by in ALL_BYS:
        a, b = one(BATCH, Term(Nll(), by=by)), one(more, Term(Nll(), by=by))
        assert b(b.batch, {LIVE_LOGP: np.concatenate([x_N, np.full(9, np.nan)])})[0] == a(a.batch, {LIVE_LOGP: x_N})[0]


def test_a_weight_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="weight of term 0 of learner policy is nan at step 3"):
        one(BATCH, Term(Nll(), weight=lambda step: float("nan")), step=3)


@pytest.mark.parametrize("fields", [{"unit": "tokens"}, {"over": "mine"}, {"length": 0}, {"length": 2.5}])
def test_by_refuses_what_it_does_not_know(fields):
    with pytest.raises(ValueError, match=rf"By\.{next(iter(fields))}"):
        By(**fields)


def test_a_misspelt_unit_is_refused_from_the_command_line(toy):
    with pytest.raises(ValueError, match=r"By\.unit = 'tokens': one of 'token', 'rollout', 'group', 'fixed'"):
        override(toy("grpo"), ["learners.policy.objective.0.by.unit=tokens"])


def test_zero_loss_of_an_all_correct_group_is_exactly_zero_gradient():
    batch = groups([1, 1, 1], credit=np.zeros(6))
    objective = one(batch, Term(Policy()))
    assert not objective.on(objective.batch).any()
