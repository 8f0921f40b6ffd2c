"""benchmarks/quickstart.py on a tiny model: two seeds become evidence, a seed that is there is skipped, others are refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oneloop.lab.tiny import tiny_model
from oneloop.tracking.evidence import read

ROOT = Path(__file__).parents[2]
RECIPE = """
from dataclasses import replace
from oneloop.environments.echo import Echo
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import Evaluate, learner
from oneloop.recipes.grpo import recipe as grpo
from oneloop.stages import Model

recipe = replace(
    grpo, name="small", base="grpo", environment=Echo(8), prompts=Epochs(prompts=4, rollouts=4, max_tokens=3), steps=3,
    models={"policy": Model("model", dtype="float32")}, learners={"policy": learner(lr=1e-2)},
    evaluate=Evaluate(every=2, problems=8, max_tokens=3),
)
"""


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "quickstart.py"),
        "--recipe",
        "small.py",
        "--out",
        "evidence/small.json",
    ]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*command, *words], cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    tiny_model(folder / "model", [f"w{i}" for i in range(8)], width=32)
    (folder / "small.py").write_text(RECIPE)
    done = run(folder, "--seeds", "1", "2")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_two_seeds_become_evidence(place: Path):
    found = read(place / "evidence" / "small.json")
    assert found.seeds == (1, 2)
    assert found.command == "python benchmarks/quickstart.py --seeds 1 2 --recipe small.py"
    assert {"accuracy_after", "format_after", "truncated_before", "gain", "minutes", "peak_memory", "steps"} <= set(
        found.figures
    )
    assert found.figures["steps"].effect == 3
    assert found.figures["peak_memory"].effect > 1e7
    for r in found.runs:
        one = found.figures[f"accuracy_after_seed_{r['seed']}"]
        assert one.effect == r["solved_after"].count("1") / 8
        assert one.interval[0] <= one.effect <= one.interval[1]
    assert (place / "evidence" / "small.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_seed_that_is_there_is_skipped_and_a_new_one_added(place: Path):
    before = {r["seed"]: r for r in read(place / "evidence" / "small.json").runs}
    done = run(place, "--seeds", "2", "5")
    assert done.returncode == 0, done.stderr
    assert "seed 2: already in" in done.stdout
    after = {r["seed"]: r for r in read(place / "evidence" / "small.json").runs}
    assert sorted(after) == [1, 2, 5]
    assert {s: after[s] for s in before} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "steps=4"], "holds seeds of other settings"),
        (["--set", "stepz=4"], "did you mean 'steps'"),
        (["--recipe", "/home/me/small.py"], "means nothing elsewhere"),
    ],
)
def test_other_settings_and_mistakes_are_refused_in_one_line(place: Path, words, said):
    done = run(place, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_evidence_renders(place: Path):
    render = load("docs/render.py")
    page = place / "README.md"
    text = "<!-- evidence: small.per_seed table --><!-- /evidence --> <!-- evidence: small.steps -->0<!-- /evidence -->"
    out = render.render(text, page, place / "evidence")
    assert "| 2 |" in out
    assert ">3<" in out
    assert "evidence/small.png" in render.render(
        "<!-- evidence: small.curves picture --><!-- /evidence -->", page, place / "evidence"
    )


def test_the_mean_over_seeds_by_hand():
    benchmark = load("benchmarks/quickstart.py")
    one = benchmark.over_seeds([0.5, 0.6, 0.7], (0.59, 0.61), "x", "share")
    half = 4.303 * 0.1 / 3**0.5
    assert one.effect == pytest.approx(0.6)
    assert one.interval == pytest.approx((0.6 - half, 0.6 + half))
    assert benchmark.over_seeds([0.1, 0.9], (0.4, 0.6), "x", "share").interval == (0.0, 1.0)
    assert benchmark.over_seeds([0.5], (0.4, 0.7), "x", "share").interval == (0.4, 0.7)
    assert benchmark.over_seeds([0.0, 0.0], (0.0, 0.015), "x", "share").interval == (0.0, 0.015)  # equal seeds are not exact
    assert json.loads(json.dumps(benchmark.peak_bytes())) > 1e7
