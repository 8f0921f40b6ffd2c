"""How the decoder's rows go through a model: shared keys through the attention interface, or the model's own cache.

Both keep one row per busy slot and speak the same four verbs: admit contexts, advance every row by a token, vacate a
row, clear. `choose` takes the fast one where a probe shows it equal to the model's own forward.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import transformers

from oneloop.engine import kv
from oneloop.engine.packed_linear import PackedLinears, is_useful

FIRST_OWN_LENGTH = 32  # tokens of room per slot before the first growth (ours)
# per dtype: the probe's floor in nats, and the share of the model's response to a changed context that may be missed
PROBE_BOUNDS = {torch.float64: (1e-9, 0.0), torch.float32: (1e-4, 1e-3)}
PROBE_BOUNDS_HALF = (0.1, 0.15)  # bf16 alone moves the log-probs of a 30-layer model by 0.1 to 0.3 nats


class Rows(Protocol):
    """The rows of a decode batch inside one model."""

    reason: str
    num_prefilled: int

    def admit(self, contexts: list[tuple[int, ...]]) -> torch.Tensor:
        """Append a row per context, prefilling the new ones; return the logits after each [len(contexts), V]."""
        ...

    def advance(self, ids: list[int]) -> torch.Tensor:
        """Append ids[i] to row i for every row; return the next logits [B, V]."""
        ...

    def vacate(self, row: int, *, is_wanted: bool) -> None:
        """Remove a row; the last row takes its place. `is_wanted`: a waiting job has the same context."""
        ...

    def clear(self) -> None:
        """Forget everything computed from the weights."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values held."""
        ...


class SharedRows:
    """Rows that read their context's keys from one copy and keep their own keys in a slot."""

    reason = ""

    def __init__(self, model: torch.nn.Module, *, slots: int, prefill_tokens: int, pack_weights: bool) -> None:
        self.model, self.num_prefilled, self.windows = model, 0, set[int | None]()
        self._slots, self._prefill_tokens = slots, prefill_tokens
        self._device = next(model.parameters()).device
        self._configs = _configs(model)
        self._pack = pack_weights and is_useful(model)
        kv.register(transformers.AttentionInterface)
        self.clear()

    def clear(self) -> None:
        """Forget everything computed from the weights: keys, logits, packed weights."""
        self.prefixes, self.own = kv.Prefixes(), kv.KeyStore()
        self._contexts: list[kv.Context] = []
        self._own_lengths: list[int] = []
        self._packed: AbstractContextManager[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values held."""
        return self.prefixes.num_bytes + self.own.num_bytes

    def admit(self, contexts: list[tuple[int, ...]]) -> torch.Tensor:
        """Append a row per context; prefill the new ones, packed, `prefill_tokens` at a time."""
        admitted = [self.prefixes.read(ids) for ids in contexts]
        pack: list[kv.Context] = []
        for context in {id(c): c for c in admitted if c.logits is None}.values():
            if pack and sum(len(c.ids) for c in pack) + len(context.ids) > self._prefill_tokens:
                self._prefill(pack)
                pack = []
            pack.append(context)
        if pack:
            self._prefill(pack)
        self._contexts += admitted
        self._own_lengths += [0] * len(admitted)
        return torch.stack([c.logits for c in admitted if c.logits is not None])

    def _prefill(self, contexts: list[kv.Context]) -> None:
        lengths = [len(c.ids) for c in contexts]
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        state = kv.Prefill(contexts, bounds)
        ids = torch.tensor([[i for c in contexts for i in c.ids]], device=self._device)
        positions = torch.cat([torch.arange(n, device=self._device) for n in lengths])[None]
        last = torch.tensor(bounds[1:], device=self._device) - 1
        logits = self._forward(ids, positions, state, logits_to_keep=last)[0]
        for context, row in zip(contexts, logits, strict=True):
            context.logits = row.clone() if len(contexts) > 1 else row  # a view would keep the whole pack alive
        self.num_prefilled += sum(lengths)
        self.windows |= state.windows

    def advance(self, ids: list[int]) -> torch.Tensor:
        """Append ids[i] to row i for every row; return the next logits [B, V]."""
        need = max(self._own_lengths) + 1
        if need > self.own.length:
            self.own.reserve(self._slots, max(FIRST_OWN_LENGTH, need, 2 * self.own.length))
        state = kv.Decode(self.own, self._contexts, self._own_lengths, self._device)
        logits = self._forward(torch.tensor(ids, device=self._device)[:, None], state.positions, state)[:, -1]
        self._own_lengths = [n + 1 for n in self._own_lengths]
        return logits

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, state: kv.Prefill | kv.Decode, **more: torch.Tensor
    ) -> torch.Tensor:
        if self._packed is None:
            self._packed = PackedLinears(self.model) if self._pack else contextlib.nullcontext()
        with _attending(self._configs), self._packed:
            return self.model(input_ids=ids, position_ids=positions, use_cache=False, **{kv.STATE: state}, **more).logits

    def vacate(self, row: int, *, is_wanted: bool) -> None:
        """Remove a row; the last row takes its place."""
        self.prefixes.leave(self._contexts[row], is_wanted=is_wanted)
        last = len(self._contexts) - 1
        if row != last:
            self.own.move(last, row, self._own_lengths[last])
        self._contexts[row], self._own_lengths[row] = self._contexts[last], self._own_lengths[last]
        self._contexts.pop()
        self._own_lengths.pop()


class PlainRows:
    """Rows that each keep a cache of the model's own kind, one forward per row: for models of any design, slowly.

    Without `has_cache` every token is a forward over the whole sequence.
    """

    def __init__(self, model: torch.nn.Module, *, reason: str, has_cache: bool = True) -> None:
        self.model, self.reason, self.num_prefilled = model, reason, 0
        self._device = next(model.parameters()).device
        parameters = inspect.signature(_base(model).forward).parameters
        names = [name for name in ("cache", "past_key_values", "cache_params") if name in parameters]
        self._cache_name = names[0] if names and has_cache else None
        self.clear()

    def clear(self) -> None:
        """Forget everything computed from the weights."""
        self._prefilled: dict[tuple[int, ...], tuple[torch.Tensor, object]] = {}
        self._rows: list[tuple[tuple[int, ...], list[int], object]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values that the caches show."""
        caches = [cache for _, cache in self._prefilled.values()] + [cache for _, _, cache in self._rows]
        layers = [layer for cache in caches for layer in getattr(cache, "layers", ())]
        held = [getattr(layer, side, None) for layer in layers for side in ("keys", "values")]
        return sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor))

    def admit(self, contexts: list[tuple[int, ...]]) -> torch.Tensor:
        """Append a row per context, prefilling the new ones."""
        logits = []
        for ids in contexts:
            if ids not in self._prefilled:
                self._prefilled[ids] = self._forward(list(ids), None)
                self.num_prefilled += len(ids)
            row_logits, cache = self._prefilled[ids]
            self._rows.append((ids, [], copy.deepcopy(cache)))
            logits.append(row_logits)
        return torch.stack(logits)

    def advance(self, ids: list[int]) -> torch.Tensor:
        """Append ids[i] to row i for every row; return the next logits [B, V]."""
        logits = []
        for row, new in enumerate(ids):
            context, own, cache = self._rows[row]
            own.append(new)
            row_logits, cache = self._forward([new] if self._cache_name else [*context, *own], cache)
            self._rows[row] = (context, own, cache)
            logits.append(row_logits)
        return torch.stack(logits)

    def _forward(self, ids: list[int], cache: object) -> tuple[torch.Tensor, object]:
        more: dict[str, object] = {} if cache is None or self._cache_name is None else {self._cache_name: cache}
        tokens = torch.tensor([ids], device=self._device)
        out = self.model(input_ids=tokens, use_cache=self._cache_name is not None, **more)
        return out.logits[0, -1].clone(), None if self._cache_name is None else out[self._cache_name]

    def vacate(self, row: int, *, is_wanted: bool) -> None:
        """Remove a row; the last row takes its place."""
        context = self._rows[row][0]
        self._rows[row] = self._rows[-1]
        self._rows.pop()
        if not is_wanted and all(context != other for other, _, _ in self._rows):
            self._prefilled.pop(context, None)


def choose(model: torch.nn.Module, *, slots: int, prefill_tokens: int, pack_weights: bool) -> Rows:
    """Return the fastest rows whose log-probs equal the model's own forward on a probe of a few tokens.

    Raises:
        ValueError: not even a plain forward per token gives the model's own log-probs.

    """
    reason = _refusal(_base(model).config)
    if not reason:
        rows = SharedRows(model, slots=slots, prefill_tokens=prefill_tokens, pack_weights=pack_weights)
        reason = _probe(rows, model) or _window_refusal(_base(model).config, rows.windows)
        if not reason:
            rows.num_prefilled = 0
            return rows
    for has_cache in (True, False):
        plain = PlainRows(model, reason=reason, has_cache=has_cache)
        failure = _probe(plain, model)
        if not failure:
            plain.num_prefilled = 0
            return plain
        reason = f"{reason}; {'with' if has_cache else 'without'} its own cache {failure}"
    raise ValueError(f"{type(model).__name__} cannot be sampled token by token: {reason}")


def weights_token(model: torch.nn.Module) -> int:
    """Return a number that changes when a parameter or buffer is replaced or written in place by an optimiser or copy.

    Writes through `.data` leave no trace: after those, call `Decoder.forget`.
    """
    token = []
    for module in model.modules():  # twice as fast as parameters() and buffers(): this runs at every step
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                token += (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
    return hash(tuple(token))


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Switch off dropout and gradients; afterwards every module's training flag is as it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.__dict__["training"] = False  # a module's own setter costs 3 ms a step over a deep model
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.__dict__["training"] = True


@contextlib.contextmanager
def _attending(configs: list[transformers.PreTrainedConfig]) -> Iterator[None]:
    # the internal field: the public setter would also overwrite the configurations of towers that are not ours
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = kv.NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def _base(model: Any) -> transformers.PreTrainedModel:
    """Return the transformers model inside an adapter's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _configs(model: torch.nn.Module) -> list[transformers.PreTrainedConfig]:
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(c): c for c in found if isinstance(c, transformers.PreTrainedConfig)}.values())


def _refusal(config: transformers.PreTrainedConfig) -> str:
    """Return why the shared path cannot be exact for a model of this configuration; '' where nothing says so."""
    config = config.get_text_config()
    strange = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if strange:
        return f"layers of type {', '.join(sorted(strange))} keep a state of their own"
    if getattr(config, "attention_chunk_size", None):
        return "chunked attention is told to models by their masks only"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {r.get("rope_type") for r in [rope, *rope.values()] if isinstance(r, dict)}
    if kinds & {"dynamic", "longrope"}:
        return "positions that depend on the longest sequence of a batch tie its rows together"
    return ""


def _window_refusal(config: transformers.PreTrainedConfig, seen: set[int | None]) -> str:
    config = config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    is_declared = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    if window and is_declared and window not in seen:
        return "its sliding window is told to it by masks only"
    return ""


def _probe(rows: Rows, model: torch.nn.Module) -> str:
    """Return how the rows' log-probs differ from the model's own forward on short rows; '' where they agree.

    Two rows share a context and part ways, one of them comes later and so is shorter, and one is vacated: a leak
    between rows, a wrong mask or a misplaced row shows.
    """
    size = _base(model).config.get_text_config().vocab_size
    first, second = (tuple((start + 7 * i) % size for i in range(n)) for start, n in ((3, 4), (5, 9)))
    with evaluating(model):
        try:
            traces = [([*ids], [logits]) for ids, logits in zip((first, second), rows.admit([first, second]), strict=True)]
            gone = []
            for step in range(5):
                new = [(int(logits[-1].argmax()) + row + step) % size for row, (_, logits) in enumerate(traces)]
                for (ids, logits), token, row_logits in zip(traces, new, rows.advance(new), strict=True):
                    ids.append(token)
                    logits.append(row_logits)
                if step == 1:
                    traces.append(([*first], [rows.admit([first])[0]]))
                if step == 3:
                    rows.vacate(0, is_wanted=False)
                    gone, traces = traces[:1], [traces[2], traces[1]]
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            return f"its forward fails: {error}".splitlines()[0]
        finally:
            rows.clear()
        return next(filter(None, (_difference(model, *trace) for trace in gone + traces)), "")


def _difference(model: torch.nn.Module, ids: list[int], logits: list[torch.Tensor]) -> str:
    floor, share = PROBE_BOUNDS.get(logits[0].dtype, PROBE_BOUNDS_HALF)
    size = logits[0].shape[-1]
    own, changed = (_log_probs(model, other)[-len(logits) :] for other in (ids, [(ids[0] + 1) % size, *ids[1:]]))
    got = torch.log_softmax(torch.stack(logits).double(), -1)
    off, response = (float((x - own).abs().mean()) for x in (got, changed))
    return "" if off <= floor + share * response else f"its log-probs differ from its own forward by {off:.2g} nats"


def _log_probs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    return torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0].double(), -1)
