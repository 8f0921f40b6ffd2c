"""Squared error by hand, clipped and not."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from oneloop.batch import write
from oneloop.objective.regress import Regress
from tests.build import as_torch, groups


def values(loss, v, g, start=None):
    batch = write(groups([1]), {"return": np.array(g, float)})
    columns = dict(batch.columns) | ({loss.start: np.array(start, float)} if start else {})
    return loss(replace(batch, columns=columns), {loss.live: np.array(v, float)}, None)[0].tolist()


def test_by_hand():
    assert values(Regress(), [1.0, -2.0], [0.5, 1.0]) == [0.25, 9.0]


def test_clipped_by_hand():
    # start 0, clip 0.5: V = 2 is held at 0.5. Target 3: max((2 - 3)^2, (0.5 - 3)^2) = 6.25; target 1: max(1, 0.25) = 1
    assert values(Regress(clip=0.5), [2.0, 2.0], [3.0, 1.0], [0.0, 0.0]) == [6.25, 1.0]


def test_an_infinite_clip_is_the_plain_square_and_asks_for_no_start():
    wide = values(Regress(clip=1e9), [2.0, -7.0], [3.0, 1.0], [0.0, 0.0])
    assert values(Regress(), [2.0, -7.0], [3.0, 1.0]) == wide
    assert Regress().start not in Regress().needs
    assert Regress(clip=0.5).start in Regress(clip=0.5).needs


def test_held_values_have_no_gradient():
    loss = Regress(clip=0.5)
    batch = as_torch(write(groups([1]), {"return": np.array([3.0, 1.0])}))
    batch.columns[loss.start] = torch.zeros(2, dtype=torch.float64)
    v_N = torch.tensor([2.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss(batch, {loss.live: v_N}, None)[0].sum().backward()
    assert v_N.grad.tolist() == [0.0, 2.0]


def test_names_choose_the_columns():
    loss = Regress(head="risk", target="loss", model="judge")
    assert loss.live.what == "value.risk"
    assert loss.live.of[0].model == "judge"
    assert "loss" in loss.needs


@pytest.mark.parametrize("clip", [-1.0, math.nan])
def test_bounds(clip):
    with pytest.raises(ValueError, match=r"Regress\.clip"):
        Regress(clip=clip)
