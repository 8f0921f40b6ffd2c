"""Evolution strategies by hand: the sign, the scale, who counts, and that it estimates a gradient."""

import numpy as np
import pytest
import torch

from oneloop.batch import pack, write
from oneloop.data import Noise
from oneloop.estimate.perturbed_weights import PerturbedWeights
from tests.build import row


class Engine:
    """Noise as the real engine makes it: scale x normal(seed)."""

    def __init__(self, size=2):
        self.size = size

    def noise(self, model, noise):
        return {"w": noise.scale * self.normal(noise.seed)}

    def normal(self, seed):
        return torch.randn(self.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def direction(engine, rows, credit_R):
    batch = pack(rows, 0)
    batch = write(batch, {"credit": np.array(credit_R, float)[batch.row_N]})
    return PerturbedWeights()(engine, "policy", batch, None, None, None)[0]


def test_by_hand():
    engine, e = Engine(), Engine().normal(7)
    rows = [row("a", "g", noise=Noise(7, 0.5)), row("b", "g", noise=Noise(7, -0.5))]
    # (credit 3 x e - credit 1 x e) / scale / 2 rollouts, descended: -(3 - 1) e / 0.5 / 2
    assert direction(engine, rows, [3, 1])["w"].tolist() == pytest.approx((-2 * e).tolist())
    assert direction(engine, rows[:1], [3])["w"].tolist() == pytest.approx((-6 * e).tolist())


def test_equal_credit_of_an_antithetic_pair_cancels():
    rows = [row("a", "g", noise=Noise(7, 0.5)), row("b", "g", noise=Noise(7, -0.5))]
    assert direction(Engine(), rows, [1, 1])["w"].tolist() == pytest.approx([0, 0])


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_on_a_linear_score_it_is_minus_the_gradient_at_any_scale(scale):
    engine, slope = Engine(3), torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    noises = [Noise(s, sign * scale) for s in range(4000) for sign in (1, -1)]
    credit = [float(slope @ engine.noise("policy", n)["w"]) for n in noises]
    rows = [row(str(i), "g", tokens=1, noise=n) for i, n in enumerate(noises)]
    assert direction(engine, rows, credit)["w"].tolist() == pytest.approx((-slope).tolist(), abs=0.15)


def test_errors_and_joined_rows_count_nowhere():
    rows = [row("a", "g", noise=Noise(7, 0.5)), row("b", "g", noise=Noise(8, 0.5))]
    more = [*rows, row("c", "g", "timed out", noise=Noise(9, 0.5)), row("d", "g", 1.0, origin="demonstration")]
    assert direction(Engine(), more, [3, 1, 0, 5])["w"].tolist() == direction(Engine(), rows, [3, 1])["w"].tolist()


@pytest.mark.parametrize("noise", [None, Noise(3, 0.0)])
def test_a_rollout_without_noise_is_refused(noise):
    with pytest.raises(ValueError, match="rollout a was sampled without noise"):
        direction(Engine(), [row("a", "g", noise=noise)], [1])
