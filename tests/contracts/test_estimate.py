"""The contract of stage 8 on every mechanism found, over an engine with one weight vector and a known gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oneloop.batch import pack, write
from oneloop.data import Noise
from tests.build import row
from tests.contracts.common import every, made, plain, rng, through_disk

ALL = every("estimate")
SLOPE = torch.tensor([1.0, -2.0, 0.5])


class Engine:
    """loss = SLOPE . w; noise as the real engine makes it."""

    def __init__(self):
        self.w = {"w": torch.zeros(3)}

    def pull(self, model, batch, objective, fold=None):
        return {"w": SLOPE.clone()}, {"loss": (float(SLOPE @ self.w["w"]), 1.0)}

    def noise(self, model, noise):
        normal = torch.randn(3, generator=torch.Generator().manual_seed(noise.seed))
        return {"w": noise.scale * normal}

    def columns(self, batch, needs, on=None):
        return {n: np.zeros(len(batch.ids_N)) for n in needs}


def batch():
    noises = [Noise(s, sign * 0.1) for s in range(200) for sign in (1, -1)]
    rows = [row(str(i), "g", 0.0, noise=n) for i, n in enumerate(noises)]
    credit = [-float(SLOPE @ Engine().noise("policy", n)["w"]) for n in noises]  # what lowers the loss is credited
    packed = pack(rows, 0)
    return write(packed, {"credit": np.array(credit)[packed.row_N]})


def direction(mechanism, state=None, seed=1):
    engine = Engine()
    state = mechanism.init() if state is None else state
    out = mechanism(engine, "policy", batch(), None, state, rng(seed))
    assert engine.w["w"].tolist() == [0, 0, 0], "an estimate moves nothing"
    return out


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_direction_has_the_weights_names_and_shapes_and_goes_down(stage, name):
    found, metrics, _ = direction(made(stage, name))
    assert {k: tuple(v.shape) for k, v in found.items()} == {"w": (3,)}
    assert torch.isfinite(found["w"]).all()
    assert float(found["w"] @ SLOPE) > 0, "descending it lowers the loss"
    assert all(len(pair) == 2 for pair in metrics.values()), "a metric is (sum, count)"


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_same_rng_same_direction_and_a_state_through_the_disk_goes_on(stage, name):
    mechanism = made(stage, name)
    a, _, state = direction(mechanism)
    assert plain(a) == plain(direction(mechanism)[0])
    assert plain(direction(mechanism, through_disk(state), 2)) == plain(direction(mechanism, state, 2))


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_rows_are_not_changed(stage, name):
    mechanism, b = made(stage, name), batch()
    before = plain(b)
    mechanism(Engine(), "policy", b, None, mechanism.init(), rng(1))
    assert plain(b) == before
