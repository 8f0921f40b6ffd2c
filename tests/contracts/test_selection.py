"""What selection promises beyond an Assign's contract (test_credit.py): a drop is weight zero with a reason."""

import numpy as np
import pytest

from oneloop.batch import write
from tests.contracts import assigns
from tests.contracts.common import every, made


@pytest.mark.parametrize(("stage", "name"), every("selection"))
def test_every_row_that_loses_its_stream_has_a_reason(stage, name):
    mechanism = made(stage, name)
    for scores in (assigns.VARIED, assigns.CONSTANT):
        batch = assigns.batch_for(mechanism, *scores)
        after = write(batch, assigns.ran(mechanism, batch)[0])
        had, has = (np.bincount(b.row_N, b.streams["policy"]) > 0 for b in (batch, after))
        lost = {batch.rows[r].id for r in np.flatnonzero(had & ~has)}
        assert lost == set(after.reasons) - set(batch.reasons)
        assert not (has & ~had).any()
        assert after.rows == batch.rows


@pytest.mark.parametrize(("stage", "name"), every("selection"))
def test_selecting_twice_is_selecting_once(stage, name):
    mechanism = made(stage, name)
    once = assigns.batch_for(mechanism, *assigns.VARIED)
    once = write(once, assigns.ran(mechanism, once)[0])
    twice = write(once, assigns.ran(mechanism, once)[0])
    assert {k: v.tolist() for k, v in twice.streams.items()} == {k: v.tolist() for k, v in once.streams.items()}
    assert twice.reasons == once.reasons
