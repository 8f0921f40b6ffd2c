"""One loaded network: a transformers causal language model, its scalar heads, its fp32 master weights and their digest.

The masters are what optimisers move; the module computes in its own dtype (bf16 where the CPU multiplies it). Pure bf16 weights
would round small updates away, so they are never trained directly.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from oneloop.data import Noise
from oneloop.engine.backbone import Backbone
from oneloop.engine.hub import ModelError, resolve
from oneloop.stages import Model
from oneloop.state import load_arrays, raw_bytes, save_arrays

MASTERS = "masters.safetensors"
HEADS = "heads.safetensors"


class Network:
    """module: the language model. heads: name -> linear to one number. masters: name -> fp32 weight of what trains."""

    def __init__(self, name: str, spec: Model, module: nn.Module, *, trains: tuple[str, ...] = ()) -> None:
        """Prepares a module for training what matches `trains`. Raises ModelError where nothing matches."""
        self.name, self.spec, self.module = name, spec, module
        width = inner(module).get_input_embeddings().weight.shape[1]
        wide = torch.promote_types(self.dtype, torch.float32)
        self.heads = nn.ModuleDict({h: nn.Linear(width, 1) for h in spec.heads}).to(self.device, wide)
        for p in self.heads.parameters():
            nn.init.zeros_(p)
        if spec.checkpoint:
            checkpoint_activations(module)
        self.backbone = Backbone(module)
        adapted = spec.adapter is not None
        self.parameters: dict[str, nn.Parameter] = {}
        for n, p in [*module.named_parameters(), *((f"heads.{n}", p) for n, p in self.heads.named_parameters())]:
            allowed = p.requires_grad if adapted and not n.startswith("heads.") else True
            wanted = any(matches(n, pattern) for pattern in trains)
            p.requires_grad_(allowed and wanted)
            if p.requires_grad:
                self.parameters[n] = p
        if trains and not self.parameters:
            raise ModelError(f"model {name}: no parameter matches {' or '.join(trains)}: it would train nothing")
        # what moves: what trains, or everything of a model that follows another (an average in bf16 would stand still)
        self.moving = self.parameters or (dict(module.named_parameters()) if spec.follow else {})
        self.masters: dict[str, Tensor] = {
            n: p.detach() if p.dtype in (torch.float32, torch.float64) else p.detach().float() for n, p in self.moving.items()
        }

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return inner(self.module).get_input_embeddings().weight.dtype

    def weights(self) -> Mapping[str, Tensor]:
        """What an optimiser moves: masters of a network that trains, else its own parameters."""
        return self.masters or {n: p.detach() for n, p in self.module.named_parameters()}

    @torch.no_grad()
    def install(self, weights: Mapping[str, Tensor]) -> None:
        """Takes new weights: masters first, then the module's own dtype. Raises ModelError on a name it does not have."""
        own = self.moving or dict(self.module.named_parameters())
        for name, new in weights.items():
            if name not in own:
                raise ModelError(f"model {self.name} has no parameter {name}")
            if name in self.masters and self.masters[name] is not new:
                self.masters[name].copy_(new)
            if own[name].data_ptr() != new.data_ptr():
                own[name].copy_(new)
            else:  # moved in place already; torch's fused optimisers leave no trace of it for those who keep caches
                torch.autograd.graph.increment_version(own[name])

    def digest(self) -> str:
        """128 bits over every weight that computes: names, dtypes, shapes, bytes."""
        return digest_of(dict(self.module.named_parameters()) | {f"heads.{n}": p for n, p in self.heads.named_parameters()})

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of what moves, in the dtype it computes in."""
        return {n: p.detach().clone() for n, p in self.moving.items()}

    # ------------------------------------------------------------------ head

    def head(self) -> tuple[Tensor, Tensor | None]:
        """The vocabulary head's weight (V, D) and bias."""
        linear: Any = inner(self.module).get_output_embeddings()
        if linear is None or getattr(linear, "weight", None) is None:
            raise ModelError(f"model {self.name} has no linear vocabulary head")
        return linear.weight, getattr(linear, "bias", None)

    def shape_logits(self, raw_CV: Tensor) -> Tensor:
        """What the model's class does to the head's output: a scale, a soft cap."""
        config = inner(self.module).config.get_text_config()
        scale = getattr(config, "logit_scale", None)
        divide = getattr(config, "logits_scaling", None)
        cap = getattr(config, "final_logit_softcapping", None)
        out = raw_CV if not scale else raw_CV * scale
        out = out if not divide else out / divide
        return out if not cap else cap * torch.tanh(out / cap)

    def check_head(self) -> None:
        """Raises ModelError where our logits differ from the class's own: its head does something we do not know."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.head()[0].shape[0]
        with torch.no_grad():
            theirs = self.module(input_ids=ids, use_cache=False).logits[0].float()
            hidden, tree = self.backbone([ids[0].tolist()])
            weight, bias = self.head()
            raw = torch.nn.functional.linear(hidden[tree.path(0).to(hidden.device)], weight, bias).float()
            ours = self.shape_logits(raw)
        gap = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
        if not gap < (0.05 if self.dtype in (torch.bfloat16, torch.float16) else 1e-3):
            raise ModelError(f"model {self.name}: {type(inner(self.module)).__name__}'s head does more than a linear map")

    # ------------------------------------------------------------------ disk

    def save(self, folder: Path, tokenizer: Any = None) -> None:
        """A standard model directory, with heads and masters beside it."""
        model: Any = self.module
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if self.heads:
            save_arrays(self.heads.state_dict(), folder / HEADS)
        if self.masters:
            save_arrays(self.masters, folder / MASTERS)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Weights that `save` wrote into this network."""
        if (folder / HEADS).exists():
            self.heads.load_state_dict(load_arrays(folder / HEADS))
        if (folder / MASTERS).exists():
            self.install(load_arrays(folder / MASTERS))
        elif not self.moving:
            own = dict(self.module.named_parameters())
            stored = load_arrays(folder / "model.safetensors")
            self.install({n: stored[n] for n in own if n in stored})


def inner(module: nn.Module) -> Any:
    """The transformers model under an adapter, or itself."""
    get_base = getattr(module, "get_base_model", None)
    return get_base() if get_base else module


def checkpoint_activations(module: nn.Module) -> None:
    """Recomputes activations in the backward pass. Layers do so in training mode only; dropout stays off."""
    model = inner(module)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    module.train()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.eval()


def matches(name: str, pattern: str) -> bool:
    """A glob over a parameter's name; "!glob" is everything else."""
    return not fnmatch.fnmatchcase(name, pattern[1:]) if pattern.startswith("!") else fnmatch.fnmatchcase(name, pattern)


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """128 bits over named weights."""
    h = xxhash.xxh3_128()
    for name in sorted(weights):
        w = weights[name]
        h.update(f"{name}{w.dtype}{tuple(w.shape)}".encode())
        h.update(raw_bytes(w))
    return h.hexdigest()


def perturbation(weights: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
    """Scale x normal(seed) for every weight, in order of name, fp32: the same wherever it is regenerated."""
    generator = torch.Generator().manual_seed(noise.seed)
    return {
        n: (noise.scale * torch.randn(weights[n].shape, generator=generator)).to(weights[n].device) for n in sorted(weights)
    }


def load_module(spec: Model, dtype: torch.dtype, device: torch.device, path: Path | None = None) -> nn.Module:
    """The module of a Model: from its source, or from a checkpoint's folder. Raises ModelError with one line."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = str(path) if path else resolve(spec.source)
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        module.to(device)
    except (OSError, ValueError) as error:
        raise ModelError(f"{spec.source} does not load: {' '.join(str(error).split())[:300]}") from None
    module.eval()
    embedding: Any = module.get_input_embeddings()
    embedding.padding_idx = None  # there is no padding here, and the end token often shares its id
    if spec.blocks is not None:
        truncate(module, spec.blocks)
    return _adapted(module, spec) if spec.adapter is not None else module


def truncate(module: nn.Module, blocks: int) -> None:
    """Keeps the first blocks and the final norm."""
    decoder: Any = inner(module).get_decoder()
    have = len(decoder.layers)
    if not 1 <= blocks <= have:
        raise ModelError(f"blocks = {blocks}: the model has {have}")
    decoder.layers = decoder.layers[:blocks]
    inner(module).config.get_text_config().num_hidden_layers = blocks


def _adapted(module: nn.Module, spec: Model) -> nn.Module:
    """LoRA through peft: fp32 adapters over frozen weights."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ModelError("adapters need peft: pip install 'oneloop[lora]'") from None
    settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **dict(spec.adapter)}
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(0)  # the adapter's first weights are part of the model, the same at every start
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 calls transformers 5.24 by a name that is going
        adapted = get_peft_model(module, LoraConfig(**settings))
    for p in adapted.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return adapted
