"""Exact attention over a packed tree, through transformers' attention interface.

A tree is cut into blocks: contiguous ranges of its depth-first order. A block's keys are the ancestors of its first
token and its own tokens, so nothing of size T x T ever exists; a long root (a prompt, a lone sequence) is one causal
call. Blocks of like shape are padded into one group, and a group is one call of scaled_dot_product_attention. The plan
is made once a tree and sliding window, and every layer uses it.

`oneloop_tree` without a plan is transformers' own attention (sdpa, or an exact explicit path under a softcap), so a
model that was switched to it still generates and still takes padded batches.

Axes: T tokens of the tree, B blocks of a group, Q queries and K keys of a block, H heads, G query heads per key head,
D width.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from oneloop.engine.tree import Ints, Tree

NAME = "oneloop_tree"
PLAN = "oneloop_plan"  # the keyword under which a plan travels through the model's layers

MAX_QUERIES = 512  # of a block
CUT_EVERY = 256  # tokens, inside a long segment
QUERY_OVERHEAD = 64  # a block costs as if it had this many more queries: measured with sdpa on CPU, 32 to 512 queries
CHAIN_TOKENS = 128  # a root at least this long is one causal call without a mask
PADDING_WASTE = 0.2  # of a group's entries; small groups may waste MIN_ENTRIES whatever the share
MIN_ENTRIES = 32_768
MASK_CACHE_BYTES = 512 * 2**20  # of a plan; what does not fit is built again at each call (about a tenth of the call)

# Passed around by transformers' models; none of them changes what these layers compute.
HARMLESS = frozenset(
    name
    for names in (
        "position_ids position_embeddings cache_position cu_seq_lens_q cu_seq_lens_k cu_seqlens seq_idx max_length_q",
        "max_length_k num_items_in_batch use_cache cache past_key_values past_key_value layer_past return_dict",
        "output_attentions output_hidden_states output_router_logits",
    )
    for name in names.split()
)

_packing: contextvars.ContextVar[Plan | None] = contextvars.ContextVar("oneloop_packing", default=None)


@dataclass(frozen=True)
class Cost:
    """What a tree costs, in numbers that do not depend on the machine."""

    tokens: int  # through the model
    repeated_tokens: int  # through the model without sharing
    entries: int  # attention scores computed, per head and layer, padding included
    needed: int  # attention scores that the masks let through


@dataclass(eq=False)
class Group:
    """Blocks of like shape, one attention call. Padded queries and keys point at token 0 and are masked."""

    query_BQ: Tensor
    key_BK: Tensor
    num_query_B: Tensor
    num_key_B: Tensor
    causal: bool  # queries are the keys, in order, from a root: no mask

    @property
    def entries(self) -> int:
        """Attention scores computed per head."""
        b, q = self.query_BQ.shape
        return b * q * (q + 1) // 2 if self.causal else b * q * self.key_BK.shape[1]

    def allowed(self, end_T: Tensor, position_T: Tensor, window: int | None) -> Tensor:
        """Boolean mask [B, Q, K]: key is an ancestor of the query (or itself), and inside the window."""
        q, k = self.query_BQ[:, :, None], self.key_BK[:, None, :]
        allowed = (k <= q) & (q < end_T[k])
        if window is not None:
            allowed &= position_T[q] - position_T[k] < window
        allowed &= torch.arange(k.shape[2], device=k.device) < self.num_key_B[:, None, None]
        # A padded query needs one key, or its softmax is 0/0 and the NaN reaches the gradients.
        padded = torch.arange(q.shape[1], device=q.device) >= self.num_query_B[:, None]
        allowed[:, :, 0] |= padded
        return allowed


@dataclass(eq=False)
class Layout:
    """The groups for one window, and where each token's output lies in their concatenation."""

    groups: list[Group]
    output_T: Tensor
    keys: Tensor  # every group's key_BK, flattened one after the other
    queries: Tensor


@dataclass(eq=False)
class Plan:
    """How one tree's attention is computed on one device. Layouts and masks are made on first use and kept."""

    tree: Tree
    device: torch.device
    mask_windows: set[int] = field(default_factory=set)  # windows for which the model asked a mask ...
    layer_windows: set[int] = field(default_factory=set)  # ... and those its layers passed on
    _layouts: dict[int | None, Layout] = field(default_factory=dict)
    _masks: dict[tuple[int, torch.dtype, int], Tensor] = field(default_factory=dict)
    _mask_bytes: int = 0

    @property
    def used(self) -> bool:
        """A layer has computed with it."""
        return bool(self._layouts)

    def __post_init__(self) -> None:
        self.end_T = torch.from_numpy(self.tree.end_T).to(self.device)
        self.position_T = self.tree.position_T.to(self.device)
        self._depth = int(self.tree.position_T.max()) + 1

    def _effective(self, window: int | None) -> int | None:
        return None if window is None or window >= self._depth else window

    def layout(self, window: int | None) -> Layout:
        """The layout for a sliding window in tokens (None: all ancestors)."""
        window = self._effective(window)
        if window not in self._layouts:
            self._layouts[window] = _layout(self.tree, window, self.device)
        return self._layouts[window]

    def mask(self, group: Group, window: int | None, dtype: torch.dtype, repeat: int) -> Tensor:
        """Additive mask [B or 1, 1, repeat * Q, K]: 0 or -inf."""
        key = (id(group), dtype, repeat)  # a group belongs to one layout, so to one window
        if key in self._masks:
            return self._masks[key]
        allowed = group.allowed(self.end_T, self.position_T, self._effective(window))
        if len(allowed) > 1 and bool((allowed == allowed[:1]).all()):
            allowed = allowed[:1]
        mask = torch.zeros(allowed.shape, dtype=dtype, device=self.device).masked_fill_(~allowed, -math.inf)
        mask = mask[:, None].repeat(1, 1, repeat, 1)
        if self._mask_bytes + mask.nbytes <= MASK_CACHE_BYTES:
            self._mask_bytes += mask.nbytes
            self._masks[key] = mask
        return mask

    def cost(self, window: int | None = None) -> Cost:
        """Tokens and attention entries, computed and needed."""
        entries = sum(group.entries for group in self.layout(window).groups)
        seen = self.tree.position_T + 1
        needed = int((seen if window is None else seen.clamp(max=window)).sum())
        return Cost(self.tree.num_tokens, self.tree.num_repeated_tokens, entries, needed)


# ------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class _Block:
    start: int
    stop: int
    path: Ints  # ancestors of `start`, in order
    causal: bool

    @property
    def num_queries(self) -> int:
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        return len(self.path) + self.stop - self.start


def _layout(tree: Tree, window: int | None, device: torch.device) -> Layout:
    groups, output = [], np.empty(tree.num_tokens, dtype=np.int64)
    row = 0
    for blocks in _grouped(_blocks(tree, window)):
        num_q, num_k = max(b.num_queries for b in blocks), max(b.num_keys for b in blocks)
        if not blocks[0].causal:
            num_k = -(-num_k // 8) * 8  # GPU kernels want aligned masks
        query, key = np.zeros((len(blocks), num_q), dtype=np.int64), np.zeros((len(blocks), num_k), dtype=np.int64)
        for i, block in enumerate(blocks):
            own = np.arange(block.start, block.stop)
            query[i, : len(own)] = own
            key[i, : block.num_keys] = np.concatenate([block.path, own])
            output[own] = row + np.arange(len(own))
            row += num_q
        counts = [[b.num_queries for b in blocks], [b.num_keys for b in blocks]]
        tensors = (torch.from_numpy(a).to(device) for a in (query, key, *map(np.array, counts)))
        groups.append(Group(*tensors, causal=blocks[0].causal))
    keys, queries = (torch.cat(t) for t in ([g.key_BK.flatten() for g in groups], [g.query_BQ.flatten() for g in groups]))
    return Layout(groups, torch.from_numpy(output).to(device), keys, queries)


def _blocks(tree: Tree, window: int | None) -> list[_Block]:
    """Cut the depth-first order into blocks: long roots whole, the rest where it wastes least."""
    position = tree.position_T.numpy()
    start, stop, above = tree.segment_S3.T
    size = stop - start
    alone = size == tree.end_T[start] - start  # nothing branches off: a sequence nobody shares
    chain = (above < 0) & ((size >= CHAIN_TOKENS) | alone)
    if window is not None:
        chain &= size <= window
    none = np.empty(0, dtype=np.int64)
    blocks = [_Block(int(a), int(b), none, causal=True) for a, b in zip(start[chain], stop[chain], strict=True)]
    edges = [0, *np.stack([start[chain], stop[chain]], axis=1).flatten().tolist(), tree.num_tokens]
    for low, high in zip(edges[::2], edges[1::2], strict=True):  # the gaps between chains
        cuts = _cuts(tree, position, low, high, window) if low < high else [low]
        for a, b in itertools.pairwise(cuts):
            path = _ancestors(tree, a)
            if window is not None:
                path = path[max(0, int(position[a:b].min()) - window + 1) :]
            blocks.append(_Block(a, b, path, causal=False))
    return blocks


def _ancestors(tree: Tree, token: int) -> Ints:
    """Tokens before `token` on its path, root first."""
    start, stop, above = tree.segment_S3.T
    s = int(np.searchsorted(start, token, side="right")) - 1
    pieces = [np.arange(start[s], token)]
    while above[s] >= 0:
        s = above[s]
        pieces.append(np.arange(start[s], stop[s]))
    return np.concatenate(pieces[::-1])


def _cuts(tree: Tree, position: Ints, low: int, high: int, window: int | None) -> list[int]:
    """Cut points of [low, high), both ends included, of least total cost (dynamic programme over segment starts)."""
    start = tree.segment_S3[:, 0]
    start = np.concatenate([start[(start >= low) & (start < high)], [high]])
    points = np.concatenate([np.arange(a, b, CUT_EVERY) for a, b in itertools.pairwise(start)] + [[high]])
    above = position[points[:-1]]
    if window is not None:
        above = np.minimum(above, window - 1)
    best, came_from = np.zeros(len(points)), np.zeros(len(points), dtype=np.int64)
    first = np.searchsorted(points, points - MAX_QUERIES)
    for j in range(1, len(points)):
        i = np.arange(first[j], j)
        queries = points[j] - points[i]
        total = best[i] + (queries + QUERY_OVERHEAD) * (above[i] + queries)
        pick = int(total.argmin())
        best[j], came_from[j] = total[pick], i[pick]
    cuts, j = [int(points[-1])], len(points) - 1
    while j > 0:
        j = int(came_from[j])
        cuts.append(int(points[j]))
    return cuts[::-1]


def _grouped(blocks: list[_Block]) -> list[list[_Block]]:
    """Blocks whose padding to a common shape wastes little, largest first."""
    groups: list[list[_Block]] = []
    bounds: list[tuple[int, int, bool]] = []
    for block in sorted(blocks, key=lambda b: (b.num_queries * b.num_keys, b.num_keys), reverse=True):
        area = block.num_queries * block.num_keys
        waste = [
            (q * k - area, g)
            for g, (q, k, causal) in enumerate(bounds)
            if causal == block.causal and q >= block.num_queries and k >= block.num_keys
        ]
        extra, g = min(waste, default=(math.inf, -1))
        if extra <= max(MIN_ENTRIES, area * PADDING_WASTE):
            groups[g].append(block)
        else:
            groups.append([block])
            bounds.append((block.num_queries, block.num_keys, block.causal))
    return groups


# ------------------------------------------------------------------ the call


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query [1, H, T, D], key and value [1, H / G, T, D] to [1, T, H, D].

    Raises ValueError for every option that it does not implement and that would change the result.
    """
    plan = options.pop(PLAN, None)
    scaling = options.pop("scaling", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, softcap, dropout = (options.pop(name, None) for name in ("sliding_window", "softcap", "dropout"))
    _refuse_unknown(options)
    if plan is None:
        if _packing.get() is not None:
            raise ValueError(f"{type(module).__name__} does not receive the keyword {PLAN}: it cannot run packed")
        return _plain(module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, dropout=dropout or 0.0)
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} adds a mask of its own, which a packed tree cannot honour")
    if dropout:
        raise ValueError(
            f"attention dropout {dropout} is not supported in training: sampler and trainer would disagree; "
            "set the model's attention_dropout to 0"
        )
    if window is not None:
        plan.layer_windows.add(window)
    return _packed(plan, query[0], key[0], value[0], window=window, softcap=softcap, scaling=scaling), None


def _refuse_unknown(options: dict[str, Any]) -> None:
    if options.pop("is_causal", None) is False:
        raise ValueError("bidirectional attention (is_causal=False) is not supported: use a causal language model")
    unknown = sorted(name for name, value in options.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise ValueError(
            f"attention option {', '.join(unknown)} is not implemented by {NAME}: load the model with "
            'attn_implementation="eager" and train it on the padded path'
        )


def _packed(
    plan: Plan, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, softcap: float | None, scaling: float
) -> Tensor:
    layout = plan.layout(window)
    num_heads, num_tokens, width = query.shape
    shared = len(key)
    # `split`, not slices: its backward is one concatenation, a slice's is a zeroed tensor of full size for each group.
    q_parts = _rows(query, layout.queries).split([g.query_BQ.numel() for g in layout.groups])
    k_parts, v_parts = (_rows(x, layout.keys).split([g.key_BK.numel() for g in layout.groups]) for x in (key, value))
    outputs = []
    for group, q_rows, k_rows, v_rows in zip(layout.groups, q_parts, k_parts, v_parts, strict=True):
        (b, num_q), num_k = group.query_BQ.shape, group.key_BK.shape[1]
        q = q_rows.view(b, num_q, num_heads, width).transpose(1, 2)
        k, v = (rows.view(b, num_k, shared, -1).transpose(1, 2) for rows in (k_rows, v_rows))
        if group.causal and softcap is None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared != num_heads)
        else:
            # The query heads of one key head become further queries of it: no key or value is repeated, and the longer
            # query side runs faster than grouped heads do (28 against 36 ms on CPU, forward and backward).
            folded = q.reshape(b, shared, (num_heads // shared) * num_q, width)
            mask = plan.mask(group, window, q.dtype, num_heads // shared)
            out = _explicit(folded, k, v, mask, scaling, softcap) if softcap else _sdpa(folded, k, v, mask, scaling)
            out = out.reshape(b, num_heads, num_q, -1)
        outputs.append(out.transpose(1, 2).reshape(b * num_q, -1))
    return embedding(layout.output_T, torch.cat(outputs)).view(1, num_tokens, num_heads, -1)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of x [H, T, D] as [len(index), H * D].

    A prompt's keys are read by every block below it, so their gradient is a long sum: in half precision it is kept in
    fp32.
    `embedding` rather than indexing for its backward: parallel, and deterministic on every device.
    """
    table = x.transpose(0, 1).reshape(x.shape[1], -1)
    if table.dtype in (torch.bfloat16, torch.float16):
        return embedding(index, table.float()).to(table.dtype)
    return embedding(index, table)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    wide = torch.promote_types(q.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(q.dtype) @ v


def _plain(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    dropout: float,
) -> tuple[Tensor, None]:
    """Not packed: what transformers would do."""
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)
    if dropout:
        raise ValueError("dropout under a softcap is not supported: set the model's attention_dropout to 0")
    num_q, num_k = query.shape[2], key.shape[2]
    if mask is None and num_q > 1:
        mask = torch.ones(num_q, num_k, dtype=torch.bool, device=query.device).tril(num_k - num_q)
    if mask is not None and mask.dtype == torch.bool:
        # not -inf: a query that is all padding must stay finite
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    repeat = query.shape[1] // key.shape[1]
    out = _explicit(query, repeat_kv(key, repeat), repeat_kv(value, repeat), mask, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def _tree_mask(*args: Any, **options: Any) -> Tensor | None:
    """No mask while packing (the plan holds it), transformers' own otherwise."""
    plan = _packing.get()
    if plan is None:
        return sdpa_mask(*args, **options)
    local = options.get("local_size")
    if local is not None:
        plan.mask_windows.add(local)
    return None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, _tree_mask)


@contextlib.contextmanager
def packing(plan: Plan) -> Iterator[None]:
    """While a packed forward runs: masks are the plan's, and a layer that does not receive the plan is an error.

    Raises ValueError at the end if the model asked masks for other sliding windows than its layers passed on. A
    backward pass may come later: recomputed layers find the plan among their own keyword arguments.
    """
    token = _packing.set(plan)
    try:
        yield
    finally:
        _packing.reset(token)
    if plan.mask_windows != plan.layer_windows:
        raise ValueError(
            f"the model's masks are local to {sorted(plan.mask_windows)} tokens but its layers say "
            f"{sorted(plan.layer_windows)}: it cannot run packed"
        )
