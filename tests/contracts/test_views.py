"""The contract of views on every mechanism found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oneloop.batch import pack, with_views
from oneloop.data import Need, Source
from tests.build import row, turn
from tests.contracts.common import PROMPTS, every, made, plain

ALL = every("views")
TURNS = (turn([-1.0, -1.0]), turn([-1.0], context=(1, 2, 3, 4, 7), observed=1))
ROWS = [
    replace(row("a", "g", 1.0, turns=TURNS), prompt=PROMPTS[0]),
    replace(row("b", "g", 0.0), prompt=PROMPTS[1]),
    replace(row("c", "g", "the scorer broke"), prompt=replace(PROMPTS[2], meta={})),
]
NEED = [Need("logp", (Source(view="this"),))]


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_one_context_a_turn_and_the_response_stays(stage, name):
    batch = pack(ROWS, 0)
    before = plain(batch)
    seen = with_views(batch, NEED, {"this": made(stage, name)})
    assert plain(replace(seen, contexts={})) == before
    for r, contexts in zip(seen.rows, seen.contexts["this"], strict=True):
        assert len(contexts) == len(r.turns)
        assert all(isinstance(c, tuple) and c and all(type(i) is int for i in c) for c in contexts)


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_the_same_on_every_call(stage, name):
    batch, view = pack(ROWS, 0), made(stage, name)
    assert [view(r, batch) for r in ROWS] == [view(r, batch) for r in ROWS]


def test_a_view_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="view this gave 1 contexts for the 2 turns of a"):
        with_views(pack(ROWS, 0), NEED, {"this": lambda rollout, batch: (rollout.turns[0].context,)})
