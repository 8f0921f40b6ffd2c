"""Sums and differences of a few numbers, with their scorer: the quickstart's task, wheels only.

Questions and scores equal those of reasoning-gym's chain_sum (0.1.25, item i of seed s is drawn from Random(s + i)), which a
test holds; the split is ours. Since neighbouring seeds share items there, train and test are split by the question's text.
Evidence grade: CODE.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from typing import Any

from oneloop.extract import ASKS, EXTRACTS, extract
from oneloop.stages import Environment, Item, setting

OPENING = "State the final answer to the following arithmetic problem:"


def question(seed: int, terms: tuple[int, int], digits: tuple[int, int]) -> tuple[str, str]:
    """A problem and its answer: a number of terms and of digits, drawn uniformly, joined by + and -."""
    rng = random.Random(seed)
    num_terms, num_digits = rng.randint(*terms), rng.randint(*digits)
    low, high = 10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits - 1
    numbers = [rng.randint(low, high) for _ in range(num_terms)]
    signs = ["+", *(rng.choice(["+", "-"]) for _ in range(num_terms - 1))]
    total = sum(n if sign == "+" else -n for sign, n in zip(signs, numbers, strict=True))
    tail = "".join(f" {sign} {n}" for sign, n in zip(signs[1:], numbers[1:], strict=True))
    return f"{OPENING} {numbers[0]}{tail} =", str(total)


def similarity(answer: str | None, gold: str) -> float:
    """1 for an equal number (sign, commas, leading zeros, decimals tolerated), else gold's share of an answer that holds it."""
    if not answer:
        return 0.0
    plain = answer.replace(",", "")
    try:
        if Decimal(plain) == Decimal(gold.replace(",", "")):
            return 1.0
    except DecimalException:
        pass
    return len(gold) / len(plain) if gold in plain else 0.0


def score(text: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on a response (text only, nothing is executed): value, and whether it had the format at all."""
    answer = extract(text, meta["extract"])
    value = similarity(answer, meta["answer"])
    return {"value": value if meta["partial"] else float(value == 1.0), "parts": {"format": float(answer is not None)}}


def in_test(text: str, share: float) -> bool:
    """Whether a question belongs to the held-out split, by its text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < share * 2**32


@dataclass(frozen=True)
class Arithmetic(Environment):
    """chain_sum. Both splits follow the generator's own frequencies; the questions of the test split are distinct.

    There are only 200 questions of two one-digit terms, so a test split of 256 holds all of its half of them.
    """

    min_terms: int = setting(2, low=1, high=20)
    max_terms: int = setting(2, low=1, high=20)
    min_digits: int = setting(1, low=1, high=12)
    max_digits: int = setting(2, low=1, high=12)
    extract: str = setting("last_number", one_of=EXTRACTS)
    partial: bool = setting(False)
    train_size: int = setting(2048, low=1, high=10**7, unit="questions")
    test_size: int = setting(256, low=1, high=10**6, unit="questions")
    test_share: float = setting(0.5, low=0.01, high=0.99, unit="of all possible questions")
    seed: int = setting(0, low=0, high=2**40)

    def __post_init__(self) -> None:
        """Refuses an empty range. Raises ValueError."""
        super().__post_init__()
        for what in ("terms", "digits"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low > high:
                raise ValueError(f"Arithmetic.min_{what} = {low}: at most max_{what} = {high}")

    def items(self, split: str) -> Sequence[Item]:
        """Raises ValueError where the task has too few distinct questions for the split."""
        if split not in ("train", "test"):
            raise ValueError(f"split = {split!r}: 'train' or 'test'")
        found = self._held_out() if split == "test" else self._training()
        wanted = self.test_size if split == "test" else self.train_size
        if len(found) < wanted:
            raise ValueError(
                f"arithmetic has only {len(found)} distinct {split} questions of {wanted}: "
                "raise max_terms or max_digits, or lower test_size"
            )
        return [self._item(f"{split}-{i}", *self._draw(i)) for i in found]

    def _draw(self, i: int) -> tuple[str, str]:
        return question(self.seed + i, (self.min_terms, self.max_terms), (self.min_digits, self.max_digits))

    def _training(self) -> list[int]:
        """Draws in order, those of the other split left out."""
        draws = (i for i in range(self.train_size * 200) if not in_test(self._draw(i)[0], self.test_share))
        return list(itertools.islice(draws, self.train_size))

    def _held_out(self) -> list[int]:
        """Distinct questions, of each kind (how many terms and digits) as many as the generator draws.

        A kind that has too few leaves its place to the others.
        """
        quota = Counter(self._kind(i) for i in range(self.test_size))
        chosen, spare, seen = [], [], set()
        for i in range(self.test_size * 200):
            text, kind = self._draw(i)[0], self._kind(i)
            if text in seen or not in_test(text, self.test_share):
                continue
            seen.add(text)
            (chosen if quota[kind] > 0 else spare).append(i)
            quota[kind] -= 1
            if len(chosen) == self.test_size:
                break
        return sorted(chosen + spare[: self.test_size - len(chosen)])

    def _kind(self, i: int) -> tuple[int, int]:
        rng = random.Random(self.seed + i)
        return rng.randint(self.min_terms, self.max_terms), rng.randint(self.min_digits, self.max_digits)

    def _item(self, name: str, text: str, answer: str) -> Item:
        meta = {
            "answer": answer,
            "extract": self.extract,
            "partial": self.partial,
            "scorer": "oneloop.environments.arithmetic:score",
        }
        said = {"tag": f"<answer>{answer}</answer>", "boxed": f"\\boxed{{{answer}}}"}.get(self.extract, answer)
        messages = ({"role": "user", "content": text + ASKS[self.extract]},)
        return Item(name, messages, meta, demonstration=said)
