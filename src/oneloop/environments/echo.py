"""Say the word you were shown: a task that a random tiny model learns in seconds, for tests and first looks at a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oneloop.stages import Environment, Item, setting


def score(text: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """1 where the first word is the one asked for (text only, nothing is executed)."""
    said = text.split()
    return {"value": float(said[:1] == [meta["answer"]]), "parts": {"format": float(len(said) == 1)}}


@dataclass(frozen=True)
class Echo(Environment):
    """`words` one-word prompts w0, w1, ...; both splits hold them all, since there is nothing to generalise."""

    words: int = setting(8, low=1, high=10_000)

    def items(self, split: str) -> Sequence[Item]:
        """One item a word. Raises ValueError on an unknown split."""
        if split not in ("train", "test"):
            raise ValueError(f"split = {split!r}: 'train' or 'test'")
        return [
            Item(
                f"{split}-{i}",
                ({"role": "user", "content": f"w{i}"},),
                {"answer": f"w{i}", "scorer": "oneloop.environments.echo:score"},
                demonstration=f"w{i}",
            )
            for i in range(self.words)
        ]
