"""Contexts of the hint view by hand."""

from dataclasses import replace

from oneloop.batch import pack, with_views
from oneloop.data import Need, Prompt, Source
from oneloop.views.hint import Hint
from tests.build import row, turn


def hinted(**meta):
    turns = [turn([-1.0]), turn([-1.0], context=(1, 2, 3, 7), observed=1)]
    return replace(row("a", "g", 1.0, turns=turns), prompt=Prompt("p", (1, 2), meta=meta))


def test_by_hand():
    assert Hint()(hinted(hint_ids=[8, 9]), None) == ((8, 9, 1, 2), (8, 9, 1, 2, 3, 7))
    assert Hint(key="coach")(hinted(coach=(5,), hint_ids=[8]), None) == ((5, 1, 2), (5, 1, 2, 3, 7))


def test_without_a_hint_it_is_the_rows_own_context():
    r = hinted()
    assert Hint()(r, None) == tuple(t.context for t in r.turns)
    assert Hint()(hinted(hint_ids=[]), None) == tuple(t.context for t in r.turns)


def test_in_a_batch_only_contexts_change():
    batch = pack([hinted(hint_ids=[8, 9])], 0)
    seen = with_views(batch, [Need("logp", (Source(view="hint"),))], {"hint": Hint()})
    assert list(map(tuple, seen.contexts["hint"])) == [((8, 9, 1, 2), (8, 9, 1, 2, 3, 7))]
    assert seen.rows == batch.rows
    assert seen.ids_N is batch.ids_N
