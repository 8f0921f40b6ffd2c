"""Pictures of a run: its curves as one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (  # title, unit, metrics with their labels
    ("Reward", "mean score", {"collect/score": "sampled, training", "test/accuracy": "greedy, held-out"}),
    ("Entropy", "nats a token", {"collect/entropy": "sampled tokens"}),
    ("Response length", "tokens", {"collect/response_tokens": "mean"}),
    ("Rates", "share", {"collect/truncated": "truncated", "collect/groups_varying": "groups that vary"}),
)
COLOURS = ("#2f6690", "#d1495b", "#66a182")


def curves(
    metrics: Sequence[Mapping[str, Any]],
    path: Path,
    title: str,
    points: Mapping[str, Sequence[tuple[int, float, float, float]]] | None = None,
) -> Path:
    """Four panels against the step; a faint line is the value, a strong one its running mean over five steps.

    points: metric -> (step, value, low, high) measurements with intervals, drawn over the panel that holds the metric.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), constrained_layout=True)
    for axis, (name, unit, lines) in zip(axes.flat, PANELS, strict=True):
        for colour, (key, label) in zip(COLOURS, lines.items(), strict=False):
            found = [(m["step"], m[key]) for m in metrics if key in m]
            if found:
                x, y = map(np.array, zip(*found, strict=True))
                axis.plot(x, y, color=colour, alpha=0.3 if len(x) > 5 else 1.0, lw=1, label=None if len(x) > 5 else label)
                if len(x) > 5:
                    axis.plot(x, running_mean(y), color=colour, lw=2, label=label)
            for step, value, low, high in (points or {}).get(key, ()):
                error = [[value - low], [high - value]]
                axis.errorbar(step, value, error, fmt="o", color=colour, capsize=4, label=None if found else label)
        axis.set(title=name, xlabel="step", ylabel=unit)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            handles, labels = axis.get_legend_handles_labels()
            unique = dict(zip(labels, handles, strict=True))
            axis.legend(unique.values(), unique.keys(), frameon=False, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def running_mean(y: Any, width: int = 5) -> Any:
    """Mean of up to `width` values around each one."""
    import numpy as np

    half = width // 2
    return np.array([y[max(0, i - half) : i + half + 1].mean() for i in range(len(y))])
