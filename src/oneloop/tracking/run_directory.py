"""A run's folder: what it was asked (run.json), what it measured (metrics.jsonl), its log and its checkpoints.

Every file appears whole or not at all. One process at a time holds the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from oneloop import __version__
from oneloop.state import State, load, save, whole_folder, write_file
from oneloop.tracking.rollout_log import RolloutLog

KEEP = 2  # checkpoints
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "peft")


class RunError(RuntimeError):
    """A run directory that cannot be used, and what to do."""


class RunDirectory:
    """Opened by one process; `close` or exit lets go."""

    def __init__(self, folder: Path) -> None:
        """Makes or opens the folder. Raises RunError where it cannot be written or another process holds it."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / ".lock", "a")  # noqa: SIM115 held until close
            self.log = RolloutLog(folder / "log")
        except OSError as error:
            raise RunError(f"{folder} cannot be written ({error.strerror}): choose another with --out") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunError(f"{folder} is in use by another process: stop that one, or choose another with --out") from None
        self._metrics: Any = None

    def close(self) -> None:
        """Lets go of the folder."""
        if self._metrics:
            self._metrics.close()
        self._lock.close()

    # ------------------------------------------------------------------ what was asked

    def begin(self, asked: Mapping[str, Any]) -> None:
        """run.json of a new run. Raises RunError where the folder already holds one."""
        if (self.folder / "run.json").exists():
            raise RunError(f"{self.folder} already holds a run: `oneloop resume {self.folder}`, or choose another with --out")
        write_file(self.folder / "run.json", (json.dumps({**asked, **surroundings()}, indent=1) + "\n").encode())

    def asked(self) -> dict[str, Any]:
        """run.json. Raises RunError where there is none."""
        path = self.folder / "run.json"
        if not path.exists():
            raise RunError(f"{self.folder} holds no run: it has no run.json")
        return json.loads(path.read_text())

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
        """One more line, on the disk when this returns."""
        if self._metrics is None:
            self._metrics = open(self.folder / "metrics.jsonl", "a")  # noqa: SIM115 held until close
        self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        self._metrics.flush()
        os.fsync(self._metrics.fileno())

    # ------------------------------------------------------------------ checkpoints

    def save(self, state: State, engine: Any) -> Path:
        """A checkpoint of the step to be done next; older ones beyond KEEP and logs before it go."""
        path = self.folder / "checkpoints" / f"{state.step:06d}"
        if not path.exists():
            with whole_folder(path) as part:
                save(state, part)
                engine.save(part / "models")
        for old in sorted(self.checkpoints())[:-KEEP]:
            shutil.rmtree(self.folder / "checkpoints" / f"{old:06d}")
        self.log.forget_before(min(self.checkpoints()))
        return path

    def checkpoints(self) -> list[int]:
        """Steps with a whole checkpoint."""
        found = (self.folder / "checkpoints").glob("[0-9]" * 6)
        return sorted(int(p.name) for p in found if (p / "state.json").exists())

    def newest(self) -> tuple[State, Path] | None:
        """The newest whole checkpoint, if there is one."""
        steps = self.checkpoints()
        if not steps:
            return None
        path = self.folder / "checkpoints" / f"{steps[-1]:06d}"
        return load(path), path / "models"


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
