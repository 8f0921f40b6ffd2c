"""Small runs for the promises: tiny models of several families, cheap rewards, and one step's batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from oneloop.collect import Collected
from oneloop.data import Batch, Rollout, Score, State
from oneloop.lab.tiny import tiny_tokenizer
from oneloop.loop import assemble, step
from oneloop.stages import Reward

WORDS = tuple(f"w{i}" for i in range(8))
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,  # far from uniform, so that a wrong temperature shows
}
FAMILIES = {
    "llama": lambda **k: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **k)),
    "qwen2": lambda **k: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, **k)),
    "gemma": lambda **k: tf.GemmaForCausalLM(tf.GemmaConfig(**SIZES, head_dim=8, **k)),
}


def family(folder: Path, kind: str = "llama", seed: int = 0) -> str:
    """A model directory with peaked predictions."""
    tokenizer = tiny_tokenizer(WORDS)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[kind](vocab_size=len(tokenizer), tie_word_embeddings=False, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def parity(rollout: Rollout) -> float:
    """A score that varies within every group."""
    return float(sum(t for turn in rollout.turns for t in turn.response) % 2)


@dataclass(frozen=True)
class Parity(Reward):
    """Scores without a sandbox."""

    async def __call__(self, group: Sequence[Rollout], state: State) -> list[Score]:
        return [Score(parity(r)) for r in group]


def steps(session: Any, n: int = 1) -> list[dict[str, float]]:
    """The metrics of n steps."""

    async def work() -> list[dict[str, float]]:
        return [await step(session.run) for _ in range(n)]

    return asyncio.run(work())


class NoLog:
    """Nothing is kept."""

    def read(self, step: int, round_: int) -> None:
        return None

    def write(self, *_: Any) -> None:
        pass


def batch_of(session: Any, fresh: Collected | None = None) -> Batch:
    """What the next step would learn from; the run's state stays as it is."""
    state = replace(session.run.state, mechanisms=dict(session.run.state.mechanisms))
    run = replace(session.run, log=NoLog(), state=state)
    return asyncio.run(assemble(run, fresh or Collected(), dict(run.state.mechanisms)))[0]
