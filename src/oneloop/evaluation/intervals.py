"""Intervals over problems: Wilson's for a proportion, the paired bootstrap for a difference. 95% unless said otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054  # 97.5% quantile of the normal distribution


def wilson(successes: float, n: int, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval of a proportion (1927). n = 0 gives (0, 1): nothing is known."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))  # rounding must not exclude 0 of n or n of n


def paired(
    before: Sequence[float], after: Sequence[float], *, draws: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean difference over the same problems, and its bootstrap interval. Raises ValueError on unequal lengths."""
    d = np.asarray(after, float) - np.asarray(before, float)
    if len(before) != len(after) or not len(d):
        raise ValueError(f"paired needs the same problems on both sides: {len(before)} and {len(after)}")
    means = np.random.default_rng(seed).choice(d, (draws, len(d))).mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(d.mean()), float(low), float(high)
