"""Sequences that share prefixes, packed as one radix tree: each distinct prefix token is computed once.

Tokens lie in depth-first order, which gives two facts that everything else rests on: the descendants of token `k` are
the range `[k, end_T[k])`, so `k` is an ancestor of `q` exactly when `k <= q < end_T[k]`; and the ancestors of a
contiguous range `[a, b)` that lie before it are ancestors of `a`.

Axes: T tokens of the tree (one for every distinct prefix), S segments, N pairs asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Ints: TypeAlias = np.ndarray

MAX_ID = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Tree:
    """A radix tree over token ids, packed depth first.

    Equal prefixes share their tokens, whoever they belong to: chat turns that extend one another, responses to one
    prompt, identical sequences. Disjoint sequences are separate roots of the same packing.
    """

    ids_T: Tensor  # token ids
    position_T: Tensor  # depth: the rotary position, 0 at a root
    parent_T: Ints  # index of the token before, -1 at a root
    end_T: Ints  # one past the last descendant
    segment_S3: Ints  # (start, stop, parent segment or -1): the longest runs without a branch
    node_flat: Ints  # every sequence's path of T indices, one after the other
    offset: Ints  # [sequences + 1] where each path starts in `node_flat`

    @staticmethod
    def of(sequences: Sequence[Sequence[int]]) -> Tree:
        """Build the tree of `sequences` (token ids, any number, any order, repeated or nested).

        Raises ValueError for no sequences, an empty sequence, or an id outside [0, 2**31).
        """
        length = np.fromiter((len(s) for s in sequences), dtype=np.int64, count=len(sequences))
        if len(length) == 0 or length.min() == 0:
            raise ValueError("a tree needs at least one sequence and one token in each: drop the empty ones")
        flat = np.fromiter(itertools.chain.from_iterable(sequences), dtype=np.int64, count=int(length.sum()))
        if flat.min() < 0 or flat.max() > MAX_ID:
            raise ValueError(f"token ids must lie in [0, {MAX_ID}]; found {flat.min()} to {flat.max()}")
        offset = np.concatenate([[0], np.cumsum(length)])
        order, shared = _sorted_with_shared_prefix(flat, offset)
        fresh = length[order] - shared  # tokens that no earlier sequence of the sorted order holds
        base = np.concatenate([[0], np.cumsum(fresh)])
        node_flat = np.empty_like(flat)
        previous = node_flat[:0]
        for i, s in enumerate(order):
            path = node_flat[offset[s] : offset[s + 1]]
            path[: shared[i]] = previous[: shared[i]]
            path[shared[i] :] = np.arange(base[i], base[i + 1])
            previous = path
        num_tokens = int(base[-1])
        ids, position, parent = (np.empty(num_tokens, dtype=np.int64) for _ in range(3))
        ids[node_flat] = flat
        position[node_flat] = np.arange(len(flat)) - np.repeat(offset[:-1], length)
        before = np.concatenate([[-1], node_flat[:-1]])
        before[offset[:-1]] = -1
        parent[node_flat] = before
        segment, end = _segments(parent)
        return Tree(_long(ids), _long(position), parent, end, segment, node_flat, offset)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model: the number of distinct prefixes."""
        return len(self.parent_T)

    @property
    def num_sequences(self) -> int:
        """Sequences it was built from, repeated ones counted each time."""
        return len(self.offset) - 1

    @property
    def num_repeated_tokens(self) -> int:
        """Tokens that would go through the model without sharing, padding not counted."""
        return len(self.node_flat)

    def length(self, sequence: int) -> int:
        """Tokens of one sequence."""
        return int(self.offset[sequence + 1] - self.offset[sequence])

    def path(self, sequence: int) -> Tensor:
        """T index of each token of one sequence, [length]."""
        return _long(self.node_flat[self.offset[sequence] : self.offset[sequence + 1]])

    def node_of(self, sequence_N: Sequence[int] | Tensor | Ints, position_N: Sequence[int] | Tensor | Ints) -> Tensor:
        """T index of token `position_N` of sequence `sequence_N`, [N].

        Raises IndexError where a sequence has no such position (negative ones included).
        """
        s, p = np.asarray(sequence_N, dtype=np.int64), np.asarray(position_N, dtype=np.int64)
        if s.size and (s.min() < 0 or s.max() >= self.num_sequences):
            raise IndexError(f"sequence outside [0, {self.num_sequences}): it was not given to Tree.of")
        start = self.offset[s]
        if np.any(p < 0) or np.any(start + p >= self.offset[s + 1]):
            raise IndexError("position outside its sequence: positions count from 0 at the first token of the prompt")
        return _long(self.node_flat[start + p])


def _long(array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _sorted_with_shared_prefix(flat: Ints, offset: Ints) -> tuple[Ints, Ints]:
    """Sequences in lexicographic order, and how many tokens each shares with the one before it."""
    # Big-endian bytes compare as the ids do, and a prefix sorts before what extends it: one memcmp a comparison.
    raw = flat.astype(">u4").tobytes()
    keys = [raw[4 * a : 4 * b] for a, b in itertools.pairwise(offset.tolist())]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    shared = np.zeros(len(order), dtype=np.int64)
    for i in range(1, len(order)):
        a, b = order[i - 1], order[i]
        n = min(offset[a + 1] - offset[a], offset[b + 1] - offset[b])
        differs = flat[offset[a] : offset[a] + n] != flat[offset[b] : offset[b] + n]
        first = int(differs.argmax()) if n else 0
        shared[i] = first if differs[first] else n
    return order, shared


def _segments(parent: Ints) -> tuple[Ints, Ints]:
    """Longest runs without a branch (start, stop, parent segment), and one past each token's last descendant."""
    index = np.arange(len(parent))
    children = np.bincount(parent[parent >= 0], minlength=len(parent))
    is_start = parent != index - 1
    is_start[0] = True
    is_start[1:] |= children[:-1] > 1
    start = np.flatnonzero(is_start)
    stop = np.append(start[1:], len(parent))
    segment_of = np.cumsum(is_start) - 1
    above = np.where(parent[start] >= 0, segment_of[parent[start]], -1)
    end = stop.copy()
    for s in range(len(start) - 1, -1, -1):  # children come after their parent
        if above[s] >= 0:
            end[above[s]] = max(end[above[s]], end[s])
    return np.stack([start, stop, above], axis=1), end[segment_of]
