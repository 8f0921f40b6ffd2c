"""Numbers by hand and limits of the score as credit."""

import pytest

from oneloop.credit.group_mean import GroupMean
from oneloop.credit.raw_score import RawScore
from tests.build import credit


def test_by_hand():
    assert credit(RawScore(), [1, 0, 0.5]) == [1, 0, 0.5]
    assert credit(RawScore(baseline=0.25), [1, 0, 0.5]) == [0.75, -0.25, 0.25]


def test_with_the_mean_as_baseline_it_is_the_group_mean():
    assert credit(RawScore(baseline=0.5), [1, 0, 0.5]) == credit(GroupMean(), [1, 0, 0.5])


def test_an_error_gets_nothing_with_or_without_a_baseline():
    assert credit(RawScore(), [1, "timed out"]) == [1, 0]
    assert credit(RawScore(baseline=0.5), [1, "timed out"]) == [0.5, 0]


@pytest.mark.parametrize("baseline", [2e9, -2e9, float("nan"), float("inf")])
def test_bounds(baseline):
    with pytest.raises(ValueError, match=r"RawScore\.baseline"):
        RawScore(baseline=baseline)
