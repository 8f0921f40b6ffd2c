"""One forward for training, whatever the model: packed where that is exact, padded where it is not, and why.

At load a leak probe runs a few random responses packed and apart. Linear attention, convolutions along the sequence and
classes that ignore the attention interface fail it.

Axes: T tokens of a tree, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.engine import padded, vector_maths
from oneloop.engine.attention import NAME, PLAN, Plan, packing
from oneloop.engine.tree import Tree

vector_maths.settle()

# Root mean square difference of log-probs packed and apart, in nats. Above rounding: norms and softmax run in fp32 even in
# fp64 models, and SmolLM2-135M measures 0.08 to 0.12 in bf16 and 6e-6 in fp32 on random tokens.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
# Largest relative change of a hidden state when a sibling's tokens change: none, but for experts batched another way.
LEAK = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class Backbone:
    """The part of a causal language model below its head, run over trees of sequences.

    `packed` says which path runs; `reason` why it is the padded one (empty when packed). A packed model is switched to
    the attention implementation `oneloop_tree`, under which it still generates and takes ordinary batches.
    """

    def __init__(self, model: nn.Module, *, seed: int = 0) -> None:
        self.model = model
        vocab = int(_inner(model).get_input_embeddings().weight.shape[0])
        self.reason = probe(model, vocab=vocab, generator=torch.Generator().manual_seed(seed)) or ""
        self.packed = not self.reason
        if self.packed:
            _inner(model).set_attn_implementation(NAME)

    def __call__(self, sequences: Sequence[Sequence[int]] | Tree) -> tuple[Tensor, Tree]:
        """Last hidden states [T, D], with gradient, and the tree whose `node_of(sequence, position)` finds a row."""
        tree = sequences if isinstance(sequences, Tree) else Tree.of(sequences)
        if self.packed:
            return hidden_states(self.model, tree), tree
        return padded.hidden_states(decoder(self.model), tree), tree


def hidden_states(model: nn.Module, tree: Tree, *, plan: Plan | None = None) -> Tensor:
    """Last hidden state (after the final norm) of every token of the tree, [T, D], with gradient.

    `model` is a transformers causal language model, or a peft adapter over one, whose attention implementation is
    `oneloop_tree`. Give `plan` to use one made before.
    """
    backbone = decoder(model)
    device = next(backbone.parameters()).device
    plan = plan or Plan(tree, device)
    with packing(plan):
        out = backbone(
            input_ids=tree.ids_T[None].to(device),
            position_ids=plan.position_T[None],
            use_cache=False,
            **{PLAN: plan},
        )
    if not plan.used:
        raise ValueError(f"{type(backbone).__name__} does not use the attention interface: it cannot run packed")
    return out.last_hidden_state[0]


def decoder(model: nn.Module) -> nn.Module:
    """The module below the head. Adapters injected into its layers stay; prompt-learning adapters are refused."""
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError("prompt-learning adapters are not supported: use LoRA")
    inner = _inner(model)
    found = inner.get_decoder()
    if found is inner:  # transformers did not know; most classes call it `model`
        found = getattr(inner, "model", None)
    if not isinstance(found, nn.Module):
        raise ValueError(f"cannot find the module below the head of {type(inner).__name__}")
    return found


def _inner(model: nn.Module) -> Any:
    get_base = getattr(model, "get_base_model", None)
    return get_base() if get_base else model


# ------------------------------------------------------------------ the probe


def probe(model: nn.Module, *, vocab: int, generator: torch.Generator) -> str | None:
    """Why `model` cannot run packed, in one line; None if it can. Leaves the model as it was.

    Three responses of unequal lengths to one prompt, and a second turn after one of them, run packed and apart; then
    one response's tokens change, and no other row may move.
    """
    inner = _inner(model)
    before = inner.config._attn_implementation
    first, changed, ranges = _probe_sequences(vocab, generator)
    with torch.no_grad(), _evaluating(model):
        try:
            apart = _log_probs_apart(model, first)
            inner.set_attn_implementation(NAME)
            if inner.config._attn_implementation != NAME:
                return f"{type(inner).__name__} does not use transformers' attention interface"
            tree, other = Tree.of(first), Tree.of(changed)
            hidden, moved = hidden_states(model, tree), hidden_states(model, other)
            packed = _log_probs(model, hidden, tree, first)
        except Exception as error:  # whatever a model raises, it means the same: not packed
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        finally:
            inner.set_attn_implementation(before)
    return _verdict(hidden, moved, _untouched(tree, ranges), packed, apart)


def _verdict(hidden: Tensor, moved: Tensor, untouched: Tensor, packed: Tensor, apart: Tensor) -> str | None:
    leak = float((hidden - moved)[untouched].abs().max() / hidden.abs().max())
    gap = float((packed - apart).square().mean().sqrt())
    if not leak <= LEAK.get(hidden.dtype, 1e-4):
        return f"a response's tokens reach other responses (hidden states move by {leak:.1e} of their size)"
    if not gap <= TOLERANCE.get(hidden.dtype, 1e-3):
        return f"log-probs packed and apart differ by {gap:.1e} nats (root mean square)"
    return None


def _probe_sequences(vocab: int, generator: torch.Generator) -> tuple[list[list[int]], list[list[int]], range]:
    """Sequences; the same with one response's later tokens changed; which positions of sequence 1 those are."""

    def draw(n: int) -> list[int]:
        return torch.randint(vocab, (n,), generator=generator).tolist()

    prompt, turn = draw(19), draw(6)
    # Ascending first tokens: the changed response stays first of its siblings, so what it leaks has somewhere to go.
    heads = sorted(torch.randperm(vocab, generator=generator)[:3].tolist())
    answers = [[head, *draw(n)] for head, n in zip(heads, (6, 3, 10), strict=True)]
    sequences = [prompt + a for a in answers] + [prompt + answers[1] + turn]
    tail = [(t + 1) % vocab for t in answers[0][1:]]
    changed = [prompt + answers[0][:1] + tail, *sequences[1:]]
    return sequences, changed, range(len(prompt) + 1, len(sequences[0]))


def _untouched(tree: Tree, positions: range) -> Tensor:
    keep = torch.ones(tree.num_tokens, dtype=torch.bool)
    keep[tree.node_of([0] * len(positions), list(positions))] = False
    return keep


def _log_probs(model: nn.Module, hidden: Tensor, tree: Tree, sequences: Sequence[Sequence[int]]) -> Tensor:
    rows = torch.cat([tree.path(s)[:-1] for s in range(len(sequences))]).to(hidden.device)
    return _gather(model, hidden[rows], [t for s in sequences for t in s[1:]])


def _log_probs_apart(model: nn.Module, sequences: Sequence[Sequence[int]]) -> Tensor:
    backbone = decoder(model)
    device = next(backbone.parameters()).device
    rows = [backbone(input_ids=torch.tensor([s], device=device), use_cache=False).last_hidden_state[0, :-1] for s in sequences]
    return _gather(model, torch.cat(rows), [t for s in sequences for t in s[1:]])


def _gather(model: nn.Module, hidden: Tensor, targets: list[int]) -> Tensor:
    head = _inner(model).get_output_embeddings()
    if head is None:  # a model without a vocabulary head: its hidden states, scaled, stand in for log-probs
        return hidden / hidden.abs().max()
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logp = head(hidden).to(wide).log_softmax(-1)
    return logp.gather(1, torch.tensor(targets, device=logp.device)[:, None])[:, 0]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and every module's mode put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
