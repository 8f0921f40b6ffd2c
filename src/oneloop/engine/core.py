"""The engine of one process: networks, versions of their weights, sampling, columns and pulls. It knows no method."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oneloop.batch import cut
from oneloop.data import Array, Batch, Ids, Need, Noise, Prompt, Source
from oneloop.engine import passes
from oneloop.engine.device import pick_device, pick_dtype
from oneloop.engine.hub import ModelError
from oneloop.engine.network import Network, digest_of, load_module, perturbation
from oneloop.engine.service import DecoderPool, Service, Weights
from oneloop.ops import weight
from oneloop.stages import Item, Learner, Metrics, Model, Objective


class TorchEngine:
    """networks: name -> Network. version: what is published now. digests: model -> digest of the published weights."""

    def __init__(
        self,
        models: Mapping[str, Model],
        learners: Mapping[str, Learner],
        *,
        slots: int = 64,
        token_budget: int = 4096,
        lag: int = 0,
        source: Path | None = None,
    ) -> None:
        """Loads every model, from its source or from a checkpoint's folder. Raises ModelError with one line."""
        self.device, self.token_budget = pick_device(), token_budget
        self.networks: dict[str, Network] = {}
        for name, spec in models.items():
            trains = tuple(lrn.trains for lrn in learners.values() if lrn.model == name)
            self.networks[name] = self._load(name, self._spec(spec, models), trains, source)
        self.tokenizer = load_tokenizer(next(iter(self.networks.values())).spec.source)
        self.version, self.digests = 0, {n: net.digest() for n, net in self.networks.items()}
        self.kept: dict[str, deque[tuple[int, dict[str, Tensor], str]]] = {n: deque(maxlen=lag) for n in self.networks if lag}
        self.shadows: dict[str, torch.nn.Module] = {}
        self.starts: dict[str, Network] = {}
        self.service = Service(DecoderPool(self, slots), self.text, self.stop_ids())

    def _spec(self, spec: Model, models: Mapping[str, Model]) -> Model:
        """A model whose source is another model here starts from that one's source."""
        while spec.source in models and models[spec.source] is not spec:
            spec = replace(spec, source=models[spec.source].source)
        return spec

    def _load(self, name: str, spec: Model, trains: tuple[str, ...], source: Path | None) -> Network:
        dtype = pick_dtype(spec.dtype, self.device)
        network = Network(name, spec, load_module(spec, dtype, self.device), trains=trains)
        if source is not None and (source / name).exists():
            network.restore(source / name)
        network.check_head()
        return network

    # ------------------------------------------------------------------ text

    def stop_ids(self) -> frozenset[int]:
        """All of the model's end tokens."""
        config = next(iter(self.networks.values())).module.generation_config
        ids = getattr(config, "eos_token_id", None)
        found = [ids] if isinstance(ids, int) else list(ids or [])
        end = self.tokenizer.eos_token_id
        return frozenset(found + ([end] if end is not None else []))

    def encode(self, text: str) -> Ids:
        """Ids of a text as it stands, no special token added."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: Ids) -> str:
        """Text of ids, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def prompt(self, item: Item, task: str) -> Prompt:
        """The item's messages through the model's own chat template, which adds what special tokens it wants, once."""
        ids = self.tokenizer.apply_chat_template(
            list(item.messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        return Prompt(item.id, tuple(ids), task, dict(item.meta))

    # ------------------------------------------------------------------ sampling and versions

    def sampler(self, model: str, version: int, noise: Noise | None = None) -> Any:
        """The Sampler of one version; its turns' spans say so."""
        if model not in self.networks:
            raise ModelError(f"a request names model {model!r}: there are {', '.join(self.networks)}")
        return self.service.sampler(Weights(model, version, noise))

    def publish(self, version: int) -> Mapping[str, str]:
        """The weights as they stand are this version from now on; older ones are kept as far as the lag reaches."""
        self.version = version
        for name, network in self.networks.items():
            if network.moving:
                self.digests[name] = network.digest()
        self.starts.clear()
        return self.digests

    def before_update(self) -> None:
        """Keeps the published weights for samplers that lag behind."""
        for name, kept in self.kept.items():
            if not kept or kept[-1][0] != self.version:
                kept.append((self.version, self.networks[name].snapshot(), self.digests[name]))

    def shadow_of(self, weights: Weights) -> tuple[torch.nn.Module, str]:
        """A second module holding an older version, or perturbed weights. Raises ValueError where the version is gone."""
        network = self.networks[weights.model]
        if weights.version == self.version:
            base, digest = network.snapshot(), self.digests[weights.model]
        else:
            found = [(s, d) for v, s, d in self.kept.get(weights.model, ()) if v == weights.version]
            if not found:
                raise ValueError(f"version {weights.version} of {weights.model} is no longer kept")
            base, digest = found[0]
        if weights.model not in self.shadows:
            self.shadows[weights.model] = copy.deepcopy(network.module)
        module = self.shadows[weights.model]
        own = dict(module.named_parameters())
        noise = self.noise(weights.model, weights.noise) if weights.noise else {}
        with torch.no_grad():
            for n, p in own.items():
                if n in base:
                    p.copy_(base[n].float() + noise[n] if n in noise else base[n])
        return module, digest_of(own) if weights.noise else digest

    # ------------------------------------------------------------------ learning

    def weights(self, model: str) -> Mapping[str, Any]:
        """What an optimiser moves."""
        return self.networks[model].weights()

    def install(self, model: str, weights: Any) -> None:
        """New weights."""
        self.networks[model].install(weights)

    def noise(self, model: str, noise: Noise) -> dict[str, Tensor]:
        """A perturbation of what trains, regenerated from its seed."""
        return perturbation(self.networks[model].masters, noise)

    def columns(self, batch: Batch, needs: Iterable[Need], on: Array | None = None) -> dict[Need, Array]:
        """Start columns, filled in where asked and still missing."""
        out: dict[Need, Array] = {}
        alive = np.logical_or.reduce([w > 0 for w in batch.streams.values()]) if on is None else on
        for need in needs:
            have = batch.columns.get(need)
            ask = weight(batch, need.on) != 0 if need.on else alive
            ask = ask & on if on is not None else ask
            missing = ask & np.isnan(have.reshape(len(ask), -1)[:, 0]) if have is not None else ask
            out[need] = np.full(len(ask), np.nan) if have is None else have.copy()
            for rows in passes.parts(batch, missing, self.token_budget) if missing.any() else []:
                at = np.isin(batch.row_N, rows)
                part = cut(batch, sorted(rows))
                v = passes.values(part, [need], self._networks([need], part), missing[at])[need]
                if v.ndim > out[need].ndim:
                    out[need] = np.full((len(ask), *v.shape[1:]), np.nan)
                fill = np.flatnonzero(at)[missing[at]]
                out[need][fill] = v[missing[at]]
        return out

    def pull(
        self, model: str, batch: Batch, objective: Objective, fold: Callable[..., Any] | None = None
    ) -> tuple[dict[str, Tensor], Metrics]:
        """The gradient of the objective over the batch."""
        if fold is not None:
            raise NotImplementedError("this engine has no per-layer fold")
        sources = self._networks(objective.live, batch)
        return passes.pull(self.networks[model], sources, batch, objective, self.token_budget)

    def keep_start(self, needs: Iterable[Need]) -> None:
        """Before the first update of a step: copies of trained models that a live need also reads as they were at the start."""
        self.before_update()
        for source in {s for n in needs for s in n.of if s.at == "start"}:
            network = self.networks.get(source.model)
            if network is not None and network.parameters:
                self.starts[source.model] = copy.deepcopy(network)

    def _networks(self, needs: Iterable[Need], batch: Batch) -> dict[Source, Network]:
        """The network each source reads. A source like teacher.{task} needs a batch of one task."""
        out = {}
        for source in {s for n in needs for s in n.of}:
            name = source.model
            if "{task}" in name:
                tasks = {r.prompt.task for r in batch.rows}
                if len(tasks) > 1:
                    raise NotImplementedError("a routed teacher reads one task a batch")
                name = name.replace("{task}", tasks.pop())
            if name not in self.networks:
                raise ModelError(f"no model is called {name!r}: there are {', '.join(self.networks)}")
            is_start = source.at == "start" and name in self.starts
            out[source] = self.starts[name] if is_start else self.networks[name]
        return out

    def measure(self, model: str, batch: Batch) -> Callable[[Any], float]:
        """The KL (nats a token) that a displacement of the weights would make on this batch's sampled tokens."""

        def kl(displacement: Mapping[str, Tensor]) -> float:
            network = self.networks[model]
            need = Need("logp", on="sampled")
            clean = replace(batch, columns={k: v for k, v in batch.columns.items() if not isinstance(k, Need)})
            before = self.columns(clean, [need])[need]
            saved = {n: w.clone() for n, w in network.masters.items()}
            network.install({n: w + displacement[n] for n, w in saved.items() if n in displacement})
            after = self.columns(clean, [need])[need]
            network.install(saved)
            gap = (after - before)[~np.isnan(before)]
            return float(np.mean(np.exp(gap) - 1 - gap))

        return kl

    # ------------------------------------------------------------------ disk

    def save(self, folder: Path) -> None:
        """models/<name>/ for every network that changes."""
        for name, network in self.networks.items():
            if network.moving:
                network.save(folder / name, self.tokenizer)


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a model's source. Raises ModelError with one line."""
    from transformers import AutoTokenizer

    from oneloop.engine.hub import resolve

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(source))
    except (OSError, ValueError) as error:
        raise ModelError(f"{source} has no tokenizer: {' '.join(str(error).split())[:200]}") from None
    if not tokenizer.chat_template:
        opens = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if opens else "") + PLAIN_TEMPLATE
    return tokenizer


PLAIN_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
