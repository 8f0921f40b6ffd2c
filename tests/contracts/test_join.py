"""The contract of stage 5 on every mechanism found."""

from __future__ import annotations

import numpy as np
import pytest

from oneloop.batch import pack
from oneloop.find import names
from tests.build import row
from tests.contracts.common import every, made, plain, rng, through_disk

ALL = every("join")
FRESH = tuple(row(f"{g}.{i}", g, float(i % 2), 2) for g in "ab" for i in range(4))


def joined(mechanism, steps, state=None, first=0):
    state = mechanism.init() if state is None else state
    out = []
    for step in range(first, first + steps):
        before, kept = plain(state), state
        rows, state = mechanism(FRESH, state, rng(3, step))
        assert plain(kept) == before
        state = mechanism.observe(pack([*FRESH, *rows], step), {}, state)
        out.append(rows)
    return out, state


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_rows_have_an_origin_of_their_own_and_new_ids(stage, name):
    before = plain(FRESH)
    steps, _ = joined(made(stage, name), 3)
    assert plain(FRESH) == before
    for rows in steps:
        ids = [r.id for r in [*FRESH, *rows]]
        assert len(ids) == len(set(ids))
        assert all(r.origin and r.origin != "policy" for r in rows)
        assert all(r.turns and r.turns[0].context and any(t.response for t in r.turns) for r in rows)
        batch = pack([*FRESH, *rows], 0)
        own = pack(FRESH, 0)
        assert batch.streams["policy"].sum() == own.streams["policy"].sum()


@pytest.mark.parametrize(("stage", "name"), ALL)
@pytest.mark.parametrize("credit", names("credit"))
def test_they_move_nobodys_credit(stage, name, credit):
    mechanism = made("credit", credit)
    if not mechanism.needs <= {"score"}:
        pytest.skip("this credit reads the engine's columns")
    rows = joined(made(stage, name), 1)[0][0]
    alone, more = (mechanism(pack(r, 0), mechanism.init(), rng(1))[0]["credit"] for r in (FRESH, [*FRESH, *rows]))
    np.testing.assert_array_equal(more[: len(alone)], alone)


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_same_rng_same_rows_and_a_state_through_the_disk_goes_on(stage, name):
    mechanism = made(stage, name)
    whole, end = joined(mechanism, 4)
    _, half = joined(mechanism, 2)
    rest, state = joined(mechanism, 2, through_disk(half), first=2)
    assert plain(rest) == plain(whole[2:])
    assert plain(state) == plain(end)
