"""Batches by hand: rows of any origin, length and score, and their numpy and torch forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from oneloop.batch import pack, write
from oneloop.data import Batch, Need, Noise, Prompt, Rollout, Score, Span, Turn


def turn(logp: Sequence[float], *, context: Sequence[int] = (1, 2), first: int = 3, sampled: int | None = None, **more) -> Turn:
    """A turn with one token per log-prob: first, first + 1, ...; only the first `sampled` of them in a span."""
    n = len(logp)
    stop = n if sampled is None else sampled
    known = np.where(np.arange(n) < stop, np.array(logp, float), np.nan)
    recorded = {"logp": known, "raw_logp": known, "entropy": -known}
    spans = (Span(0, stop),) if stop else ()
    return Turn(tuple(context), tuple(range(first, first + n)), spans, recorded, **more)


def row(
    name: str,
    group: str,
    score: float | str | None = 0.0,
    tokens: int = 2,
    *,
    origin: str = "policy",
    noise: Noise | None = None,
    turns: Sequence[Turn] = (),
) -> Rollout:
    """A rollout of one turn with log-probs -0.5; a score that is text is an error."""
    verdict = Score(error=score) if isinstance(score, str) else None if score is None else Score(score)
    sampled = tokens if origin == "policy" else 0
    made = tuple(turns) or (turn([-0.5] * tokens, sampled=sampled),)
    return Rollout(name, Prompt(group, (1, 2), "task"), made, group, origin, score=verdict, noise=noise)


def groups(*scores: Sequence[float | str], tokens: Sequence[int] = (2, 1, 3), credit: Sequence[float] | None = None) -> Batch:
    """One group for each list of scores, rows of unequal lengths; credit (N) where given."""
    rows = [
        row(f"{g}.{i}", f"g{g}", s, tokens[(g + i) % len(tokens)])
        for g, group in enumerate(scores)
        for i, s in enumerate(group)
    ]
    batch = pack(rows, 0)
    return batch if credit is None else write(batch, {"credit": np.array(credit, float)})


def per_row(batch: Batch, x_N: np.ndarray) -> list[float]:
    """A column that is the same on every token of a row, as one number a row."""
    x_N = np.asarray(x_N)
    out = [x_N[batch.row_N == r] for r in range(len(batch.rows))]
    for x in out:
        np.testing.assert_array_equal(x, x[0])
    return [float(x[0]) for x in out]


def credit(mechanism, *scores: Sequence[float | str]) -> list[float]:
    """What a credit mechanism gives each row of these groups."""
    batch = groups(*scores)
    written, _ = mechanism(batch, mechanism.init(), np.random.default_rng(0))
    return per_row(batch, written["credit"])


def as_torch(batch: Batch) -> Batch:
    """The batch with fp64 torch arrays, as losses meet it in the engine."""

    def floats(columns):
        return {k: torch.tensor(np.asarray(v, float)) for k, v in columns.items()}

    return replace(
        batch,
        **{k: torch.tensor(getattr(batch, k)) for k in ("ids_N", "row_N", "turn_N", "cut_N")},
        masks={k: torch.tensor(v) for k, v in batch.masks.items()},
        columns=floats(batch.columns),
        streams=floats(batch.streams),
    )


def frozen(batch: Batch) -> Batch:
    """The same batch, its arrays read-only: a mechanism that writes into its input raises."""

    def lock(x):
        x = np.array(x)
        x.flags.writeable = False
        return x

    return replace(
        batch,
        **{k: lock(getattr(batch, k)) for k in ("ids_N", "row_N", "turn_N", "cut_N", "group_R")},
        **{k: {n: lock(v) for n, v in getattr(batch, k).items()} for k in ("masks", "columns", "streams")},
    )


def number_of(need: Need | str) -> int:
    """A number that belongs to a need, the same in every process."""
    return sum(map(ord, str(need) if isinstance(need, str) else f"{need.of}{type(need.what)}{need.also}")) % 2**20


def filled(batch: Batch, needs, axis_R: frozenset[str] = frozenset({"score"})) -> Batch:
    """The batch with a random finite column for every start need and named column that it lacks (N, or R for `axis_R`)."""
    columns = dict(batch.columns)
    for need in needs:
        if need in columns or (isinstance(need, Need) and need.is_live):
            continue
        n = len(batch.rows) if need in axis_R else len(batch.ids_N)
        columns[need] = -np.abs(np.random.default_rng(number_of(need)).normal(size=n)) - 0.1
    return replace(batch, columns=columns)
