"""The engine's two verbs over packed rows: values of columns, and pull of coefficients on them.

The backbone runs once over the tree of a part's sequences, up to the last token that is read. The head is applied in chunks of
tokens, forward and backward, so logits are never materialised whole. Where the objective couples more than a part holds, values
come first, then coefficients, then the pull: the gradient is that of the undivided batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from oneloop.batch import cut
from oneloop.data import Array, Batch, Need, Source
from oneloop.engine.network import Network
from oneloop.metrics import merge
from oneloop.ops import entropy, logp
from oneloop.stages import Metrics, Objective

CHUNK = 256  # tokens whose logits exist at once


@dataclass
class Reading:
    """One source read on the asked tokens of one part: hidden (n, D) before each token, cut off from the backbone's graph."""

    network: Network
    hidden: Tensor
    packed: Tensor
    index: Tensor

    def logits(self, chunk: slice, temperature_n: Tensor) -> Tensor:
        """Raw head output of a chunk (C, V), wide; a leaf of the functional's graph."""
        weight, bias = self.network.head()
        with torch.no_grad():
            return torch.nn.functional.linear(self.hidden[chunk].detach(), weight, bias).to(wide(self.hidden.dtype))

    def shaped(self, raw: Tensor, temperature_C: Tensor) -> Tensor:
        """Logits as the sampler saw them, at each token's temperature."""
        logits = self.network.shape_logits(raw)
        return logits if bool((temperature_C == 1).all()) else logits / temperature_C[:, None]


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least fp32."""
    return torch.promote_types(dtype, torch.float32)


def read(network: Network, batch: Batch, source: Source, tokens: Array, *, grad: bool) -> Reading:
    """The hidden states that predict `tokens` (indices into N) of a batch, read by one source."""
    sequences, which, position = sequences_of(batch, source.view, tokens)
    with torch.set_grad_enabled(grad):
        packed, tree = network.backbone(sequences)
    index = tree.node_of(which, position).to(packed.device)
    hidden = packed.detach()[index]
    return Reading(network, hidden.requires_grad_(grad), packed, index)


def sequences_of(batch: Batch, view: str, tokens: Array) -> tuple[list[tuple[int, ...]], Array, Array]:
    """The sequences of the asked rows and turns, each up to its last asked token; and where each token is predicted from."""
    keys, which = np.unique(np.stack([batch.row_N[tokens], batch.turn_N[tokens]]), axis=1, return_inverse=True)
    which = which.reshape(-1)
    cut_n = batch.cut_N[tokens].copy()
    sequences = []
    for i, (r, k) in enumerate(keys.T):
        turn, mine = batch.rows[r].turns[k], which == i
        context = turn.context if view == "own" else tuple(batch.contexts[view][r][k])
        cut_n[mine] += len(context) - len(turn.context)
        if cut_n[mine].min() < 1:
            raise ValueError(f"view {view} leaves row {batch.rows[r].id} no context to predict its first token from")
        sequences.append((context + turn.response)[: int(cut_n[mine].max())])
    return sequences, which, cut_n - 1


def chunks(n: int) -> Iterator[slice]:
    """Slices of at most CHUNK."""
    return (slice(i, min(i + CHUNK, n)) for i in range(0, n, CHUNK))


def functional(need: Need) -> Any:
    """The function of logits that a need names."""
    if callable(need.what):
        return need.what
    return {"logp": logp, "entropy": lambda logits, ids: entropy(logits)}[need.what]


@dataclass
class Ask:
    """What a functional is handed beside logits, on the asked tokens: ids, temperatures, columns."""

    ids: Tensor
    temperature: Tensor
    also: Mapping[str, Tensor]

    @staticmethod
    def of(batch: Batch, tokens: Array, needs: Sequence[Need], device: torch.device, dtype: torch.dtype) -> Ask:
        """From a batch of numpy columns."""
        names = {c for n in needs for c in n.also}
        also = {c: torch.as_tensor(np.asarray(batch.columns[c])[tokens], device=device).to(dtype) for c in names}
        ids = torch.as_tensor(batch.ids_N[tokens], device=device)
        heat = np.asarray(batch.columns["temperature"])[tokens]
        heat = np.where(heat > 0, heat, 1.0)  # a greedy token is read untempered
        return Ask(ids, torch.as_tensor(heat, device=device).to(dtype), also)


def value(need: Need, readings: Mapping[Source, Reading], ask: Ask) -> Tensor:
    """A need's values on the asked tokens (n or n, K), without gradient; a head's with it."""
    if isinstance(need.what, str) and need.what.startswith("value."):
        reading = readings[need.of[0]]
        head: Any = reading.network.heads[need.what.removeprefix("value.")]
        return head(reading.hidden.to(head.weight.dtype))[:, 0]
    f, out = functional(need), []
    with torch.no_grad():
        for c in chunks(len(ask.ids)):
            logits = [readings[s].shaped(readings[s].logits(c, ask.temperature), ask.temperature[c]) for s in need.of]
            out.append(f(*logits, ask.ids[c], *(ask.also[a][c] for a in need.also)))
    return torch.cat(out)


def values(batch: Batch, needs: Sequence[Need], networks: Mapping[Source, Network], on: Array) -> dict[Need, Array]:
    """Columns of a part (numpy, N or NK), NaN where not asked."""
    tokens = np.flatnonzero(on)
    with torch.no_grad():
        readings = {s: read(networks[s], batch, s, tokens, grad=False) for s in {s for n in needs for s in n.of}}
        first = next(iter(readings.values())).hidden
        ask = Ask.of(batch, tokens, needs, first.device, wide(first.dtype))
        found = {n: value(n, readings, ask).double().cpu().numpy() for n in needs}
    return {n: spread(v, tokens, len(on)) for n, v in found.items()}


def spread(v_n: Array, tokens: Array, n: int) -> Array:
    """Values of some tokens as a full column."""
    out = np.full((n, *v_n.shape[1:]), np.nan)
    out[tokens] = v_n
    return out


def tensors(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch with torch arrays, for losses."""

    def floats(columns: Mapping[Any, Array]) -> dict[Any, Tensor]:
        return {k: torch.as_tensor(np.asarray(v, float), device=device).to(dtype) for k, v in columns.items()}

    return replace(
        batch,
        ids_N=torch.as_tensor(batch.ids_N, device=device),
        row_N=torch.as_tensor(batch.row_N, device=device),
        turn_N=torch.as_tensor(batch.turn_N, device=device),
        cut_N=torch.as_tensor(batch.cut_N, device=device),
        masks={k: torch.as_tensor(v, device=device) for k, v in batch.masks.items()},
        columns=floats(batch.columns),
        streams=floats(batch.streams),
    )


def as_columns(found: Mapping[Need, Tensor], tokens: Tensor, n: int) -> dict[Need, Tensor]:
    """Values of the asked tokens as full columns of the part, NaN elsewhere; differentiable."""
    out = {}
    for need, v in found.items():
        full = v.new_full((n, *v.shape[1:]), float("nan"))
        out[need] = full.index_copy(0, tokens, v)
    return out


class Gradient:
    """fp32 sums of gradients, by parameter name; the module's own .grad is emptied as soon as it is added."""

    def __init__(self, network: Network) -> None:
        """Hooks every trained parameter until `close`."""
        self.sums: dict[str, Tensor] = {n: torch.zeros_like(w) for n, w in network.masters.items()}
        self.hooks = [p.register_post_accumulate_grad_hook(self._fold(n)) for n, p in network.parameters.items()]
        names = {id(p): n for n, p in network.parameters.items()}
        weight, bias = network.head()
        self.head, self.bias = names.get(id(weight)), names.get(id(bias)) if bias is not None else None

    def _fold(self, name: str) -> Any:
        def hook(p: Tensor) -> None:
            self.sums[name].add_(p.grad)  # pyright: ignore[reportArgumentType]
            p.grad = None

        return hook

    def close(self) -> None:
        """Lets go of the parameters."""
        for hook in self.hooks:
            hook.remove()


def pull_part(
    network: Network, networks: Mapping[Source, Network], part: Batch, objective: Objective, gradient: Gradient
) -> tuple[float, Metrics]:
    """Adds one part's gradient; returns its loss and metrics."""
    on = np.asarray(objective.on(part), bool)
    tokens = np.flatnonzero(on)
    if not len(tokens) or not objective.live:
        return 0.0, {}
    needs = sorted(objective.live, key=repr)
    sources = sorted({s for n in needs for s in n.of}, key=repr)
    readings = {s: read(networks[s], part, s, tokens, grad=s.at == "live") for s in sources}
    device, dtype = network.device, wide(network.dtype)
    ask = Ask.of(part, tokens, needs, device, dtype)
    found = {n: value(n, readings, ask) for n in needs}
    leaves = {n: v.detach().to(dtype).requires_grad_() for n, v in found.items()}
    index = torch.as_tensor(tokens, device=device)
    loss, metrics = objective(tensors(part, device, dtype), as_columns(leaves, index, len(on)))
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return float(loss), metrics
    pulls = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (need, v), c in zip(found.items(), pulls, strict=True):
        if c is None:
            continue
        if v.requires_grad:
            torch.autograd.backward([v], [c.to(v.dtype)])
        else:
            pull_logits(need, readings, ask, c, gradient)
    for reading in (r for s, r in readings.items() if s.at == "live"):
        backbone_backward(reading)
    return float(loss.detach()), metrics


def pull_logits(need: Need, readings: Mapping[Source, Reading], ask: Ask, c_n: Tensor, gradient: Gradient) -> None:
    """Coefficients on a functional of logits, pulled to hidden states and head, chunk by chunk."""
    f, live = functional(need), [s for s in need.of if s.at == "live"]
    for c in chunks(len(ask.ids)):
        raw = {s: readings[s].logits(c, ask.temperature).requires_grad_(s in live) for s in need.of}
        logits = [readings[s].shaped(raw[s], ask.temperature[c]) for s in need.of]
        out = f(*logits, ask.ids[c], *(ask.also[a][c] for a in need.also))
        for s, d_CV in zip(live, torch.autograd.grad(out, [raw[s] for s in live], c_n[c].to(out.dtype)), strict=True):
            reading = readings[s]
            weight, _ = reading.network.head()
            d_CV = d_CV.to(weight.dtype)
            hidden = reading.hidden[c].detach()
            if reading.hidden.grad is None:
                reading.hidden.grad = torch.zeros_like(reading.hidden)
            reading.hidden.grad[c] += d_CV @ weight.detach()
            if gradient.head is not None:
                gradient.sums[gradient.head].add_(d_CV.T @ hidden)
            if gradient.bias is not None:
                gradient.sums[gradient.bias].add_(d_CV.sum(0))


def backbone_backward(reading: Reading) -> None:
    """From the hidden states' gradient through the backbone, once."""
    if reading.hidden.grad is None or not reading.packed.requires_grad:
        return
    d_TD = torch.zeros_like(reading.packed).index_add_(0, reading.index, reading.hidden.grad)
    torch.autograd.backward([reading.packed], [d_TD])


class Fixed:
    """The second pass of a coupled objective: coefficients already known, nothing left to couple."""

    couples: Literal["token", "rollout", "group", "batch"] = "token"

    def __init__(self, live: frozenset[Need], coefficients: Mapping[Need, Array], on: Array) -> None:
        """Coefficients are d loss / d column over the whole batch (N or NK)."""
        self.live = live
        self.names = {n: f"pull.{i}" for i, n in enumerate(sorted(live, key=repr))}
        self.columns: dict[Need | str, Array] = {"pull.on": 1.0 * on, **{self.names[n]: c for n, c in coefficients.items()}}

    def on(self, part: Batch) -> Array:
        """The tokens of the first pass."""
        return part.columns["pull.on"] != 0

    def __call__(self, part: Batch, live: Mapping[Need, Array]) -> tuple[Array, Metrics]:
        """A linear form with the coefficients as its slope."""
        on = self.on(part)
        return sum((part.columns[self.names[n]][on] * v[on]).sum() for n, v in live.items()), {}


def coefficients(
    batch: Batch, objective: Objective, columns: Mapping[Need, Array], device: torch.device, dtype: torch.dtype
) -> tuple[Fixed, float, Metrics]:
    """D loss / d live columns over the undivided batch, from values already read."""
    on = np.asarray(objective.on(batch), bool)
    index = torch.as_tensor(np.flatnonzero(on), device=device)
    needs = list(columns)
    leaves = {n: torch.as_tensor(columns[n][on], device=device).to(dtype).requires_grad_() for n in needs}
    loss, metrics = objective(tensors(batch, device, dtype), as_columns(leaves, index, len(on)))
    pulls = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    full = {
        n: spread((torch.zeros_like(leaves[n]) if c is None else c).double().cpu().numpy(), np.flatnonzero(on), len(on))
        for n, c in zip(needs, pulls, strict=True)
    }
    return Fixed(frozenset(needs), {n: np.nan_to_num(c) for n, c in full.items()}, on), float(loss.detach()), metrics


def parts(batch: Batch, on: Array, budget: int) -> list[list[int]]:
    """Rows with asked tokens in micro-batches of at most `budget` packed tokens, a group kept together while it fits.

    A row that alone exceeds the budget is a part of its own. The prompt of a group is counted once.
    """
    rows = np.unique(batch.row_N[on])
    order = sorted(rows.tolist(), key=lambda r: (str(batch.group_R[r]), r))
    out: list[list[int]] = []
    used, seen = 0, set()
    for r in order:
        turns = batch.rows[r].turns
        first = turns[0].context
        own = sum(len(t.response) + t.observed for t in turns)
        cost = own + (0 if first in seen else len(first))
        if not out or used + cost > budget:
            out.append([])
            used, seen, cost = 0, set(), own + len(first)
        out[-1].append(r)
        used += cost
        seen.add(first)
    return [sorted(part) for part in out]  # the batch's own order, which a part's columns are written back in


def is_one_pass(batch: Batch, rows: Sequence[Sequence[int]], couples: str) -> bool:
    """Whether every part may be differentiated by itself."""
    if couples in ("token", "rollout") or len(rows) <= 1:
        return True
    if couples == "batch":
        return False
    homes = [{str(batch.group_R[r]) for r in part} for part in rows]
    return sum(map(len, homes)) == len(set().union(*homes))


def pull(
    network: Network, networks: Mapping[Source, Network], batch: Batch, objective: Objective, budget: int
) -> tuple[dict[str, Tensor], Metrics]:
    """The gradient of the whole batch (name -> fp32), and its metrics with the loss."""
    on = np.asarray(objective.on(batch), bool)
    rows = parts(batch, on, budget)
    loss, metrics = 0.0, {}
    gradient = Gradient(network)
    try:
        if not is_one_pass(batch, rows, objective.couples):
            needs = sorted(objective.live, key=repr)
            columns: dict[Need, Array] = {}
            for part in rows:
                at = np.isin(batch.row_N, part)
                for n, v in values(cut(batch, part), needs, networks, on[at]).items():
                    columns.setdefault(n, np.full((len(on), *v.shape[1:]), np.nan))[at] = v
            fixed, loss, metrics = coefficients(batch, objective, columns, network.device, wide(network.dtype))
            batch = replace(batch, columns={**batch.columns, **fixed.columns})
            for part in rows:
                pull_part(network, networks, cut(batch, part), fixed, gradient)
        else:
            for part in rows:
                more, m = pull_part(network, networks, cut(batch, part), objective, gradient)
                loss, metrics = loss + more, merge(metrics, m)
    finally:
        gradient.close()
    return gradient.sums, {**metrics, "loss": (loss, 1.0), "read_tokens": (float(on.sum()), 1.0)}
