"""The contract of stage 9 on every mechanism found."""

from __future__ import annotations

import math

import pytest
import torch

from tests.contracts.common import every, made, plain, through_disk

ALL = every("optimiser")


def weights():
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(4, 3, generator=generator), "b": torch.randn(5, generator=generator)}


def gradient(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(4, 3, generator=generator), "b": torch.randn(5, generator=generator)}


def moved(mechanism, gradients, w=None, state=None):
    w = weights() if w is None else w
    state = mechanism.init() if state is None else state
    metrics = {}
    for g in gradients:
        w, state, metrics = mechanism(w, g, state, lambda d: 0.0)
    return w, state, metrics


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_zero_gradient_moves_nothing(stage, name):
    zero = {k: torch.zeros_like(v) for k, v in weights().items()}
    w, _, metrics = moved(made(stage, name), [zero])
    assert plain(w) == plain(weights())
    assert all(math.isfinite(s) for s, _ in metrics.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_gradient_that_is_not_finite_moves_nothing_at_any_time(stage, name, bad):
    mechanism = made(stage, name)
    broken = gradient(9)
    broken["b"][2] = bad
    straight = moved(mechanism, [gradient(1), gradient(2)])
    w, state, _ = moved(mechanism, [gradient(1)])
    w, state, metrics = moved(mechanism, [broken], w, state)
    assert plain(w) == plain(moved(mechanism, [gradient(1)])[0])
    assert metrics["skipped"] == (1.0, 1.0)
    assert plain(moved(mechanism, [gradient(2)], w, state)[0]) == plain(straight[0])


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_gradient_moves_weights_downhill_in_their_own_dtype(stage, name):
    w, _, metrics = moved(made(stage, name), [gradient(1)])
    for k, old in weights().items():
        assert w[k].dtype == old.dtype
        assert w[k].shape == old.shape
        assert float(((w[k] - old) * gradient(1)[k]).sum()) < 0
    assert all(len(pair) == 2 for pair in metrics.values())


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_weights_without_a_gradient_stay(stage, name):
    w, _, _ = moved(made(stage, name), [{"a": gradient(1)["a"]}])
    assert w["b"].tolist() == weights()["b"].tolist()
    assert w["a"].tolist() != weights()["a"].tolist()
    assert plain(moved(made(stage, name), [{}])[0]) == plain(weights())


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_state_through_the_disk_goes_on_bit_for_bit(stage, name):
    mechanism = made(stage, name)
    whole = moved(mechanism, [gradient(i) for i in range(6)])
    w, state, _ = moved(mechanism, [gradient(i) for i in range(3)])
    rest = moved(mechanism, [gradient(i) for i in range(3, 6)], w, through_disk(state))
    assert plain(rest[0]) == plain(whole[0])
    assert plain(rest[1]) == plain(whole[1])
    forgotten = moved(mechanism, [gradient(i) for i in range(3, 6)], moved(mechanism, [gradient(i) for i in range(3)])[0])
    if mechanism.init() is not None:
        assert plain(forgotten[0]) != plain(whole[0]), "without its state it would go elsewhere"
