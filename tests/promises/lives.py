"""A run's lives: started, stopped or killed, gone on with, in this process or through the command line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from oneloop import session, state

RECIPE = """
from dataclasses import replace
{imports}
from oneloop.environments.echo import Echo
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import Evaluate, learner
from oneloop.recipes.grpo import recipe as grpo
from oneloop.stages import Model
{code}
recipe = replace(
    grpo,
    name="tiny",
    environment=Echo(8),
    models={{"policy": Model({model!r}, dtype="float32")}},
    learners={{"policy": learner(lr=1e-2)}},
    prompts=Epochs(prompts=4, rollouts=4, max_tokens=3),
    evaluate=Evaluate(problems=8, max_tokens=3),
    steps=4,
    {fields}
)
"""


def recipe_file(path: Path, model: Path | str, *, imports: str = "", code: str = "", fields: str = "") -> Path:
    """A recipe as a user would write one: the echo task on a tiny model."""
    path.write_text(RECIPE.format(model=str(model), imports=imports, code=code, fields=fields))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from oneloop.cli import main; main()", *map(str, arguments)]


def surroundings() -> dict[str, str]:
    """The environment of a command: this very package, from whatever working directory."""
    here = str(Path(state.__file__).parents[1])
    settings = {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **settings}


def oneloop(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The real command line in a process of its own."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, cwd=cwd, env=surroundings(), timeout=300, check=False
    )


def done(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(result: subprocess.CompletedProcess[str], *words: str) -> str:
    """One clear line with the fix on stderr and exit code 2, never a traceback."""
    said = [line for line in result.stderr.splitlines() if not line.startswith("alarm: ")]
    assert result.returncode == 2, (result.returncode, result.stderr, result.stdout)
    assert len(said) == 1, result.stderr
    assert said[0].startswith("oneloop: ")
    assert "Traceback" not in result.stdout
    for word in words:
        assert word in said[0], said[0]
    return said[0]


def live(run: session.Session, steps: int, *, save: bool) -> None:
    """Steps as `train` does them, up to and without `steps`; the process is gone afterwards, saved or not."""
    with closing(run):
        run.recipe = session.override(run.recipe, [f"steps={steps}"])
        before, keep = session.save, session.is_due
        session.save, session.is_due = (before if save else lambda s: None), lambda s: False
        try:
            asyncio.run(session.train(run))
        finally:
            session.save, session.is_due = before, keep


def metrics(folder: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def end(folder: Path) -> dict[str, object]:
    """Everything a run comes to: digests of weights and states (moments included), and its metrics."""
    last = max((folder / "checkpoints").glob("[0-9]*"))
    found = state.load(last)
    return {
        "weights": found.digests,
        "masters": state.digest(state.load_arrays(last / "models" / "policy" / "masters.safetensors")),
        "states": {name: state.digest(s) for name, s in found.mechanisms.items()},
        "metrics": metrics(folder),
    }
