"""Keys and values of the sampling engine, and the exact attention over them.

A context's keys are held once, whatever the number of responses that read them (`Prefixes`); a response's own keys lie
in its slot (`Slots`). A query attends to the two parts separately and the parts are merged in one softmax:
out = w out_prefix + (1 - w) out_own with w = sigmoid(lse_prefix - lse_own).

Axes: S slots, B busy slots, C contexts of one store, G responses of a context, L keys, H heads, K key heads,
D head size. Every key tensor is laid out [row, position, K, D].
"""

import math
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "oneloop_decode"  # the attention implementation's name in transformers
STATE = "oneloop_decode_state"  # the keyword argument that carries a Prefill or a Decode to every layer
CALL_COST = (
    2_000  # one more call (some 40 us) costs as much as this many query-key pairs (some 0.02 us; ours, estimated from timings)
)
# arguments that models hand to every attention function and that change nothing here
HARMLESS = frozenset(
    (
        *("position_ids", "cache_position", "position_embeddings", "is_causal", "logits_to_keep"),
        *("use_cache", "cache", "past_key_values", "past_key_value", "layer_past"),
        *("return_dict", "output_attentions", "output_hidden_states"),
    )
)


class KeyStore:
    """Keys and values of some rows for every layer: `keys[layer]`, `values[layer]` [rows, length, K, D].

    Both axes grow geometrically; a layer's tensors come into being with its first write.
    """

    def __init__(self) -> None:
        self.rows, self.length = 0, 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held, spare room included."""
        return sum(t.nbytes for side in (self.keys, self.values) for t in side.values())

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` x `length`, keeping what is there."""
        if rows <= self.rows and length <= self.length:
            return
        self.rows, self.length = max(rows, self.rows), max(length, self.length)
        for side in (self.keys, self.values):
            for layer, old in side.items():
                new = old.new_zeros(self.rows, self.length, *old.shape[2:])
                new[: old.shape[0], : old.shape[1]] = old
                side[layer] = new

    def at(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's keys and values; `like` [..., K, D] tells the shape of a new layer."""
        if layer not in self.keys:
            # zeros, not empty: a masked position still enters 0 * value
            self.keys[layer] = like.new_zeros(self.rows, self.length, *like.shape[-2:])
            self.values[layer] = like.new_zeros(self.rows, self.length, *like.shape[-2:])
        return self.keys[layer], self.values[layer]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row onto another."""
        for side in (self.keys, self.values):
            for tensor in side.values():
                tensor[target, :length] = tensor[source, :length]


@dataclass
class Context:
    """A prefilled context: where its keys lie, and the logits [V] after its last token."""

    ids: tuple[int, ...]
    num_readers: int = 0
    store: "PrefixStore | None" = None
    row: int = -1
    logits: torch.Tensor | None = None


class PrefixStore(KeyStore):
    """Contexts of about one length; rows [0, len(contexts)) are always in use, without holes."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.contexts: list[Context] = []

    def add(self, context: Context) -> None:
        """Give the context a row."""
        if len(self.contexts) == self.rows:
            self.reserve(max(1, math.ceil(1.5 * self.rows)), self.length)
        context.store, context.row = self, len(self.contexts)
        self.contexts.append(context)

    def drop(self, context: Context) -> None:
        """Free the context's row: the last row moves into it."""
        last = self.contexts.pop()
        if last is not context:
            self.move(last.row, context.row, len(last.ids))
            self.contexts[context.row], last.row = last, context.row
        context.store, context.row = None, -1


def ladder(length: int) -> int:
    """Return the stored length for a context: the next of 16, 32, 48, 64, 96, 128, 192, ... (few stores)."""
    power = max(4, (length - 1).bit_length())
    three_quarters = 3 << (power - 2)
    return three_quarters if power > 4 and length <= three_quarters else 1 << power


class Prefixes:
    """All contexts in use under one set of weights. A change of weights throws the whole object away."""

    def __init__(self) -> None:
        self._contexts: dict[tuple[int, ...], Context] = {}
        self.stores: dict[int, PrefixStore] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values held."""
        return sum(store.num_bytes for store in self.stores.values())

    def read(self, ids: tuple[int, ...]) -> Context:
        """Return the context of `ids`, counting one more reader; new ones have no logits yet."""
        context = self._contexts.get(ids)
        if context is None:
            context = self._contexts[ids] = Context(ids)
            length = ladder(len(ids))
            self.stores.setdefault(length, PrefixStore(length)).add(context)
        context.num_readers += 1
        return context

    def leave(self, context: Context, *, is_wanted: bool) -> None:
        """One reader less; the last one frees the keys unless a waiting job wants them."""
        context.num_readers -= 1
        if context.num_readers == 0 and not is_wanted and context.store is not None:
            store = context.store
            store.drop(context)
            del self._contexts[context.ids]
            if not store.contexts:
                del self.stores[store.length]


@dataclass
class Prefill:
    """State of a forward over packed contexts [1, N]: contexts[i] holds tokens bounds[i] to bounds[i + 1]."""

    contexts: list[Context]
    bounds: list[int]
    windows: set[int | None] = field(default_factory=set)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: "How") -> torch.Tensor:
        """Store the keys and return causal attention within each context [1, N, H, D]."""
        self.windows.add(how.window)
        out = torch.empty_like(query.transpose(1, 2))
        for context, start, end in zip(self.contexts, self.bounds, self.bounds[1:], strict=False):
            part = slice(start, end)
            if context.store is None:
                raise RuntimeError("a context without room is being prefilled")
            keys, values = context.store.at(layer, key.transpose(1, 2))
            keys[context.row, : end - start] = key[0, :, part].transpose(0, 1)
            values[context.row, : end - start] = value[0, :, part].transpose(0, 1)
            q, k, v = query[:, :, part], key[:, :, part], value[:, :, part]
            out[:, part] = _causal(q, k, v, how).transpose(1, 2)
        return out


@dataclass(frozen=True)
class How:
    """What a layer asks of attention: score scale, sliding window (None: all), score softcap (None: none)."""

    scale: float
    window: int | None
    softcap: float | None


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
    length = q.shape[2]
    if how.softcap is None and (how.window is None or how.window >= length):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale, enable_gqa=True)
    position = torch.arange(length, device=q.device)
    mask = position[:, None] >= position[None]
    if how.window is not None:
        mask &= position[:, None] - position[None] < how.window
    if how.softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scale, enable_gqa=True)
    folded = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [1, K, rep * L, D]
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf).repeat(q.shape[1] // k.shape[1], 1)
    out, _ = _part_exact(folded, k, v, bias[None, None], how)
    return out.unflatten(2, (-1, length)).flatten(1, 2)


@dataclass(frozen=True)
class PrefixCall:
    """One attention call over rows [start, end) of a store, each read by G queries.

    `take` [C * G] is the busy slot of each query (padding repeats one), `bias` its mask per window.
    """

    store: PrefixStore
    start: int
    end: int
    take: torch.Tensor


class Decode:
    """State of a forward of one token for each of B busy slots [B, 1].

    Made once a step from each busy slot's context and its number of own tokens stored before this one.
    """

    def __init__(self, slots: KeyStore, contexts: list[Context], own_lengths: list[int], device: torch.device) -> None:
        self.slots = slots
        self.width = max(own_lengths) + 1
        self.rows = torch.arange(len(contexts), device=device)
        self.own = torch.tensor(own_lengths, device=device)
        self.prefix = torch.tensor([len(c.ids) for c in contexts], device=device)
        self.calls, order = _plan_calls(contexts, device)
        self.back = torch.tensor(order, device=device)
        self.windows: set[int | None] = set()
        self._biases: dict[tuple[int | None, torch.dtype], tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]]
        self._biases = {}

    @property
    def positions(self) -> torch.Tensor:
        """Position of each slot's new token [B, 1]."""
        return (self.prefix + self.own)[:, None]

    def biases(self, window: int | None, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """Return the score biases (0 or -inf) of each prefix call [C, 1, G, L] and of the own keys [B, 1, 1, L].

        The third value marks slots [B, 1, 1] whose window has left the whole prefix behind, None where there are none.
        """
        key = (window, dtype)
        if key not in self._biases:
            position = self.positions
            own = torch.arange(self.width, device=position.device)[None]
            is_own_open = own <= self.own[:, None]
            is_gone = None
            if window is not None:
                is_own_open &= own + self.prefix[:, None] > position - window
                is_gone = (self.prefix[:, None] - 1 <= position - window)[:, :, None]
                is_gone = is_gone if bool(is_gone.any()) else None
            prefix = [self._prefix_bias(call, window, dtype) for call in self.calls]
            self._biases[key] = (prefix, _bias(is_own_open, dtype)[:, None, None], is_gone)
        return self._biases[key]

    def _prefix_bias(self, call: PrefixCall, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        index = torch.arange(call.store.length, device=self.prefix.device)
        num_contexts = call.end - call.start
        lengths = [len(c.ids) for c in call.store.contexts[call.start : call.end]]
        is_open = index < torch.tensor(lengths, device=index.device)[:, None, None]  # [C, 1, L]
        if window is not None:
            oldest = (self.prefix + self.own - window)[call.take].view(num_contexts, -1, 1)
            is_open = is_open & (index > oldest)
        return _bias(is_open, dtype)[:, None]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        """Store the new keys and return attention over prefix and own keys [B, 1, H, D]."""
        self.windows.add(how.window)
        B, H, _, D = query.shape
        K = key.shape[1]
        keys, values = self.slots.at(layer, key[:, :, 0])
        keys.index_put_((self.rows, self.own), key[:, :, 0])
        values.index_put_((self.rows, self.own), value[:, :, 0])
        prefix_biases, own_bias, is_gone = self.biases(how.window, query.dtype)
        q = query.view(B, K, H // K, D)
        own_k, own_v = (side[:B, : self.width].transpose(1, 2) for side in (keys, values))
        own, own_lse = _part(q, own_k, own_v, own_bias, how)
        outs, lses = [], []
        for call, bias in zip(self.calls, prefix_biases, strict=True):
            out, lse = self._prefix_part(layer, call, q, bias, how)
            outs.append(out)
            lses.append(lse)
        out, lse = (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))
        out, lse = out.index_select(0, self.back), lse.index_select(0, self.back)
        if is_gone is not None:
            lse = lse.masked_fill(is_gone, -math.inf)
        share = torch.sigmoid(lse - own_lse)[..., None]
        merged = torch.lerp(own.to(share.dtype), out.to(share.dtype), share).to(query.dtype)
        return merged.reshape(B, 1, H, -1)

    def _prefix_part(
        self, layer: int, call: PrefixCall, q: torch.Tensor, bias: torch.Tensor, how: How
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [C * G, K, rep, D] and log normalisers [C * G, K, rep] of one call."""
        C = call.end - call.start
        _, K, rep, D = q.shape
        taken = q.index_select(0, call.take).view(C, -1, K, rep, D)
        G = taken.shape[1]
        folded = taken.transpose(1, 2).reshape(C, K, G * rep, D)
        keys, values = (side[layer][call.start : call.end].transpose(1, 2) for side in (call.store.keys, call.store.values))
        if bias.shape[2] > 1:  # a window: the mask differs between the queries of a context
            bias = bias.repeat_interleave(rep, dim=2)
        out, lse = _part(folded, keys, values, bias, how)
        out = out.unflatten(2, (G, rep)).transpose(1, 2).flatten(0, 1)
        return out, lse.unflatten(2, (G, rep)).transpose(1, 2).flatten(0, 1)


def _bias(is_open: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(is_open, dtype=dtype).masked_fill_(~is_open, -math.inf)


def _part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [C, K, Q, D] of queries [C, K, Q, D] to keys [C, K, L, D] and log normalisers [C, K, Q]."""
    if q.is_cpu and how.softcap is None and v.shape[-1] == q.shape[-1]:
        # keeps scores in float32 and never writes them out; 2 to 3 times as fast as two matmuls and a softmax
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=how.scale)
    return _part_exact(q, k, v, bias, how)


def _part_exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, how: How
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores + bias
    lse = scores.logsumexp(-1)
    # where a window leaves nothing open the row is 0, as its share in the merge will be
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    return weights.to(v.dtype) @ v, lse


def _plan_calls(contexts: list[Context], device: torch.device) -> tuple[list[PrefixCall], list[int]]:
    """Cover every busy slot by few attention calls.

    A store is read in one call with every context's queries padded to G, except the contexts with more readers than
    G, which get a call of their own; G is what costs least. Returns the calls and, for each slot, its place in the
    calls' outputs joined end to end.
    """
    readers: dict[int, tuple[PrefixStore, list[list[int]]]] = {}
    for slot, context in enumerate(contexts):
        store = context.store
        if store is None:
            raise RuntimeError("a busy slot's context has no keys")
        if id(store) not in readers:
            readers[id(store)] = (store, [[] for _ in store.contexts])
        readers[id(store)][1][context.row].append(slot)
    calls, order, offset = [], [0] * len(contexts), 0
    for store, slots_of in readers.values():
        padded = _best_padding([len(slots) for slots in slots_of], store.length)
        groups = [(0, len(slots_of), padded)] if padded else []
        groups += [(row, row + 1, len(slots)) for row, slots in enumerate(slots_of) if len(slots) > padded]
        for start, end, size in groups:
            take = []
            for slots in slots_of[start:end]:
                fits = slots if len(slots) <= size else []
                for place, slot in enumerate(fits):
                    order[slot] = offset + len(take) + place
                take += fits + [0] * (size - len(fits))
            calls.append(PrefixCall(store, start, end, torch.tensor(take, device=device)))
            offset += len(take)
    return calls, order


def _best_padding(sizes: list[int], length: int) -> int:
    def cost(padded: int) -> float:
        alone = [size for size in sizes if size > padded]
        shared = CALL_COST + len(sizes) * padded * length if padded else 0
        return shared + sum(CALL_COST + size * length for size in alone)

    return min(sorted({0, *sizes}), key=cost)


def attention(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' AttentionInterface; query [B, H, T, D], key and value [B, K, T, D].

    Raises:
        NotImplementedError: the layer asks for something that is not implemented here (sinks, head masks, ...).

    """
    state = others.pop(STATE, None)
    unknown = sorted(name for name, given in others.items() if given is not None and name not in HARMLESS)
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} looks both ways: not implemented here")
    if unknown or attention_mask is not None or dropout:
        raise NotImplementedError(f"attention asks for {', '.join(unknown) or 'a mask or dropout'}: not implemented here")
    if not isinstance(state, Prefill | Decode):
        raise NotImplementedError(f"{type(module).__name__} does not hand extra arguments to its attention function")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise NotImplementedError(f"{type(module).__name__} has no layer_idx")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return state.attend(layer, query, key, value, How(scale, sliding_window, softcap)), None


def register(interface: type[AttentionInterface]) -> None:
    """Make the attention function known to transformers under NAME; without a mask function, models build no mask."""
    interface.register(NAME, attention)
