"""Numbers by hand, limits and refusals of group-normalised credit."""

import pytest

from oneloop.batch import pack
from oneloop.credit.group_mean import GroupMean
from oneloop.credit.group_normalised import GroupNormalised
from tests.build import credit, per_row, row, turn


def test_by_hand():
    # mean 0.25; sample std of 1, 0, 0, 0: sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5
    assert credit(GroupNormalised(eps=1e-8), [1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert credit(GroupNormalised(eps=0.5), [1, 0, 0, 0]) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    # population std: sqrt(0.75 / 4) = 0.4330127
    whole = GroupNormalised(eps=1e-8, sample_std=False)
    assert credit(whole, [1, 0, 0, 0]) == pytest.approx([1.7320508, -0.5773503, -0.5773503, -0.5773503])


def test_it_is_the_group_mean_over_the_std():
    scores = [3.0, 1.0, 0.5, 7.0]
    std = 2.954516  # of these four, n - 1
    mean = [c / std for c in credit(GroupMean(), scores)]
    assert credit(GroupNormalised(eps=1e-8), scores) == pytest.approx(mean, rel=1e-6)


def test_it_is_the_group_mean_where_std_and_eps_sum_to_one():
    assert credit(GroupNormalised(eps=0.5), [1, 0, 0, 0]) == pytest.approx(credit(GroupMean(), [1, 0, 0, 0]))


def test_scale_and_shift_of_scores_change_nothing():
    a = credit(GroupNormalised(eps=1e-8), [1, 2, 4])
    assert credit(GroupNormalised(eps=1e-8), [107, 207, 407]) == pytest.approx(a, rel=1e-6)


@pytest.mark.parametrize("value", [0.35, 0.1, -1e9, 0.0])
def test_equal_scores_give_exactly_nothing(value):
    assert credit(GroupNormalised(), [value] * 7) == [0] * 7


def test_rounding_is_not_blown_up():
    nearly = [0.1 + 0.2, 0.3, 0.3]
    assert nearly[0] != nearly[1]
    assert max(map(abs, credit(GroupNormalised(eps=1e-8), nearly))) < 1e-7
    with pytest.raises(ValueError, match="eps"):
        GroupNormalised(eps=0.0)  # would make it 1.15


def test_lengths_and_how_a_row_ended_shift_nothing():
    """One row without an end token among three that have theirs."""
    ended = [row(n, "g", s, turns=[turn([-1.0] * k)]) for n, s, k in (("a", 1.0, 2), ("b", 0.0, 2), ("c", 0.0, 2))]
    cut = row("c", "g", 0.0, turns=[turn([-1.0] * 9, finish="length")])
    found = []
    for rows in (ended, [*ended[:2], cut]):
        batch = pack(rows, 0)
        found.append(per_row(batch, GroupNormalised()(batch, None, None)[0]["credit"]))
    assert found[0] == found[1]


def test_a_group_of_one_and_errors_get_nothing():
    assert credit(GroupNormalised(), [1], [0, "no"]) == [0, 0, 0]


@pytest.mark.parametrize("eps", [-1.0, 2.0, float("nan"), "small"])
def test_bounds(eps):
    with pytest.raises(ValueError, match=r"GroupNormalised\.eps"):
        GroupNormalised(eps=eps)
