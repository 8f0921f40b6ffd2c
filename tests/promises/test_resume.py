"""2N steps = N steps, stop, resume, N steps: weights, moments, states and metrics, bit for bit at lag 0."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest

from oneloop import session
from oneloop.credit.group_mean import GroupMean
from oneloop.engine.network import Network
from oneloop.loop import step
from oneloop.objective.divergence import Divergence
from oneloop.objective.policy import Policy
from oneloop.recipe import Recipe, learner
from oneloop.selection.drop_constant_groups import DropConstantGroups
from oneloop.stages import Model, Term
from oneloop.tracking.rollout_log import LogError, RolloutLog
from oneloop.tracking.run_directory import RunDirectory, RunError
from tests.promises.lives import end, live, metrics

N = 3
OTHERS = ("minibatches", "refill", "reference", "adapter", "bfloat16", "supervised")


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Begins a run of a recipe, or goes on with it; the recipe is asked for by its name."""

    def open_(recipe: Recipe, folder: str = "run") -> session.Session:
        monkeypatch.setattr(session, "load_recipe", lambda name: recipe)
        out = tmp_path / folder
        return session.resume(out) if (out / "run.json").exists() else session.start("toy", [], out)

    return open_


def recipes(toy, tiny) -> dict[str, Recipe]:
    reference = {"policy": Model(str(tiny), dtype="float32"), "reference": Model("policy", dtype="float32")}
    penalty = learner(Term(Policy()), Term(Divergence("reference"), weight=0.1), lr=1e-2)
    return {
        "grpo": toy("grpo", "learners.policy.optimiser.lr=1e-2", "learners.policy.optimiser.warmup=4"),
        "minibatches": toy(learners={"policy": learner(lr=1e-2, epochs=2, minibatches=2)}),
        "refill": toy(assign=(DropConstantGroups(), GroupMean()), learners={"policy": learner(lr=1e-2)}, enough=3),
        "reference": toy(models=reference, learners={"policy": penalty}),
        "adapter": toy(
            models={"policy": Model(str(tiny), dtype="float32", adapter={"r": 2})}, learners={"policy": learner(lr=1e-1)}
        ),
        "bfloat16": toy(models={"policy": Model(str(tiny), dtype="bfloat16")}, learners={"policy": learner(lr=1e-2)}),
        "supervised": toy("sft"),
    }


def whole(lives, recipe: Recipe) -> dict:
    run = lives(recipe, "whole")
    folder = run.folder.folder
    live(run, 2 * N, save=True)
    return end(folder)


def in_two(lives, recipe: Recipe, *, save: bool = True) -> dict:
    run = lives(recipe)
    folder = run.folder.folder
    live(run, N, save=save)
    live(lives(recipe), 2 * N, save=True)
    return end(folder)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("name", ["grpo", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_2n_steps_are_n_and_n(lives, toy, tiny, name):
    recipe = recipes(toy, tiny)[name]
    expected = whole(lives, recipe)
    assert len(expected["metrics"]) == 2 * N
    assert in_two(lives, recipe) == expected


def test_replayed_from_the_log_alone_when_no_checkpoint_was_reached(lives, toy, tiny):
    recipe = recipes(toy, tiny)["grpo"]
    assert in_two(lives, recipe, save=False) == whole(lives, recipe)


def forget_prompts(monkeypatch):
    opened = session._open

    def without(*a):
        run = opened(*a)
        run.run.state.mechanisms["prompts"] = run.run.mechanisms["prompts"].init()
        return run

    monkeypatch.setattr(session, "_open", without)


def forget_moments(monkeypatch):
    opened = session._open

    def without(*a):
        run = opened(*a)
        run.run.state.mechanisms["optimiser.policy"] = run.run.mechanisms["optimiser.policy"].init()
        return run

    monkeypatch.setattr(session, "_open", without)


def forget_weights(monkeypatch):
    monkeypatch.setattr(Network, "restore", lambda self, folder: None)


@pytest.mark.parametrize("forget", [forget_prompts, forget_moments, pytest.param(forget_weights, marks=pytest.mark.slow)])
def test_what_is_not_restored_is_noticed(lives, toy, tiny, monkeypatch, forget):
    """The negative control of the promise: each part of the state is needed for it."""
    recipe = recipes(toy, tiny)["grpo"]
    expected = whole(lives, recipe)
    forget(monkeypatch)
    assert in_two(lives, recipe) != expected


@pytest.mark.slow
def test_masters_and_not_rounded_weights_are_restored(lives, toy, tiny, monkeypatch):
    recipe = recipes(toy, tiny)["bfloat16"]
    expected = whole(lives, recipe)
    real = Network.restore

    def rounded(self, folder):
        real(self, folder)
        for w in self.masters.values():
            w.copy_(w.bfloat16().float())

    monkeypatch.setattr(Network, "restore", rounded)
    assert in_two(lives, recipe) != expected


@pytest.mark.slow
def test_a_log_newer_than_the_checkpoint_is_learnt_from_and_not_sampled_again(lives, toy, tiny):
    recipe = recipes(toy, tiny)["grpo"]
    expected = whole(lives, recipe)
    live(lives(recipe), 2, save=True)
    live(lives(recipe), 4, save=False)
    run = lives(recipe)
    folder = run.folder.folder
    assert (run.run.state.step, run.folder.log.steps()) == (2, [2, 3])
    assert sorted(run.later) == [2, 3]
    assert [line["step"] for line in metrics(folder)] == [0, 1]
    sampled = run.run.engine.service
    live(run, 4, save=False)
    assert sampled.sampled_tokens == 0
    live(lives(recipe), 2 * N, save=True)
    assert end(folder) == expected


def test_the_first_rollout_after_a_resume_is_sampled_by_the_checkpoints_weights(lives, toy, tiny):
    recipe = recipes(toy, tiny)["grpo"]
    run = lives(recipe)
    live(run, 2, save=True)
    saved = json.loads((run.folder.checkpoint(2) / "state.json").read_text())["digests"]["policy"]
    run = lives(recipe)
    with closing(run):
        asyncio.run(step(run.run))
        rows, _ = run.folder.log.read(2, 0)
    assert {s.digest for r in rows for t in r.turns for s in t.spans} == {saved}
    assert run.run.state.digests["policy"] != saved


@pytest.mark.slow
def test_at_lag_1_logged_steps_are_exact_and_older_weights_are_gone(lives, toy, tiny):
    recipe = session.override(recipes(toy, tiny)["grpo"], ["lag=1"])
    expected = whole(lives, recipe)
    assert [m["collect/staleness"] for m in expected["metrics"]] == [0, 1, 1, 1, 1, 1]
    live(lives(recipe), N, save=False)
    run = lives(recipe)  # no checkpoint: three steps from the log, then on
    folder = run.folder.folder
    live(run, 4, save=True)
    assert metrics(folder)[:4] == expected["metrics"][:4]
    run = lives(recipe)
    assert run.run.state.first_version == 4
    live(run, 2 * N, save=True)
    assert [m["collect/staleness"] for m in metrics(folder)] == [0, 1, 1, 1, 0, 1]


def test_a_replay_that_comes_out_otherwise_is_said(lives, toy, tiny):
    recipe = recipes(toy, tiny)["grpo"]
    live(lives(recipe), 2, save=False)
    run, said = lives(recipe), []
    run.later[1]["policy/loss"] += 1.0
    run.recipe = session.override(recipe, ["steps=2"])
    with closing(run):
        asyncio.run(session.train(run, lambda now, m: said.append((now, m)) if "alarm/replay_differs" in m else None))
    assert said == [(1, {"alarm/replay_differs": 1.0})]


def test_other_versions_are_said(lives, toy, tmp_path):
    live(lives(toy()), 1, save=True)
    body = json.loads((tmp_path / "run" / "run.json").read_text())
    body["packages"]["torch"] = "1.0"
    (tmp_path / "run" / "run.json").write_text(json.dumps(body))
    run = lives(toy())
    run.close()
    assert "torch" in run.notes[0]
    assert "began with 1.0" in run.notes[0]


@pytest.mark.slow
def test_damaged_and_foreign_logs_are_refused_before_anything_is_touched(lives, toy, tiny, tmp_path, monkeypatch):
    recipe = recipes(toy, tiny)["grpo"]
    expected = whole(lives, recipe)
    live(lives(recipe), N, save=False)
    path = RolloutLog(tmp_path / "run" / "log").path(1, 0)
    before, good = (tmp_path / "run" / "metrics.jsonl").read_bytes(), path.read_bytes()
    middle = len(good) // 2
    for bad in (good[:middle], b"", good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]):
        path.write_bytes(bad)
        with pytest.raises(LogError, match=r"000001\.0\.msgpack is damaged: remove it"):
            lives(recipe)
    path.write_bytes(good)
    with monkeypatch.context() as m:
        m.setattr("oneloop.tracking.rollout_log.VERSION", 2)
        with pytest.raises(LogError, match="has version 1, this oneloop reads 2"):
            lives(recipe)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    path.unlink()  # as it was told: the step is sampled again
    live(lives(recipe), 2 * N, save=True)
    assert end(tmp_path / "run") == expected


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_the_one_before_leads_to_the_same(lives, toy, tiny, tmp_path):
    recipe = recipes(toy, tiny)["grpo"]
    expected = whole(lives, recipe)
    for n in (1, 2, 4):
        live(lives(recipe), n, save=True)
    folder = RunDirectory(tmp_path / "run", is_new=False)
    assert folder.checkpoints() == [2, 4]
    assert folder.log.steps() == [2, 3]
    folder.close()
    for name in ("state.safetensors", "state.json", "models/policy/masters.safetensors"):
        path = tmp_path / "run" / "checkpoints" / "000004" / name
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2])
        with pytest.raises(RunError, match=r"000004 is damaged .*: remove it and resume"):
            lives(recipe)
        path.write_bytes(good)
    folder = RunDirectory(tmp_path / "run", is_new=False)
    path.parents[2].rename(tmp_path / "away")
    folder.close()
    live(lives(recipe), 2 * N, save=True)
    assert end(tmp_path / "run") == expected


def test_a_run_that_lost_all_its_checkpoints_does_not_begin_anew(lives, toy, tiny, tmp_path):
    recipe = recipes(toy, tiny)["grpo"]
    live(lives(recipe), 2, save=True)
    live(lives(recipe), N, save=False)
    (tmp_path / "run" / "checkpoints" / "000002").rename(tmp_path / "away")
    with pytest.raises(RunError, match="lost its checkpoints, its log starts at step 2"):
        lives(recipe)


def test_changed_start_weights_are_refused(lives, toy, tiny, tmp_path):
    from oneloop.lab.tiny import tiny_model

    other = tiny_model(tmp_path / "model", [f"w{i}" for i in range(8)], width=32)
    recipe = toy(models={"policy": Model(str(other), dtype="float32")})
    live(lives(recipe), 1, save=False)
    tiny_model(other, [f"w{i}" for i in range(8)], width=32, seed=1)
    with pytest.raises(RunError, match=r"start weights .* have changed"):
        lives(recipe)
