"""AdamW's first steps by hand, its limits, and what stops it."""

import math

import pytest
import torch

from oneloop.optimiser.adamw import AdamW


def moved(mechanism, *gradients, start=(1.0, -1.0)):
    """Weights after these gradients, the last metrics, and the state."""
    weights, state, metrics = {"w": torch.tensor(start)}, mechanism.init(), {}
    for g in gradients:
        weights, state, metrics = mechanism(weights, {"w": torch.tensor(g)}, state, lambda d: 0.0)
    return weights["w"].tolist(), metrics, state


def test_the_first_step_is_lr_against_the_sign():
    # m / (1 - b1) = g and v / (1 - b2) = g^2, so the step is lr x g / |g|
    w, metrics, _ = moved(AdamW(lr=0.1, max_norm=0.0), [4.0, -0.5])
    assert w == pytest.approx([0.9, -0.9], abs=1e-6)
    assert metrics["grad_norm"][0] == pytest.approx(math.sqrt(16.25))


def test_two_steps_by_hand():
    # b1 = 0.5, b2 = 0.75, g = 1 then 3. m: 0.5, 1.75; v: 0.25, 0.1875 + 2.25 = 2.4375
    # corrected at 2: m / 0.75 = 2.333333, v / 0.4375 = 5.571429, step 2.333333 / 2.360387 = 0.988538
    w, _, _ = moved(AdamW(lr=0.1, beta1=0.5, beta2=0.75, max_norm=0.0), [1.0, 1.0], [3.0, 3.0])
    assert w == pytest.approx([1 - 0.1 - 0.0988538, -1 - 0.1 - 0.0988538], abs=1e-6)


def test_weight_decay_by_hand():
    # 1 x (1 - 0.1 x 0.5) - 0.1
    assert moved(AdamW(lr=0.1, weight_decay=0.5), [1.0, -1.0])[0] == pytest.approx([0.85, -0.85], abs=1e-6)


def test_clipping_scales_the_whole_gradient():
    clipped = moved(AdamW(lr=0.1, max_norm=1.0), [3.0, 4.0])
    assert clipped[2]["m"]["w"].tolist() == pytest.approx([0.06, 0.08])  # (1 - 0.9) x (0.6, 0.8)
    assert clipped[1]["grad_norm"][0] == pytest.approx(5.0), "reported before clipping"
    short = moved(AdamW(lr=0.1, max_norm=1.0), [0.3, 0.4])
    assert short[2]["m"]["w"].tolist() == pytest.approx([0.03, 0.04])


def test_with_both_betas_0_it_is_sign_descent():
    w, _, _ = moved(AdamW(lr=0.1, beta1=0.0, beta2=0.0, max_norm=0.0), [7.0, -7.0], [1.0, -1.0])
    assert w == pytest.approx([0.8, -0.8], abs=1e-6)


def test_warmup_rises_linearly_and_then_stays():
    mechanism, rates = AdamW(lr=1.0, warmup=4), []
    weights, state = {"w": torch.zeros(2)}, mechanism.init()
    for _ in range(6):
        weights, state, metrics = mechanism(weights, {"w": torch.ones(2)}, state, lambda d: 0.0)
        rates.append(metrics["lr"][0])
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(bad):
    good = moved(AdamW(lr=0.1), [1.0, 2.0])
    then = moved(AdamW(lr=0.1), [1.0, 2.0], [bad, 0.0])
    assert then[0] == good[0]
    assert then[1] == {"skipped": (1.0, 1.0)}
    assert then[2]["updates"] == 1
    after = moved(AdamW(lr=0.1), [1.0, 2.0], [bad, 0.0], [1.0, 2.0])
    assert after[0] == moved(AdamW(lr=0.1), [1.0, 2.0], [1.0, 2.0])[0], "moments were not poisoned"


def test_small_updates_are_not_lost_in_the_masters():
    w, _, _ = moved(AdamW(lr=1e-5), *[[1.0, -1.0]] * 20)
    assert w[0] == pytest.approx(1 - 20e-5, rel=1e-6)
    rounded = torch.tensor(1.0, dtype=torch.bfloat16) - 1e-5
    assert float(rounded) == 1.0, "bf16 weights alone would have stood still"


@pytest.mark.parametrize(
    ("name", "value"), [("lr", -1e-6), ("lr", 11.0), ("beta1", 1.1), ("eps", -1.0), ("warmup", -1), ("lr", "1e-5")]
)
def test_bounds(name, value):
    with pytest.raises(ValueError, match=rf"AdamW\.{name}"):
        AdamW(**{name: value})


def test_decay_falls_linearly_to_nothing():
    rates = [AdamW(lr=2.0, decay=4).rate(n) for n in range(6)]
    assert rates == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert [AdamW(lr=2.0, warmup=2, decay=4).rate(n) for n in range(3)] == [1.0, 1.5, 1.0]
