"""Shared pure mathematics, for numpy and torch alike; importing it imports neither torch nor a mechanism."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from array_api_compat import array_namespace

from oneloop.data import Array, Batch


def weight(batch: Batch, name: str) -> Array:
    """The stream or mask called `name` as weights (N); "" is every token; an unknown name is a stream nobody feeds."""
    if name in batch.streams:
        return batch.streams[name]
    if name in batch.masks:
        return 1.0 * batch.masks[name]
    return np.full(len(batch.row_N), 1.0 * (name == ""))


def rows_sum(batch: Batch, x_N: Array) -> Array:
    """Sum over each row's tokens (N -> R); NaN counts as 0."""
    if isinstance(x_N, np.ndarray):
        return np.bincount(np.asarray(batch.row_N), np.nan_to_num(x_N), len(batch.rows))
    out_R = x_N.new_zeros(len(batch.rows))
    return out_R.index_add(0, batch.row_N, x_N.nan_to_num(0.0))


def peers(batch: Batch, origin: str = "policy") -> Iterator[Array]:
    """Rows that share a baseline: same group, same origin, a score that is a value. Yields their indices, group by group."""
    score_R = batch.columns["score"]
    ok_R = np.array([r.origin == origin for r in batch.rows], bool) & ~np.isnan(score_R)
    names, code_R = np.unique(batch.group_R, return_inverse=True)
    for g in range(len(names)):
        index = np.flatnonzero(ok_R & (code_R == g))
        if len(index):
            yield index


def log_softmax(logits_CV: Array) -> Array:
    """Log-probabilities in nats, CV."""
    xp = array_namespace(logits_CV)
    if hasattr(logits_CV, "log_softmax"):
        return logits_CV.log_softmax(-1)
    shifted = logits_CV - xp.max(logits_CV, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def logp(logits_CV: Array, ids_C: Array) -> Array:
    """Log-probability of the tokens ids_C (nats, C)."""
    xp = array_namespace(logits_CV)
    if hasattr(logits_CV, "logsumexp"):
        return logits_CV.gather(-1, ids_C[:, None])[:, 0] - logits_CV.logsumexp(-1)
    return xp.take_along_axis(log_softmax(logits_CV), ids_C[:, None], axis=-1)[:, 0]


def entropy(logits_CV: Array) -> Array:
    """Entropy of softmax(logits) (nats, C)."""
    xp = array_namespace(logits_CV)
    lp_CV = log_softmax(logits_CV)
    return -xp.sum(xp.exp(lp_CV) * lp_CV, axis=-1)


def one_line(error: BaseException) -> str:
    """An exception as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def mean_metric(x_N: Array, on_N: Array) -> tuple[float, float]:
    """(sum, count) of x over the tokens where `on`."""
    chosen = x_N.detach()[on_N] if hasattr(x_N, "detach") else x_N[on_N]
    return float(chosen.sum()), float(on_N.sum())
