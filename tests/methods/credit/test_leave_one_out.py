"""Numbers by hand and limits of the leave-one-out baseline."""

import pytest

from oneloop.credit.group_mean import GroupMean
from oneloop.credit.leave_one_out import LeaveOneOut
from tests.build import credit


def test_by_hand():
    # 1 - mean(0, 0, 0) = 1; 0 - mean(1, 0, 0) = -1/3
    assert credit(LeaveOneOut(), [1, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    # 4 - 1.5, 1 - 3, 2 - 2.5
    assert credit(LeaveOneOut(), [4, 1, 2]) == pytest.approx([2.5, -2, -0.5])
    assert credit(LeaveOneOut(), [3, 1]) == [2, -2]


@pytest.mark.parametrize("scores", [[1, 0], [0.3, -2.0, 9.0], [1, 1, 0, 0, 5.5]])
def test_it_is_n_over_n_minus_one_group_means(scores):
    n = len(scores)
    expected = [c * n / (n - 1) for c in credit(GroupMean(), scores)]
    assert credit(LeaveOneOut(), scores) == pytest.approx(expected)


def test_a_zero_variance_group_gives_exactly_nothing():
    assert credit(LeaveOneOut(), [0.35] * 8) == [0] * 8


def test_one_alone_gets_nothing_not_its_raw_score():
    assert credit(LeaveOneOut(), [1]) == [0]
    assert credit(LeaveOneOut(), [1, "timed out"]) == [0, 0]
