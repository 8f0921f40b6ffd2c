"""Packing, cutting, writing and views by hand, and the faults they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oneloop.batch import cut, pack, with_views, write
from oneloop.data import Need, Score, Source, Span, Turn
from tests.build import row, turn
from tests.contracts.common import plain

SECOND = turn([-3.0], context=(1, 2, 3, 4, 50, 51), first=9, observed=2)
CHAT = row("chat", "g", 1.0, turns=[turn([-1.0, -2.0]), SECOND])
HALF = row("half", "g", 0.0, turns=[turn([-1.0, -2.0, -4.0], first=20, sampled=2)])
GOLD = row("gold", "h", None, 2, origin="gold")


def test_pack_by_hand():
    b = pack([CHAT, HALF, GOLD], 3)
    assert b.ids_N.tolist() == [3, 4, 50, 51, 9, 20, 21, 22, 3, 4]
    assert b.row_N.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert b.turn_N.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert b.cut_N.tolist() == [2, 3, 4, 5, 6, 2, 3, 4, 2, 3]
    assert b.group_R.tolist() == ["g", "g", "h"]
    on = {k: np.flatnonzero(v).tolist() for k, v in b.masks.items()}
    assert on["observation"] == [2, 3]
    assert on["response"] == [0, 1, 4, 5, 6, 7, 8, 9]
    assert on["sampled"] == [0, 1, 4, 5, 6]
    assert on["given"] == [7, 8, 9]
    assert on["turn_start"] == [0, 4, 5]
    assert np.flatnonzero(b.streams["policy"]).tolist() == [0, 1, 4, 5, 6]
    assert np.flatnonzero(b.streams["gold"]).tolist() == [8, 9]
    assert np.nan_to_num(b.columns["sampled.logp"], nan=9).tolist() == [-1, -2, 9, 9, -3, -1, -2, 9, 9, 9]
    assert np.nan_to_num(b.columns["score"], nan=9).tolist() == [1, 0, 9]


def test_every_token_is_the_one_its_cut_points_at():
    b = pack([CHAT, HALF, GOLD], 0)
    for i, token in enumerate(b.ids_N):
        t = b.rows[b.row_N[i]].turns[b.turn_N[i]]
        assert (t.context + t.response)[b.cut_N[i]] == token


def test_the_number_of_trained_tokens_is_the_number_generated():
    """No end token, all cut for length: nothing is added and nothing padded."""
    rows = [row(str(i), "g", 0.0, n, turns=[turn([-1.0] * n, finish="length")]) for i, n in enumerate((1, 5, 2))]
    b = pack(rows, 0)
    assert len(b.ids_N) == b.streams["policy"].sum() == 8


def test_an_error_feeds_no_stream_and_its_reason_is_the_error():
    b = pack([replace(CHAT, score=Score(error="timed out")), HALF], 0)
    assert b.reasons == {"chat": "timed out"}
    assert np.flatnonzero(b.streams["policy"]).tolist() == [5, 6]
    for mask in b.masks.values():
        assert not mask[:5].any(), "a term may read a mask as its stream"
    assert np.isnan(b.columns["score"][0])
    zero = pack([replace(CHAT, score=Score(0.0)), HALF], 0)
    assert zero.columns["score"][0] == 0
    assert not zero.reasons


def test_versions_and_temperatures_come_from_spans():
    t = replace(turn([-1.0] * 4), spans=(Span(0, 1, 3, "a", 0.5), Span(2, 4, 4, "b", 2.0)))
    b = pack([row("a", "g", 1.0, turns=[t])], 5)
    assert b.columns["version"].tolist() == [3, -1, 4, 4]
    assert b.columns["temperature"].tolist() == [0.5, 1, 2, 2]
    assert b.masks["given"].tolist() == [False, True, False, False]
    assert np.isnan(b.columns["sampled.logp"][1])


def test_kept_columns_come_back():
    old = replace(HALF, kept={"credit": np.array([0.1, 0.2, 0.3])})
    with_error = replace(old, id="e", score=Score(error="timed out"))
    b = pack([CHAT, old, with_error], 0)
    assert np.nan_to_num(b.columns["kept.credit"], nan=9).tolist() == [9] * 5 + [0.1, 0.2, 0.3] * 2


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([], "at least one row"),
        ([row("a", "g", turns=[replace(turn([-1.0]), spans=(Span(0, 2),))])], r"span \[0, 2\) of a response of 1 tokens"),
        ([row("a", "g", turns=[replace(turn([-1.0]), spans=(Span(-1, 1),))])], r"span \[-1, 1\)"),
        ([row("a", "g", turns=[replace(turn([-1.0, -1.0]), spans=(Span(2, 1),))])], r"span \[2, 1\)"),
        ([row("a", "g", turns=[turn([-1.0], context=())])], "empty context"),
        ([row("a", "g", turns=[turn([-1.0], observed=3)])], "observed 3 of 2 context tokens"),
        ([CHAT, row("b", "g", turns=[Turn((1, 2), ())])], "row b has no tokens: count it as an error or leave it out"),
        ([replace(CHAT, turns=()), HALF], "row chat has no tokens"),
        ([row("a", "g", turns=[replace(turn([-1.0, -2.0]), recorded={"logp": np.array([-1.0])})])], "recorded 1 logp for 2"),
    ],
)
def test_pack_refuses(rows, match):
    with pytest.raises(ValueError, match=match) as error:
        pack(rows, 0)
    assert "\n" not in str(error.value)


def test_one_token_a_row_is_where_the_axes_would_be_confused():
    """Why an empty row is refused: R = N, and yet rows and tokens are the same slice only if every row has one token."""
    b = write(pack([row(str(i), "g", float(i), 1) for i in range(3)], 0), {"credit": [5.0, 6, 7], "bonus": [1.0, 2, 3]})
    part = cut(b, [2, 0])
    assert part.columns["score"].tolist() == [2, 0]
    assert part.columns["credit"].tolist() == [7, 5]
    assert part.columns["bonus"].tolist() == [3, 1]


def test_cut_by_hand():
    b = write(pack([CHAT, HALF, GOLD], 0), {"credit": np.arange(10.0), "bonus": [7.0, 8, 9]})
    part = cut(b, [2, 1])
    assert [r.id for r in part.rows] == ["gold", "half"]
    assert part.ids_N.tolist() == [3, 4, 20, 21, 22]
    assert part.row_N.tolist() == [0, 0, 1, 1, 1]
    assert part.columns["credit"].tolist() == [8, 9, 5, 6, 7]
    assert part.columns["bonus"].tolist() == [9, 8]
    assert part.group_R.tolist() == ["h", "g"]
    assert part.masks["given"].tolist() == [True, True, False, False, True]
    assert part.streams["gold"].tolist() == [1, 1, 0, 0, 0]


def test_cutting_everything_is_the_batch_and_twice_is_once():
    b = pack([CHAT, HALF, GOLD], 0)
    assert cut(b, [0, 1, 2]) is b
    assert plain(cut(cut(b, [0, 2]), [1])) == plain(cut(b, [2]))
    assert plain(cut(cut(b, [2, 0, 1]), [1, 2, 0])) == plain(b)


def test_a_cut_row_is_the_row_packed_alone():
    b, alone = pack([CHAT, HALF, GOLD], 0), pack([HALF], 0)
    part = cut(b, [1])
    for name in ("ids_N", "row_N", "turn_N", "cut_N"):
        assert getattr(part, name).tolist() == getattr(alone, name).tolist()
    assert {k: v.tolist() for k, v in part.masks.items()} == {k: v.tolist() for k, v in alone.masks.items()}


def test_write_by_hand():
    b = pack([CHAT, HALF], 0)
    written = {"credit": np.ones(8), "score": [2, 3], "stream.policy": np.zeros(8), "stream.new": np.ones(8)}
    after = write(b, {**written, "reasons": {"half": "first"}})
    assert after.columns["score"].tolist() == [2, 3]
    assert (after.streams["policy"].sum(), after.streams["new"].sum()) == (0, 8)
    assert write(after, {"reasons": {"half": "second", "chat": "x"}}).reasons == {"half": "first", "chat": "x"}
    assert b.columns["score"].tolist() == [1, 0], "the old batch stays"
    assert "credit" not in b.columns


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ({"credit": np.ones(3)}, r"credit has shape \(3,\): its first axis must be 8 or 2"),
        ({"credit": 1.0}, r"credit has shape \(\)"),
        ({"stream.policy": np.ones(2)}, r"stream.policy has shape \(2,\): its first axis must be 8"),
        ({"stream.policy": -np.ones(8)}, "finite and not negative"),
        ({"stream.policy": np.full(8, np.nan)}, "finite and not negative"),
    ],
)
def test_write_refuses(written, match):
    with pytest.raises(ValueError, match=match):
        write(pack([CHAT, HALF], 0), written)


def test_views_are_built_once_on_the_whole_batch_and_travel_with_a_cut():
    calls = []

    def longest(rollout, batch):
        calls.append(rollout.id)
        return tuple((len(batch.rows), *t.context) for t in rollout.turns)

    needs = ["credit", Need("logp", (Source(view="longest"),)), Need("entropy", (Source(view="longest"), Source()))]
    b = with_views(pack([CHAT, HALF], 0), needs, {"longest": longest})
    assert with_views(b, needs, {"longest": longest}).contexts == b.contexts
    assert calls == ["chat", "half"]
    part = cut(b, [1])
    assert list(map(tuple, part.contexts["longest"])) == [((2, 1, 2),)]


def test_a_view_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="view v gave 3 contexts for the 2 turns of chat"):
        with_views(pack([CHAT], 0), [Need("logp", (Source(view="v"),))], {"v": lambda r, b: ((1,),) * 3})
