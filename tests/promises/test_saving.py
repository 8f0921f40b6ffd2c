"""What saving costs, what it leaves behind, and what it may throw away."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from oneloop import session, state
from oneloop.data import Prompt, Rollout, Score, Span, Turn
from oneloop.recipe import Recipe
from oneloop.state import State
from oneloop.tracking import run_directory
from oneloop.tracking.rollout_log import RolloutLog
from oneloop.tracking.run_directory import RunDirectory, RunError


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def saved_at(
    *, step: float, cost: float, guess: float, share: float = 0.04, steps: int = 4000, monkeypatch
) -> tuple[list[int], float]:
    """The steps after which a run saves, and the share of its time that saving took."""
    clock = Clock()
    monkeypatch.setattr(session, "guess_cost", lambda s: guess)

    def write(*_: object) -> Path:
        clock.now += cost
        return Path()

    run = SimpleNamespace(state=State(), engine=None)
    folder = SimpleNamespace(save=write)
    it = session.Session(Recipe("r", save_share=share), folder, run, None, (), clock=clock, began=clock.now)
    saves, spent = [], 0.0
    for i in range(steps):
        clock.now += step
        if session.is_due(it):
            session.save(it)
            saves.append(i)
            spent += cost
    return saves, spent / clock.now


@pytest.mark.parametrize("step", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("cost", [0.05, 3.0, 120.0])
@pytest.mark.parametrize("wrong", [0.02, 1.0, 50.0])
def test_saving_takes_under_5_percent_of_the_time_whatever_it_costs_and_was_guessed(step, cost, wrong, monkeypatch):
    _, share = saved_at(step=step, cost=cost, guess=wrong * cost, monkeypatch=monkeypatch)
    if 4000 * step > 4 * cost / 0.04 * max(1.0, wrong):  # a first guess that was too low has been paid back by then
        assert share < 0.05
        assert share > min(0.02, 0.5 * cost / step)  # and the share is used, as far as there are steps to save after


def test_without_the_rule_saving_costs_more(monkeypatch):
    """Negative control: the counted share above would notice saving after every step."""
    monkeypatch.setattr(session, "is_due", lambda s: True)
    assert saved_at(step=1.0, cost=3.0, guess=3.0, monkeypatch=monkeypatch)[1] > 0.5


def test_a_share_of_0_never_saves_on_the_way(monkeypatch):
    assert saved_at(step=1.0, cost=1.0, guess=1.0, share=0.0, steps=100, monkeypatch=monkeypatch)[0] == []


def rollouts(prompts: int = 16, each: int = 8, tokens: int = 24) -> list[Rollout]:
    """A step of the quickstart's size, with numbers that do not compress."""
    draw, out = np.random.default_rng(0), []
    for p in range(prompts):
        ids = tuple(int(i) for i in draw.integers(0, 49_152, 60))
        prompt = Prompt(f"train-{p}", ids, "arithmetic", {"answer": "-12", "extract": "last_number", "scorer": "a.b:c"})
        for i in range(each):
            response = tuple(int(x) for x in draw.integers(0, 49_152, tokens))
            recorded = {n: draw.normal(size=tokens) for n in ("logp", "raw_logp", "entropy")}
            spans = (Span(0, tokens, 7, "f" * 32, 1.0),)
            turn = Turn(ids, response, spans, recorded, "length", info={"text": "word " * tokens})
            out.append(Rollout(f"0.{p}/{i}", prompt, (turn,), f"0.{p}", score=Score(0.5, parts={"format": 1.0})))
    return out


def test_the_log_of_128_rollouts_of_24_tokens_is_under_a_megabyte_and_comes_back_bit_for_bit(tmp_path):
    log, rows = RolloutLog(tmp_path / "log"), rollouts()
    log.write(3, 0, rows, [("task", "an error")])
    assert log.path(3, 0).stat().st_size < 1_000_000
    back, errors = log.read(3, 0)
    assert errors == (("task", "an error"),)
    for a, b in zip(rows, back, strict=True):
        for name, column in a.turns[0].recorded.items():
            other = b.turns[0].recorded[name]
            assert other.dtype == column.dtype
            assert other.tobytes() == column.tobytes()
        assert replace(b, turns=(replace(b.turns[0], recorded={}),)) == replace(a, turns=(replace(a.turns[0], recorded={}),))


def test_a_folder_of_any_number_of_digits_is_found(tmp_path):
    folder = RunDirectory(tmp_path / "run")
    for step in (7, 999_999, 1_000_000, 12_345_678):
        folder.save(State(step), engine())
    assert folder.checkpoints() == [1_000_000, 12_345_678]
    folder.log.write(1_000_000, 0, rollouts(1, 1), [])
    folder.log.write(12_345_678, 1, rollouts(1, 1), [])
    assert folder.log.steps() == [1_000_000, 12_345_678]
    folder.close()


def engine(fail: bool = False):
    def save(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text("w")
        if fail:
            raise OSError(28, "No space left on device")

    return SimpleNamespace(save=save)


def filled(tmp_path: Path, saved: tuple[int, ...] = (0, 2, 4)) -> RunDirectory:
    folder = RunDirectory(tmp_path / "run")
    for step in range(max(saved) + 2):
        if step in saved:
            folder.save(State(step), engine())
        folder.log.write(step, 0, rollouts(1, 1), [])
        folder.log.write(step, 1, rollouts(1, 1), [])
    return folder


def test_only_what_two_newer_checkpoints_make_unnecessary_goes(tmp_path):
    folder = filled(tmp_path)
    assert folder.checkpoints() == [2, 4]
    assert folder.log.steps() == [2, 3, 4, 5]
    folder.close()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("n", range(1, 9))
def test_a_kill_at_any_moment_of_pruning_leaves_whole_checkpoints_and_their_logs(tmp_path, monkeypatch, n):
    folder, calls = filled(tmp_path), []

    def dying(real):
        def call(*a, **k):
            calls.append(a)
            if len(calls) == n:
                raise Killed
            return real(*a, **k)

        return call

    with monkeypatch.context() as m:
        m.setattr(run_directory, "whole_folder", lambda path: _whole_then_hooked(m, path, dying))
        with pytest.raises(Killed):
            folder.save(State(6), engine())
    folder.close()
    again = RunDirectory(tmp_path / "run")
    assert again.checkpoints()[-2:] == [4, 6]
    for step in again.checkpoints():
        assert (again.checkpoint(step) / "models" / "weights").exists()
        assert state.load(again.checkpoint(step)).step == step
    assert {4, 5} <= set(again.log.steps())
    assert not list((tmp_path / "run").rglob(".*.part"))
    again.close()


def _whole_then_hooked(m, path, dying):
    """The checkpoint itself is written undisturbed; what comes after it is pruning."""
    from contextlib import contextmanager

    @contextmanager
    def both():
        with state.whole_folder(path) as part:
            yield part
        for name in ("unlink", "rmdir", "rename"):
            m.setattr(os, name, dying(getattr(os, name)))

    return both()


def test_a_checkpoint_that_fails_half_way_leaves_nothing_and_loses_nothing(tmp_path):
    folder = filled(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        folder.save(State(6), engine(fail=True))
    assert folder.checkpoints() == [2, 4]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["000002", "000004"]
    folder.close()


def test_a_write_that_fails_names_its_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    state.write_file(path, b"old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        state.write_file(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_in_the_words_of_safetensors_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No such file") as caught, state.naming(tmp_path):
        save_file({"a": torch.zeros(2)}, tmp_path / "no" / "where")
    assert caught.value.errno == 2


def test_one_process_at_a_time_holds_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "PATIENCE", 0.0)
    first = RunDirectory(tmp_path / "run")
    with pytest.raises(RunError, match="in use by another process"):
        RunDirectory(tmp_path / "run")
    first.close()
    RunDirectory(tmp_path / "run").close()


def test_a_folder_in_which_no_run_began_is_left_as_it_was(tmp_path):
    RunDirectory(tmp_path / "a" / "b" / "run").abandon()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"holds other files \(thesis.tex\)"):
        RunDirectory(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_start_killed_before_there_was_a_run_is_started_again(tmp_path):
    RunDirectory(tmp_path / "run").close()
    (tmp_path / "run" / ".run.json.part").write_text("{")
    folder = RunDirectory(tmp_path / "run")
    folder.begin({})
    folder.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", "log", "run.json"]
