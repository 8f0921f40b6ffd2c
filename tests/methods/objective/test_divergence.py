"""Full-vocabulary KL by hand, both ways; its gradient; one step of it brings the policy nearer."""

import math

import numpy as np
import pytest
import torch

from oneloop.data import LIVE_LOGP
from oneloop.objective.divergence import Divergence
from oneloop.objective.nll import Nll
from tests.build import groups

P, Q = [0.5, 0.5], [0.9, 0.1]
# reverse: 0.5 ln(0.5 / 0.9) + 0.5 ln(0.5 / 0.1) = 0.510826; forward: 0.9 ln(0.9 / 0.5) + 0.1 ln(0.1 / 0.5) = 0.368064
REVERSE, FORWARD = 0.510826, 0.368064


def functional(way):
    return Divergence(way=way).live.what


def kl(way, p, q):
    return functional(way)(np.log([p]), np.log([q]), np.array([0]))[0]


def test_by_hand():
    assert kl("reverse", P, Q) == pytest.approx(REVERSE, abs=1e-6)
    assert kl("forward", P, Q) == pytest.approx(FORWARD, abs=1e-6)
    assert kl("reverse", Q, P) == pytest.approx(FORWARD, abs=1e-6), "one way is the other with the two exchanged"


@pytest.mark.parametrize("way", ["reverse", "forward"])
def test_equal_distributions_are_0_and_a_shift_of_logits_changes_nothing(way):
    logits = np.random.default_rng(0).normal(size=(4, 9))
    assert functional(way)(logits, logits + 3, np.zeros(4, int)) == pytest.approx(0, abs=1e-12)


def test_forward_kl_to_a_sure_teacher_is_the_negative_log_likelihood():
    logits = np.random.default_rng(1).normal(size=(2, 5))
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    sure = np.full((2, 5), -1e4)
    sure[[0, 1], [2, 4]] = 0.0
    nll = Nll()(groups([1]), {LIVE_LOGP: logp[[0, 1], [2, 4]]}, None)[0]
    assert functional("forward")(logits, sure, np.zeros(2, int)) == pytest.approx(nll)


@pytest.mark.parametrize("way", ["reverse", "forward"])
def test_gradient_is_the_finite_difference_and_lowers_it(way):
    rng = np.random.default_rng(2)
    teacher = torch.tensor(rng.normal(size=(1, 6)))
    policy = torch.tensor(rng.normal(size=(1, 6)), requires_grad=True)
    f = functional(way)
    value = f(policy, teacher, torch.tensor([0]))[0]
    value.backward()
    for v in range(6):
        h = torch.zeros(1, 6, dtype=torch.float64)
        h[0, v] = 1e-6
        up, down = (float(f(policy.detach() + s * h, teacher, torch.tensor([0]))[0]) for s in (1, -1))
        assert float(policy.grad[0, v]) == pytest.approx((up - down) / 2e-6, abs=1e-8)
    assert float(policy.grad.abs().max()) > 1e-2
    nearer = float(f(policy.detach() - 0.1 * policy.grad, teacher, torch.tensor([0]))[0])
    assert nearer < float(value.detach())


def test_equal_settings_are_one_column():
    assert Divergence().live == Divergence().live
    assert Divergence().live != Divergence(way="forward").live
    assert Divergence(view="hint").live != Divergence().live


def test_one_of():
    with pytest.raises(ValueError, match=r"Divergence\.way = 'backward': one of 'reverse', 'forward'"):
        Divergence(way="backward")
    assert math.isfinite(kl("reverse", P, Q))
