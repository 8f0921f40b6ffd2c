"""Which groups leave, and why, by hand."""

from dataclasses import replace

import numpy as np

from oneloop.batch import pack, write
from oneloop.credit.group_mean import GroupMean
from oneloop.selection.drop_constant_groups import DropConstantGroups
from tests.build import groups, per_row, row


def dropped(batch):
    written, _ = DropConstantGroups()(batch, None, None)
    return per_row(batch, written["stream.policy"]), written["reasons"]


def test_by_hand():
    kept, reasons = dropped(groups([1, 1], [1, 0], [0, 0, 0]))
    assert kept == [0, 0, 1, 1, 0, 0, 0]
    assert reasons == {
        "0.0": "constant group: every score is 1",
        "0.1": "constant group: every score is 1",
        "2.0": "constant group: every score is 0",
        "2.1": "constant group: every score is 0",
        "2.2": "constant group: every score is 0",
    }


def test_nothing_is_dropped_where_every_group_varies():
    batch = groups([1, 0], [0.3, 0.2, 0.2])
    kept, reasons = dropped(batch)
    assert kept == [1] * 5
    assert reasons == {}


def test_an_error_is_no_variance_and_keeps_its_own_reason():
    batch = groups([1, "timed out", 1], [1, 0])
    kept, reasons = dropped(batch)
    assert kept == [0, 0, 0, 1, 1]
    assert set(reasons) == {"0.0", "0.2"}
    after = write(batch, {"reasons": reasons})
    assert after.reasons["0.1"] == "timed out"


def test_what_left_already_does_not_come_back():
    batch = groups([1, 0])
    half = replace(batch, streams={"policy": batch.streams["policy"] * 0.0})
    assert dropped(half)[0] == [0, 0]


def test_joined_rows_are_not_touched_and_vary_nothing():
    batch = pack([row("a", "g", 1.0), row("b", "g", 1.0), row("o", "g", 0.0, origin="oracle")], 0)
    written, _ = DropConstantGroups()(batch, None, None)
    assert not written["stream.policy"].any()
    assert "o" not in written["reasons"]
    assert batch.streams["oracle"].sum() == 2


def test_it_drops_exactly_the_groups_without_credit():
    batch = groups([1, 1], [1, 0], [0.35] * 4, [2, 3, 4])
    credit, _ = GroupMean()(batch, None, None)
    has_credit = [any(credit["credit"][batch.row_N == r]) for r in range(len(batch.rows))]
    kept = dropped(batch)[0]
    # 3 of 2, 3, 4 is its group's mean: no credit, and yet its group stays
    assert [bool(k) for k in kept] == [c or batch.columns["score"][r] == 3 for r, c in enumerate(has_credit)]
    assert np.flatnonzero(kept).tolist() == [2, 3, 8, 9, 10]
