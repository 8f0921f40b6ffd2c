"""Demonstrations by hand: order, tokens, and that they move no one's credit."""

import numpy as np
import pytest

from oneloop.batch import pack
from oneloop.credit.group_mean import GroupMean
from oneloop.data import Prompt
from oneloop.join.demonstrations import Demonstrations
from oneloop.prompts.epochs import Epochs
from oneloop.stages import Item, Resources
from tests.build import row

PROMPTS = tuple(Prompt(f"p{i}", (i, i)) for i in range(3))
ITEMS = tuple(Item(f"p{i}", (), demonstration="ab"[: i + 1]) for i in range(3))
LENT = Resources(PROMPTS, ITEMS, encode=lambda text: tuple(text.encode()), end=9)


def joined(steps, **fields):
    mechanism = Demonstrations(**fields).open(LENT)
    state, out = mechanism.init(), []
    for step in range(steps):
        rows, state = mechanism([], state, np.random.default_rng(step))
        out.append(rows)
    return out


def test_by_hand():
    rows = {r.prompt.id: r for r in joined(1, rows=3)[0]}
    assert rows["p0"].turns[0].response == (97, 9), "the answer's own ids and the end token"
    assert rows["p1"].turns[0].response == (97, 98, 9)
    assert rows["p1"].turns[0].context == (1, 1)
    assert {(r.origin, r.score.value, r.turns[0].spans) for r in rows.values()} == {("demonstration", 1.0, ())}


def test_they_feed_their_own_stream_and_have_no_log_probs():
    batch = pack(joined(1, rows=3)[0], 0)
    assert batch.streams["demonstration"].tolist() == [1] * len(batch.ids_N)
    assert not batch.streams["policy"].any()
    assert np.isnan(batch.columns["sampled.logp"]).all()


def test_every_row_once_an_epoch_in_the_order_that_prompts_would_come():
    ids = [r.prompt.id for rows in joined(3, rows=2) for r in rows]
    assert sorted(ids[:3]) == sorted(ids[3:]) == ["p0", "p1", "p2"]
    prompts = Epochs(prompts=2).open(LENT)
    state, order = prompts.init(), []
    for step in range(3):
        requests, state = prompts(step, state, np.random.default_rng(step))
        order += [q.prompt.id for q in requests]
    assert ids == order


def test_they_are_in_groups_of_their_own():
    fresh = [row("a", "p0", 1.0), row("b", "p0", 0.0)]
    alone = GroupMean()(pack(fresh, 0), None, None)[0]["credit"]
    more = GroupMean()(pack([*fresh, *joined(1, rows=3)[0]], 0), None, None)[0]["credit"]
    assert more[: len(alone)].tolist() == alone.tolist()
    assert not more[len(alone) :].any()


def test_a_task_without_demonstrations_and_a_value_never_opened_are_refused():
    with pytest.raises(ValueError, match="no demonstrations: its items need the field `demonstration`"):
        Demonstrations().open(Resources(PROMPTS, [Item("p", ())] * 3))
    with pytest.raises(ValueError, match="open"):
        Demonstrations()([], Demonstrations().init(), np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"Demonstrations\.rows = 0"):
        Demonstrations(rows=0)
