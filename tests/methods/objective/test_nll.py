"""Negative log-likelihood by hand."""

import numpy as np
import pytest
import torch

from oneloop.data import LIVE_LOGP
from oneloop.objective.nll import Nll
from oneloop.objective.policy import Policy
from tests.build import as_torch, groups


def test_by_hand():
    batch = groups([1])
    assert Nll()(batch, {LIVE_LOGP: np.array([-0.25, -3.0])}, None)[0].tolist() == [0.25, 3.0]
    assert Nll()(batch, {LIVE_LOGP: np.array([0.0, 0.0])}, None)[0].tolist() == [0.0, 0.0]


def test_its_gradient_is_the_policy_loss_of_credit_1_at_equal_weights():
    batch = groups([1, 0], credit=[1, 1, 1])
    slopes = []
    for loss in (Nll(), Policy()):
        now_N = torch.full((3,), -0.5, dtype=torch.float64, requires_grad=True)
        loss(as_torch(batch), {LIVE_LOGP: now_N}, None)[0].sum().backward()
        slopes.append(now_N.grad.tolist())
    assert slopes[0] == pytest.approx(slopes[1])
    assert slopes[0] == [-1, -1, -1]
