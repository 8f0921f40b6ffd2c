"""A run's folder: what it was asked (run.json), what it measured (metrics.jsonl), its log and its checkpoints.

Every file appears whole or not at all. One process at a time holds the folder. docs/runs.md says what a reader may rely on.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from oneloop import __version__
from oneloop.state import State, load, naming, remove_folder, save, whole_folder, write_file
from oneloop.tracking.rollout_log import RolloutLog

KEEP = 2  # checkpoints
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "peft")
OWN = {".lock", "log", "checkpoints", "run.json", "metrics.jsonl"}
PATIENCE = 2.0  # s: a killed process may have been about to start a worker, which holds the lock until it runs


class RunError(RuntimeError):
    """A run directory that cannot be used, and what to do."""


class RunDirectory:
    """Opened by one process; `close` or exit lets go."""

    def __init__(self, folder: Path, *, is_new: bool = True) -> None:
        """Makes or opens the folder, and sweeps away what a killed process left unfinished. Raises RunError where it cannot."""
        self.folder, self._metrics = folder, None
        other = "choose another with --out" if is_new else "make it writable, then resume"
        self._made = [p for p in (folder, *folder.parents) if not p.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if is_new and not self.has_run() and (strange := sorted(p.name for p in folder.iterdir() if not is_own(p.name))):
                raise RunError(f"{folder} holds other files ({strange[0]}): choose another with --out")
            self._lock = open(folder / ".lock", "a")  # noqa: SIM115 held until close
            self.log = RolloutLog(folder / "log")
        except OSError as error:
            self._unmake()
            raise RunError(f"{folder} cannot be written ({error.strerror}): {other}") from None
        if not take(self._lock):
            self._lock.close()
            other = ", or choose another with --out" if is_new else ", then resume"
            raise RunError(f"{folder} is in use by another process: stop that one{other}")
        for place in (folder, folder / "log", folder / "checkpoints"):
            for part in place.glob(".*.part"):
                shutil.rmtree(part) if part.is_dir() else part.unlink()

    def close(self) -> None:
        """Lets go of the folder."""
        if self._metrics:
            self._metrics.close()
        self._lock.close()

    def abandon(self) -> None:
        """Lets go of a folder in which no run began, and leaves nothing of it."""
        self.close()
        if not self.has_run():
            with suppress(OSError):
                (self.folder / "log").rmdir()
            (self.folder / ".lock").unlink(missing_ok=True)
            self._unmake()

    def _unmake(self) -> None:
        for path in self._made:
            with suppress(OSError):
                path.rmdir()

    # ------------------------------------------------------------------ what was asked

    def has_run(self) -> bool:
        """Whether a run began here."""
        return (self.folder / "run.json").exists()

    def begin(self, asked: Mapping[str, Any]) -> None:
        """run.json of a new run. Raises RunError where the folder already holds one."""
        self.refuse_second()
        write_file(self.folder / "run.json", (json.dumps({**asked, **surroundings()}, indent=1) + "\n").encode())

    def refuse_second(self) -> None:
        """Raises RunError where the folder already holds a run."""
        if self.has_run():
            raise RunError(f"{self.folder} already holds a run: `oneloop resume {self.folder}`, or choose another with --out")

    def asked(self) -> dict[str, Any]:
        """run.json. Raises RunError where it is not one."""
        try:
            body = json.loads((self.folder / "run.json").read_text())
            return {**body, "recipe": body["recipe"], "changes": body["changes"], "resolved": body["resolved"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.folder / 'run.json'} is damaged ({error}): put a copy back, or start a new run") from None

    # ------------------------------------------------------------------ what was measured

    def measured(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that are whole."""
        path = self.folder / "metrics.jsonl"
        return list(_whole_lines(path.read_text().splitlines())) if path.exists() else []

    def rewind(self, step: int) -> dict[int, dict[str, Any]]:
        """Keeps the metrics of steps before `step`; returns the later ones, which are measured again."""
        lines = self.measured()
        kept = [line for line in lines if line["step"] < step]
        write_file(self.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept).encode())
        return {line["step"]: line for line in lines if line["step"] >= step}

    def measure(self, step: int, metrics: Mapping[str, float]) -> None:
        """One more line, on the disk when this returns; on a full disk none of it."""
        path = self.folder / "metrics.jsonl"
        if self._metrics is None:
            self._metrics = open(path, "ab", buffering=0)  # noqa: SIM115 held until close
        line, end = (json.dumps({"step": step, **metrics}) + "\n").encode(), self._metrics.seek(0, os.SEEK_END)
        with naming(path):
            try:
                if self._metrics.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._metrics.fileno())
            except OSError:
                self._metrics.truncate(end)
                raise

    # ------------------------------------------------------------------ checkpoints

    def save(self, state: State, engine: Any) -> Path:
        """A checkpoint of the step to be done next; older ones beyond KEEP and logs before them go."""
        path = self.checkpoint(state.step)
        if not path.exists():
            with whole_folder(path) as part:
                save(state, part)
                engine.save(part / "models")
        for old in self.checkpoints()[:-KEEP]:
            remove_folder(self.checkpoint(old))
        self.log.forget_before(self.checkpoints()[0])
        return path

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / "checkpoints" / f"{step:06d}"

    def checkpoints(self) -> list[int]:
        """Steps with a whole checkpoint, in order."""
        found = (self.folder / "checkpoints").glob("*/state.json")
        return sorted(int(p.parent.name) for p in found if p.parent.name.isdigit())

    def newest(self) -> tuple[State, Path] | None:
        """The newest whole checkpoint, if there is one. Raises RunError where it, or all of them, came to harm."""
        steps = self.checkpoints()
        if not steps:
            if (logged := self.log.steps()) and logged[0] > 0:
                raise RunError(f"{self.folder} has lost its checkpoints, its log starts at step {logged[0]}: put one back")
            return None
        path = self.checkpoint(steps[-1])
        try:
            return load(path), path / "models"
        except Exception as error:  # safetensors has an error class of its own
            raise damaged(path, error) from None


def is_own(name: str) -> bool:
    """Whether a run's folder holds a file of this name, or held it when a process was killed that had not begun the run yet."""
    return name in OWN or (name.startswith(".") and name.endswith(".part"))


def damaged(checkpoint: Path, error: Exception) -> RunError:
    """What to do about a checkpoint that was whole once."""
    said = " ".join(str(error).split())[:200]
    return RunError(f"{checkpoint} is damaged ({said}): remove it and resume; the one before it and the log lead to the same")


def take(lock: Any) -> bool:
    """An exclusive lock on an open file, or False where another process keeps it."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return True


def _whole_lines(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # the line a killed process was writing
            return


def surroundings() -> dict[str, Any]:
    """Versions, commit, machine and command, for run.json."""
    return {
        "oneloop": __version__,
        "python": platform.python_version(),
        "packages": {p: v for p in PACKAGES if (v := _version(p))},
        "commit": _commit(),
        "machine": {"system": platform.system(), "arch": platform.machine(), "cores": os.cpu_count()},
        "command": " ".join(["oneloop", *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a source checkout, if this runs from one."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return None
    said = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return said.stdout.strip() or None
