"""The contract of an Assign (credit and selection), as functions that any mechanism can be handed to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oneloop.batch import cut, pack, write
from oneloop.data import Batch, Need
from tests.build import filled, frozen, groups, row
from tests.contracts.common import plain, rng, through_disk

CONSTANT = ([1, 1, 1], [0, 0], [0.35] * 4)
VARIED = ([1, 0, 0.5], [0, 1], [3, -1, 2, 2], [1])


def batch_for(mechanism, *scores) -> Batch:
    """Groups with every column the mechanism needs, their scores held within the range it is made for."""
    low, high = mechanism.scores
    held = [[s if isinstance(s, str) else min(max(s, low), high) for s in group] for group in scores]
    return frozen(filled(groups(*held), mechanism.needs))


def ran(mechanism, batch, state=None):
    """What it writes on a batch, with the state of step 0 unless given."""
    return mechanism(batch, mechanism.init() if state is None else state, rng(1))


def check_shapes(mechanism, batch):
    """It writes what it declares, over N or R, and the batch takes it; its input stays as it was."""
    before = plain(batch)
    written, _ = ran(mechanism, batch)
    assert plain(batch) == before
    after = write(batch, written)
    ids = {r.id for r in batch.rows}
    columns = {k for k in written if k != "reasons" and not k.startswith("stream.")}
    assert columns <= set(mechanism.writes), f"it writes {columns} and declares {set(mechanism.writes)}"
    assert set(mechanism.writes) - {k for k in mechanism.writes if k.startswith("stream.")} <= columns
    assert set(written.get("reasons", {})) <= ids
    assert all(isinstance(v, str) and v for v in written.get("reasons", {}).values())
    if "score" in columns:
        assert np.shape(written["score"]) == (len(batch.rows),)
    for name in columns - {"score"}:
        assert np.shape(written[name])[0] in (len(batch.ids_N), len(batch.rows))
    for stream_N in after.streams.values():
        assert stream_N.shape == (len(batch.ids_N),)


def check_finite(mechanism, batch):
    """Credit is finite on every token that feeds the policy's stream."""
    written, _ = ran(mechanism, batch)
    after = write(batch, written)
    if "credit" in written:
        assert np.isfinite(after.columns["credit"][after.streams["policy"] > 0]).all()
    assert after.reasons == {**written.get("reasons", {}), **batch.reasons}, "the first reason stands"


def check_order(mechanism, batch):
    """The order of rows changes nothing but the order of what is written."""
    order = rng(5).permutation(len(batch.rows))
    token = np.concatenate([np.flatnonzero(batch.row_N == r) for r in order])
    written, _ = ran(mechanism, batch)
    moved, _ = ran(mechanism, frozen(cut(batch, list(order))))
    assert set(moved) == set(written)
    assert moved.get("reasons", {}) == written.get("reasons", {})
    for name in set(written) - {"reasons"}:
        value = np.asarray(written[name], float)
        expected = value[token] if len(value) == len(batch.ids_N) else value[order]
        np.testing.assert_allclose(np.asarray(moved[name], float), expected, rtol=1e-12, atol=1e-12)


def with_strangers(batch: Batch, needs) -> tuple[Batch, np.ndarray]:
    """The batch with failed rows and rows of another origin in the same groups; and which tokens were there before."""
    rows, out = list(batch.rows), []
    for i, r in enumerate(rows):
        out += [r]
        if i % 2 == 0:
            out += [row(f"failed.{i}", r.group, "the scorer broke", 2)]
            out += [row(f"oracle.{i}", r.group, 99.0, 3, origin="oracle")]
    packed = pack(out, batch.step)
    old_N = np.array([r in rows for r in out])[packed.row_N]
    old_R = np.array([r in rows for r in out])
    columns = dict(packed.columns)
    for key in needs:
        if key in packed.columns:
            continue
        whole = np.full(len(old_N) if len(batch.columns[key]) == len(batch.ids_N) else len(out), 5.0)
        whole[old_N if len(whole) == len(old_N) else old_R] = batch.columns[key]
        columns[key] = whole
    return frozen(replace(packed, columns=columns)), old_N


def check_strangers(mechanism, batch):
    """Error rows and rows of other origins move nobody's credit, stream or reason; failed rows get no credit that counts."""
    more, old_N = with_strangers(batch, [n for n in mechanism.needs if not (isinstance(n, Need) and n.is_live)])
    old_R = np.array([not r.id.startswith(("failed", "oracle")) for r in more.rows])
    written, grown = ran(mechanism, batch)[0], ran(mechanism, more)[0]
    for name in set(written) - {"reasons"}:
        new = np.asarray(grown[name], float)
        np.testing.assert_array_equal(new[old_N if len(new) == len(old_N) else old_R], np.asarray(written[name], float))
    strange = set(grown.get("reasons", {})) - set(written.get("reasons", {}))
    assert {k: v for k, v in grown.get("reasons", {}).items() if k not in strange} == written.get("reasons", {})
    failed_N = np.isin(more.row_N, np.flatnonzero([r.id.startswith("failed") for r in more.rows]))
    after = write(more, grown)
    assert not after.streams["policy"][failed_N].any()
    assert {k: v for k, v in after.reasons.items() if k.startswith("failed")} == {
        r.id: "the scorer broke" for r in more.rows if r.id.startswith("failed")
    }


def check_state(mechanism, batch):
    """A state that went through the disk goes on exactly as the one that stayed."""
    _, state = ran(mechanism, batch)
    state = mechanism.observe(batch, {}, state)
    kept = plain(state)
    back = through_disk(state)
    assert plain(back) == kept
    a, b = ran(mechanism, batch, state), ran(mechanism, batch, back)
    assert plain(a) == plain(b)
    assert plain(state) == kept, "a state that is handed in is not changed in place"
