"""Numbers by hand, limits and refusals of the mean-power credit."""

import pytest

from oneloop.credit.group_mean import GroupMean
from oneloop.credit.mean_power import MeanPower
from tests.build import credit


def test_by_hand():
    assert credit(MeanPower(), [1, 0, 0, 0]) == [3, -1, -1, -1]  # (1 - 1/4) / (1/4), (0 - 1/4) / (1/4)
    assert credit(MeanPower(q=0.5), [1, 0, 0, 0]) == [1.5, -0.5, -0.5, -0.5]  # divided by sqrt(1/4)
    assert credit(MeanPower(), [0.5, 0.25, 0.25, 0]) == [1, 0, 0, -1]


def test_power_0_is_the_group_mean():
    scores = [1, 0, 0.5, 1]
    assert credit(MeanPower(q=0.0), scores) == credit(GroupMean(), scores)


def test_a_group_that_was_never_or_always_right_gets_exactly_nothing():
    assert credit(MeanPower(), [0, 0, 0], [1, 1], [0.1, 0.1, 0.1]) == [0] * 8


def test_errors_are_no_peers():
    assert credit(MeanPower(), [1, "timed out", 0]) == [1, 0, -1]


def test_scores_outside_0_and_1_are_refused():
    with pytest.raises(ValueError, match="between 0 and 1, not 2"):
        credit(MeanPower(), [2, 0])
    with pytest.raises(ValueError, match="between 0 and 1, not -1"):
        credit(MeanPower(), [0, -1])
    with pytest.raises(ValueError, match=r"MeanPower.q = 2: between 0 and 1"):
        MeanPower(q=2)
