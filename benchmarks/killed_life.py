"""One life of a run in a forked child: where it dies, what it notes of its work, and the faults of the negative controls."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import random
import signal
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers.modeling_utils

from oneloop import loop, session, state
from oneloop.recipe import Recipe
from oneloop.tracking import rollout_log, run_directory

POINTS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")
WRITES = ("write", "save_file")


@dataclass
class Death:
    """When a life ends: `seconds` after its start (the parent kills), or at its n-th point or write (it kills itself)."""

    seconds: float | None = None
    point: int = 0
    when: str = "before"  # after; torn: in the middle of the n-th write


@dataclass
class Journal:
    """What a child did, line by line, readable after its death: phases, steps sampled and replayed, points."""

    path: Path
    points: int = 0
    writes: int = 0
    phases: list[str] = field(default_factory=lambda: ["start"])

    def __post_init__(self) -> None:
        self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, *words: Any) -> None:
        os.write(self.fd, (" ".join(map(str, words)) + "\n").encode())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        self.note("phase", name)
        try:
            yield
        finally:
            self.phases.pop()
            self.note("phase", self.phases[-1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Torn:
    """A file that dies in the middle of the write that is the fatal point."""

    def __init__(self, file: Any, journal: Journal, death: Death) -> None:
        self.file, self.journal, self.death = file, journal, death

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> int:
        with point(self.journal, self.death, "write") as is_torn:
            if is_torn:
                self.file.write(content[: len(content) // 2])
                self.file.flush()
                die()
            return self.file.write(content)


@contextmanager
def point(journal: Journal, death: Death, name: str) -> Iterator[bool]:
    """One call that changes the disk. Yields whether it is to be cut in the middle."""
    journal.points += 1
    journal.writes += name in WRITES
    is_torn = death.when == "torn" and name in WRITES and journal.writes == death.point
    is_fatal = is_torn or (death.when != "torn" and journal.points == death.point)
    if is_fatal:
        journal.note("dying", death.when, name)
    if is_fatal and death.when == "before":
        die()
    yield is_torn
    if is_fatal:
        die()


def hook_disk(journal: Journal, death: Death) -> None:
    """Counts every call that changes the disk."""

    def counted(name: str, real: Any) -> Any:
        def call(*a: Any, **k: Any) -> Any:
            with point(journal, death, name):
                return real(*a, **k)

        return call

    for name in POINTS:
        setattr(os, name, counted(name, getattr(os, name)))

    def opened(path: Any, mode: str = "r", *a: Any, **k: Any) -> Any:
        file = builtins.open(path, mode, *a, **k)  # noqa: SIM115 its owner closes it
        return Torn(file, journal, death) if "b" in mode else file

    for module in (state, run_directory):
        module.open = opened

    def save_file(tensors: Any, path: Any, metadata: Any = None) -> None:
        with point(journal, death, "save_file") as is_torn:
            content = safetensors.torch.save(tensors, metadata)
            Path(path).write_bytes(content[: len(content) // 2] if is_torn else content)

    safetensors.torch.save_file = save_file
    transformers.modeling_utils.safe_save_file = save_file


def hook_phases(journal: Journal) -> None:
    """Notes where the run is, and which steps it samples and which it learns again from the log."""

    def marked(owner: Any, attribute: str, phase: str) -> None:
        real = getattr(owner, attribute)

        def call(*a: Any, **k: Any) -> Any:
            with journal.phase(phase):
                return real(*a, **k)

        setattr(owner, attribute, call)

    marked(session, "_open", "open")
    marked(session, "save", "checkpoint")
    marked(loop, "learn", "learn")
    marked(run_directory, "remove_folder", "prune")
    marked(run_directory.RunDirectory, "measure", "metrics")
    marked(run_directory.RunDirectory, "rewind", "rewind")
    marked(rollout_log.RolloutLog, "forget_before", "prune")
    collect, write, evaluate = loop.collect, rollout_log.RolloutLog.write, session.evaluate

    async def collecting(run: Any, requests: Any, fresh: Any) -> Any:
        is_logged = run.log.path(run.state.step, fresh.rounds).exists()
        journal.note("begin", run.state.step)
        with journal.phase("replay" if is_logged else "collect"):
            out = await collect(run, requests, fresh)
        journal.note("replayed" if out.replayed else "sampled", run.state.step)
        return out

    def writing(self: Any, step: int, *a: Any) -> None:
        with journal.phase("log"):
            write(self, step, *a)
        journal.note("logged", step)

    async def evaluating(s: Any) -> Any:
        with journal.phase("evaluate"):
            return await evaluate(s)

    loop.collect, rollout_log.RolloutLog.write, session.evaluate = collecting, writing, evaluating


def plain_files() -> None:
    """Fault: files written in place, not beside and renamed."""

    def write(path: Path, content: bytes) -> None:
        with state.open(path, "wb") as f:
            f.write(content)

    for module in (state, rollout_log, run_directory, session):
        module.write_file = write


def plain_folders() -> None:
    """Fault: checkpoints written in place."""

    @contextmanager
    def folder(path: Path):
        path.mkdir(parents=True, exist_ok=True)
        yield path

    run_directory.whole_folder = folder


def forgetful() -> None:
    """Fault: the log is never read, so that logged steps are sampled again."""
    rollout_log.RolloutLog.read = lambda *_: None


FAULTS = {f.__name__: f for f in (plain_files, plain_folders, forgetful)}


def live(run: Path, recipe: Recipe, journal: Journal, death: Death, draw: random.Random, fault: str = "") -> None:
    """One life; never returns."""
    code = 1
    try:
        torch.set_num_threads(1)
        hook_disk(journal, death)
        hook_phases(journal)
        if fault:
            FAULTS[fault]()
        session.load_recipe = lambda name: recipe
        session.is_due = lambda s: draw.random() < 0.4  # in earnest it goes by time: here any step may be saved
        s = session.resume(run) if (run / "run.json").exists() else session.start("kill_anywhere", [], run)
        with closing(s):
            asyncio.run(session.train(s))
        journal.note("points", journal.points, journal.writes)
        code = 0
    except BaseException:
        journal.note("failed", json.dumps(traceback.format_exc()))
    os._exit(code)
