"""The clipped policy loss by hand: values, gradients, limits, and what a wild ratio does."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from oneloop.batch import pack, write
from oneloop.data import LIVE_LOGP
from oneloop.objective.nll import Nll
from oneloop.objective.policy import START_GIVEN, Policy
from tests.build import as_torch, row, turn


def batch_of(credit, old=(-1.0, -1.0), sampled=None):
    """Two rows of one token each, or as many tokens as there are old log-probs, in one row."""
    return write(pack([row("a", "g", turns=[turn(old, sampled=sampled)])], 0), {"credit": np.array(credit, float)})


def values(loss, batch, now):
    return loss(batch, {LIVE_LOGP: np.array(now, float)}, None)[0]


def slope(loss, batch, now):
    """d loss / d log-prob of every token."""
    now_N = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    loss(as_torch(batch), {LIVE_LOGP: now_N}, None)[0].sum().backward()
    return now_N.grad.tolist()


LOG2 = math.log(2)


def test_by_hand():
    batch = batch_of([1, -1])
    # ratio 2: credit 1 is held at 1.2; credit -1 is not held: -min(-2, -1.2) = 2
    assert values(Policy(), batch, [-1 + LOG2, -1 + LOG2]) == pytest.approx([-1.2, 2.0])
    # ratio 0.5: credit 1 is not held: -0.5; credit -1 is held at 0.8
    assert values(Policy(), batch, [-1 - LOG2, -1 - LOG2]) == pytest.approx([-0.5, 0.8])
    # equal weights: minus the credit
    assert values(Policy(), batch, [-1, -1]) == pytest.approx([-1, 1])


def test_gradients_by_hand():
    batch = batch_of([1, -1])
    assert slope(Policy(), batch, [-1.0, -1.0]) == pytest.approx([-1, 1])
    assert slope(Policy(), batch, [-1 + LOG2, -1 + LOG2]) == pytest.approx([0, 2])
    assert slope(Policy(), batch, [-1 - LOG2, -1 - LOG2]) == pytest.approx([-0.5, 0])


def test_clip_higher_moves_the_upper_bound_alone():
    batch = batch_of([1, -1])
    up, down = [-1 + math.log(1.25)] * 2, [-1 + math.log(0.75)] * 2
    assert values(Policy(high=0.28), batch, up) == pytest.approx([-1.25, 1.25])
    assert values(Policy(high=0.2), batch, up) == pytest.approx([-1.2, 1.25])
    assert values(Policy(high=0.28), batch, down).tolist() == values(Policy(high=0.2), batch, down).tolist()


@pytest.mark.parametrize("bound", [0.1, 0.2, 0.5])
def test_equal_bounds_are_the_symmetric_clip(bound):
    rng = np.random.default_rng(1)
    credit, now = rng.normal(size=40), -1 + rng.normal(size=40)
    batch = batch_of(credit, old=[-1.0] * 40)
    ratio = np.exp(now + 1)
    expected = [-min(w * a, min(max(w, 1 - bound), 1 + bound) * a) for w, a in zip(ratio, credit, strict=True)]
    assert values(Policy(low=bound, high=bound), batch, now) == pytest.approx(expected)


def test_without_bounds_it_is_reinforce():
    rng = np.random.default_rng(2)
    credit, now = rng.normal(size=20), -1 + 0.3 * rng.normal(size=20)
    open_ended = Policy(low=1.0, high=math.inf)
    batch = batch_of(credit, old=[-1.0] * 20)
    assert values(open_ended, batch, now) == pytest.approx(-np.exp(now + 1) * credit)
    # at equal weights its gradient is that of credit x negative log-likelihood
    assert slope(open_ended, batch, [-1.0] * 20) == pytest.approx((-credit).tolist())
    assert values(Nll(), batch, [-1.0] * 20) * credit == pytest.approx(credit)


def test_one_token_with_a_log_ratio_of_20_stays_bounded():
    batch = batch_of([1, -1])
    assert values(Policy(), batch, [19, 19]) == pytest.approx([-1.2, math.exp(10)])
    assert slope(Policy(), batch, [19.0, 19.0]) == [0, 0]
    unbounded = Policy(max_log_ratio=80.0)
    assert slope(unbounded, batch, [19.0, 19.0])[1] == pytest.approx(math.exp(20)), "what the bound is for"
    # just inside the bound the gradient is the ratio, at most exp(max_log_ratio) x credit
    assert slope(Policy(), batch, [8.9, 8.9])[1] == pytest.approx(math.exp(9.9))


def test_a_wild_ratio_leaves_other_tokens_alone():
    calm = slope(Policy(), batch_of([1, 1]), [-1.0, -1.0])
    assert slope(Policy(), batch_of([1, 1]), [-1.0, 19.0])[0] == calm[0]


def test_a_token_nobody_sampled_is_ratioed_to_the_start():
    batch = batch_of([1, 1], sampled=1)
    start = replace(batch, columns={**batch.columns, START_GIVEN: np.array([np.nan, -2.0])})
    assert values(Policy(), start, [-1.0, -2.0]) == pytest.approx([-1, -1])
    assert values(Policy(), start, [-1.0, -2.0 + math.log(1.1)]) == pytest.approx([-1, -1.1])
    # without anything to be ratioed to it has no gradient
    assert slope(Policy(), batch, [-1.0, -2.0]) == pytest.approx([-1, 0])


def test_metrics_by_hand():
    batch = batch_of([1, -1, 0], old=[-1.0, -1.0, -1.0])
    _, metrics = Policy()(batch, {LIVE_LOGP: np.array([-1 + LOG2, -1.0, 5.0])}, None)
    assert metrics["clipped"] == pytest.approx((1.0, 2.0))  # the token without credit is not read
    assert metrics["abs_log_ratio"] == pytest.approx((LOG2, 2.0))


@pytest.mark.parametrize(
    ("name", "value"), [("low", -0.1), ("low", 1.5), ("high", -0.1), ("max_log_ratio", 100.0), ("low", float("nan"))]
)
def test_bounds(name, value):
    with pytest.raises(ValueError, match=rf"Policy\.{name}"):
        Policy(**{name: value})
