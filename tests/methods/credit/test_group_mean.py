"""Numbers by hand, limits and refusals of the group mean."""

import numpy as np
import pytest

from oneloop.batch import pack
from oneloop.credit.group_mean import GroupMean
from oneloop.credit.raw_score import RawScore
from tests.build import credit, groups, row, turn


def test_by_hand():
    assert credit(GroupMean(), [1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]
    assert credit(GroupMean(), [2, 0], [5, 6, 7]) == [1, -1, -1, 0, 1]


def test_equal_scores_give_exactly_nothing():
    assert credit(GroupMean(), [0.35] * 7) == [0] * 7
    assert np.mean([0.1] * 3) != 0.1, "the rounding that a plain mean would leave"
    assert credit(GroupMean(), [0.1] * 3) == [0] * 3


def test_a_group_of_one_has_no_peers():
    assert credit(GroupMean(), [1], [0]) == [0, 0]


def test_it_is_the_raw_score_where_the_mean_is_the_baseline():
    assert credit(GroupMean(), [3, 1, 2, 2]) == credit(RawScore(baseline=2.0), [3, 1, 2, 2])


def test_errors_are_no_peers_and_get_nothing():
    assert credit(GroupMean(), [1, "timed out", 0]) == [0.5, 0, -0.5]
    assert credit(GroupMean(), [1, 0, 0]) != [0.5, 0, -0.5], "an error counted as 0 would move the others"


def test_turns_of_one_rollout_are_one_peer():
    two_turns = [turn([-1.0]), turn([-1.0, -1.0], context=(1, 2, 3, 9), observed=1)]
    batch = pack([row("a", "g", 1.0, turns=two_turns), row("b", "g", 0.0)], 0)
    written, _ = GroupMean()(batch, None, None)
    assert written["credit"].tolist() == [0.5] * 4 + [-0.5] * 2
    split = pack([row("a", "a", 1.0, turns=two_turns), row("b", "b", 0.0)], 0)
    assert not GroupMean()(split, None, None)[0]["credit"].any(), "grouped by rollout there is nothing to compare"


def test_one_all_correct_group_leaves_the_others_alone():
    alone = credit(GroupMean(), [1, 0])
    assert credit(GroupMean(), [1, 0], [1, 1, 1])[:2] == alone
    assert len(groups([1, 0], [1, 1, 1]).rows) == 5


@pytest.mark.parametrize("scores", [[1e12, 1e12 + 1], [-3.0, 4.0, 1e-9]])
def test_the_credit_of_a_group_sums_to_nothing(scores):
    assert sum(credit(GroupMean(), scores)) == pytest.approx(0, abs=1e-3)
