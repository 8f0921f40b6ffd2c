"""The fallback forward: ordinary right-padded batches, for models that cannot run packed.

Only the longest sequences run: one that is a prefix of another is read off it, and repeated ones run once. Hidden
states come back in the tree's own order, so callers do not know which path ran.

Axes: T tokens of the tree, B rows and L tokens of a padded batch, D width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from oneloop.engine.tree import Tree

PADDED_SHARE = 1.25  # a batch ends when padding would exceed a quarter of its real tokens


def leaves(tree: Tree) -> list[int]:
    """One sequence for each leaf of the tree, longest first."""
    last = tree.node_flat[tree.offset[1:] - 1]
    is_leaf = tree.end_T[last] == last + 1
    _, first = np.unique(last[is_leaf], return_index=True)
    chosen = np.flatnonzero(is_leaf)[first]
    length = tree.offset[chosen + 1] - tree.offset[chosen]
    return chosen[np.argsort(-length, kind="stable")].tolist()


def hidden_states(backbone: torch.nn.Module, tree: Tree) -> Tensor:
    """Last hidden state (after the final norm) of every token of the tree, [T, D], with gradient."""
    device = next(backbone.parameters()).device
    rows, node_of_row = [], []
    for batch in _batches(tree, leaves(tree)):
        length = torch.tensor([tree.length(s) for s in batch])
        position_BL = torch.arange(int(length[0])).expand(len(batch), -1)
        real_BL = position_BL < length[:, None]
        node = torch.cat([tree.path(s) for s in batch])
        ids_BL = torch.zeros(real_BL.shape, dtype=torch.long).masked_scatter_(real_BL, tree.ids_T[node])
        out = backbone(
            input_ids=ids_BL.to(device),
            attention_mask=real_BL.long().to(device),
            position_ids=position_BL.to(device),
            use_cache=False,
        )
        rows.append(out.last_hidden_state[real_BL.to(device)])
        node_of_row.append(node)
    node = torch.cat(node_of_row).numpy()
    _, row_T = np.unique(node, return_index=True)  # every token lies on some leaf's path; the first one is taken
    return embedding(torch.from_numpy(row_T).to(device), torch.cat(rows))


def _batches(tree: Tree, order: list[int]) -> list[list[int]]:
    """Split sequences, longest first, where padding would grow too large."""
    batches: list[list[int]] = []
    real = 0
    for s in order:
        n = tree.length(s)
        if batches and (len(batches[-1]) + 1) * tree.length(batches[-1][0]) <= PADDED_SHARE * (real + n):
            batches[-1].append(s)
            real += n
        else:
            batches.append([s])
            real = n
    return batches
