"""What saving costs: the log and the metrics of every step, and the checkpoints, as shares of a run's time.

    python benchmarks/saving_cost.py --out docs/evidence

The model is random and small; a step is of the quickstart's size (16 prompts x 8 rollouts x 24 tokens).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oneloop import session
from oneloop.environments.echo import Echo
from oneloop.lab.tiny import tiny_model
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import Evaluate, learner
from oneloop.recipes.grpo import recipe as grpo
from oneloop.stages import Model
from oneloop.tracking.evidence import Evidence, Figure, here, write
from oneloop.tracking.rollout_log import RolloutLog
from oneloop.tracking.run_directory import RunDirectory


def timed(owner: Any, name: str, seconds: dict[str, list[float]]) -> None:
    """Every call's duration, by name."""
    real = getattr(owner, name)

    def call(*a: Any, **k: Any) -> Any:
        begin = time.perf_counter()
        try:
            return real(*a, **k)
        finally:
            seconds[name].append(time.perf_counter() - begin)

    setattr(owner, name, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, help="folder for saving_cost.json")
    args = parser.parse_args()
    torch.set_num_threads(2)
    seconds: dict[str, list[float]] = defaultdict(list)
    sizes: list[int] = []
    timed(RunDirectory, "measure", seconds)
    timed(RunDirectory, "save", seconds)
    log = RolloutLog.write

    def logged(self: RolloutLog, step: int, round_: int, *a: Any) -> None:
        log(self, step, round_, *a)
        sizes.append(self.path(step, round_).stat().st_size)

    RolloutLog.write = logged
    timed(RolloutLog, "write", seconds)
    with tempfile.TemporaryDirectory() as place:
        words = [f"w{i}" for i in range(512)]
        model = tiny_model(Path(place) / "model", words, width=args.width, layers=args.layers)
        recipe = replace(
            grpo,
            environment=Echo(512),
            models={"policy": Model(str(model), dtype="float32")},
            learners={"policy": learner(lr=1e-4)},
            prompts=Epochs(prompts=16, rollouts=8, max_tokens=24),
            evaluate=Evaluate(problems=8, max_tokens=24),
            steps=args.steps,
        )
        session.load_recipe = lambda name: recipe
        run = session.start("grpo", [], Path(place) / "run")
        weights = sum(w.numel() for w in run.engine.networks["policy"].masters.values())
        with closing(run):
            begin = time.perf_counter()
            asyncio.run(session.train(run))
            total = time.perf_counter() - begin
    usual = sorted(seconds["save"])[len(seconds["save"]) // 2]
    total -= seconds["save"].pop()  # the one at the end is outside the rule, and every run has it once
    parts = {"log": sum(seconds["write"]), "metrics": sum(seconds["measure"]), "checkpoints": sum(seconds["save"])}
    how = f"of the time of {args.steps} steps, the last checkpoint left out"
    figures = {f"{k}_share": Figure(v / total, None, "share", how) for k, v in parts.items()}
    figures |= {
        "share": Figure(sum(parts.values()) / total, None, "share", how),
        "step": Figure(total / args.steps, None, "seconds", "mean"),
        "log_step": Figure(parts["log"] / args.steps, None, "seconds", "mean, flushed to the disk"),
        "log_size": Figure(max(sizes), None, "bytes", "largest of a step"),
        "checkpoints": Figure(len(seconds["save"]), None, "count", "on the way"),
        "checkpoint": Figure(usual, None, "seconds", "median"),
    }
    for name, figure in figures.items():
        print(f"{name:20} {figure.effect:.4g} {figure.unit}")
    changes = (
        "echo task",
        f"random Llama of {weights} weights, fp32",
        "16 prompts x 8 rollouts x 24 tokens",
        f"steps={args.steps}",
    )
    if args.out:
        command = f"python benchmarks/saving_cost.py --steps {args.steps} --width {args.width} --layers {args.layers}"
        write(Evidence("saving_cost", "grpo", changes, (0,), figures, command, **here()), args.out)


if __name__ == "__main__":
    main()
