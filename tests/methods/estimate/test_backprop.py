"""Backprop hands on the engine's gradient, over the whole batch, once."""

import numpy as np

from oneloop.estimate.backprop import Backprop
from tests.build import groups


class Told:
    """An engine that says what it was asked."""

    def __init__(self):
        self.asked = []

    def pull(self, *what):
        self.asked.append(what)
        return {"w": np.array([1.0, -2.0])}, {"loss": (3.0, 1.0)}


def test_it_is_the_engines_pull():
    engine, batch = Told(), groups([1, 0])
    direction, metrics, state = Backprop()(engine, "policy", batch, "objective", {"kept": 1}, None)
    assert direction["w"].tolist() == [1.0, -2.0]
    assert metrics == {"loss": (3.0, 1.0)}
    assert state == {"kept": 1}
    assert engine.asked == [("policy", batch, "objective")]
