"""Rows into a Batch and out of it: packing, cutting, and what an Assign wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oneloop.data import Array, Batch, Map, Need, Rollout, Turn

RECORDED = ("logp", "raw_logp", "entropy")  # the sampler's scalar columns; always there, NaN where it recorded nothing


def _turn_columns(turn: Turn) -> dict[str, Array]:
    """The columns of one turn's packed tokens: its last `observed` context tokens, then its response."""
    o, n = turn.observed, len(turn.response)
    if not 0 <= o <= len(turn.context):
        raise ValueError(f"a turn observed {o} of {len(turn.context)} context tokens")
    if not turn.context:
        raise ValueError("a turn has an empty context: its first token has nothing to be predicted from")
    ids = np.array(turn.context[len(turn.context) - o :] + turn.response, np.int64)
    version, temperature = np.full(o + n, -1, np.int64), np.ones(o + n)
    for s in turn.spans:
        if not 0 <= s.start <= s.stop <= n:
            raise ValueError(f"span [{s.start}, {s.stop}) of a response of {n} tokens")
        version[o + s.start : o + s.stop], temperature[o + s.start : o + s.stop] = s.version, s.temperature
    out = {
        "ids": ids,
        "cut": np.arange(len(turn.context) - o, len(turn.context) + n),
        "version": version,
        "temperature": temperature,
    }
    for name in RECORDED:
        column = np.full(o + n, np.nan)
        if name in turn.recorded:
            if len(turn.recorded[name]) != n:
                raise ValueError(f"a turn recorded {len(turn.recorded[name])} {name} for {n} response tokens")
            column[o:] = turn.recorded[name]
        out[f"sampled.{name}"] = np.where(version >= 0, column, np.nan)
    return out


def pack(rows: Sequence[Rollout], step: int) -> Batch:
    """The rows of a step as one flat Batch. A row whose score is an error feeds no stream; its reason is the error.

    Raises ValueError on a row without tokens: where every row has one, a column over R cannot be taken for one over N.
    """
    parts, row, turn, position = [], [], [], []
    for r, rollout in enumerate(rows):
        for k, t in enumerate(rollout.turns):
            parts.append(_turn_columns(t))
            n = len(parts[-1]["ids"])
            row.append(np.full(n, r))
            turn.append(np.full(n, k))
            position.append(np.arange(-t.observed, n - t.observed))
        if not any(len(t.response) + t.observed for t in rollout.turns):
            raise ValueError(f"row {rollout.id} has no tokens: count it as an error or leave it out")
    if not parts:
        raise ValueError("a batch needs at least one row with a turn")
    row_N, turn_N, position_N = (np.concatenate(x) for x in (row, turn, position))
    c = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    failed = np.array([bool(r.score and r.score.error) for r in rows])
    value = [r.score.value if r.score and not r.score.error and r.score.value is not None else np.nan for r in rows]
    origin_R = np.array([r.origin for r in rows])
    origin_N, good_N = origin_R[row_N], ~failed[row_N]
    response, sampled, ours = (position_N >= 0) & good_N, (c["version"] >= 0) & good_N, (origin_N == "policy") & good_N
    masks = {  # a term may read a mask as its stream: failed rows are in none
        "response": response,
        "sampled": sampled,
        "given": response & ~sampled,
        "observation": (position_N < 0) & ours,
        "turn_start": (position_N == 0) & ours,
    }
    streams = {
        str(o): 1.0 * ((origin_N == o) & response & (sampled | (o != "policy"))) for o in sorted({"policy", *origin_R.tolist()})
    }
    columns: dict[Need | str, Array] = {k: v for k, v in c.items() if k not in ("ids", "cut")}
    columns["score"] = np.array(value, float)
    for name in sorted({k for r in rows for k in r.kept}):
        columns[f"kept.{name}"] = _kept(rows, name, position_N >= 0, row_N)
    return Batch(
        rows=tuple(rows),
        step=step,
        ids_N=c["ids"],
        row_N=row_N,
        turn_N=turn_N,
        cut_N=c["cut"],
        group_R=np.array([r.group for r in rows]),
        masks=masks,
        columns=columns,
        streams=streams,
        reasons={r.id: r.score.error for r in rows if r.score and r.score.error},
    )


def _kept(rows: Sequence[Rollout], name: str, response_N: Array, row_N: Array) -> Array:
    """A column that a memory stored with its rows: one number a row, or one per response token."""
    out_N = np.full(len(row_N), np.nan)
    for r, rollout in enumerate(rows):
        if name in rollout.kept:
            out_N[(row_N == r) & response_N] = rollout.kept[name]
    return out_N


def cut(batch: Batch, rows: Sequence[int]) -> Batch:
    """The part of a batch that holds these rows, every column sliced by its axis; row order as given."""
    R, N = len(batch.rows), len(batch.ids_N)
    if len(rows) == R and list(rows) == list(range(R)):
        return batch
    token = np.concatenate([np.flatnonzero(batch.row_N == r) for r in rows]).astype(np.int64)
    row = np.asarray(rows, np.int64)
    back = np.full(R, -1)
    back[row] = np.arange(len(row))

    def sliced(columns: Mapping[Any, Array]) -> dict[Any, Array]:
        # An R-column and an N-column cannot be told apart when R = N. Since no row is empty (pack), every row then has
        # one token, and both are the same slice.
        return {k: v[token] if len(v) == N else v[row] for k, v in columns.items()}

    return replace(
        batch,
        rows=tuple(batch.rows[r] for r in rows),
        ids_N=batch.ids_N[token],
        row_N=back[batch.row_N[token]],
        turn_N=batch.turn_N[token],
        cut_N=batch.cut_N[token],
        group_R=batch.group_R[row],
        masks=sliced(batch.masks),
        columns=sliced(batch.columns),
        streams=sliced(batch.streams),
        contexts={view: [per_row[r] for r in rows] for view, per_row in batch.contexts.items()},
    )


def write(batch: Batch, written: Map) -> Batch:
    """The batch after an Assign: its columns, streams ("stream.<name>") and reasons. Raises on a shape that fits no axis."""
    columns, streams, reasons = dict(batch.columns), dict(batch.streams), dict(batch.reasons)
    for name, value in written.items():
        if name == "reasons":
            reasons |= {k: v for k, v in value.items() if k not in reasons}
            continue
        value = np.asarray(value, float)
        sizes = (len(batch.ids_N),) if name.startswith("stream.") else (len(batch.ids_N), len(batch.rows))
        if value.shape[:1] not in {(s,) for s in sizes}:
            raise ValueError(f"{name} has shape {value.shape}: its first axis must be {' or '.join(map(str, sizes))}")
        if name.startswith("stream."):
            if not np.isfinite(value).all() or (value < 0).any():
                raise ValueError(f"{name} must be finite and not negative: a stream is a weight; use the credit for signs")
            streams[name.removeprefix("stream.")] = value
        else:
            columns[name] = value
    return replace(batch, columns=columns, streams=streams, reasons=reasons)


def with_views(batch: Batch, needs: Sequence[Need | str], views: Mapping[str, Callable[..., Any]]) -> Batch:
    """The batch with the contexts of every view that `needs` reads: built on the whole batch, since a view may read other rows."""
    asked = {s.view for n in needs if isinstance(n, Need) for s in n.of} - {"own", *batch.contexts}
    new = {view: [tuple(views[view](row, batch)) for row in batch.rows] for view in sorted(asked)}
    for view, per_row in new.items():
        for row, contexts in zip(batch.rows, per_row, strict=True):
            if len(contexts) != len(row.turns):
                raise ValueError(f"view {view} gave {len(contexts)} contexts for the {len(row.turns)} turns of {row.id}")
    return replace(batch, contexts={**batch.contexts, **new})
