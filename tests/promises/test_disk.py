"""Full and read-only disks, on real mounts: one clear line, nothing half-written, and after the fix the run goes on as if undisturbed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.promises.lives import done, end, oneloop, recipe_file, refused

pytestmark = pytest.mark.slow
STEPS = 8


def mount(*arguments: str) -> str:
    """Runs mount; what it says where it fails."""
    if shutil.which("mount") is None:
        return "there is no mount command"
    said = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    return "" if said.returncode == 0 else said.stderr.strip() or "mount failed"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own. Root ignores permissions, so nothing less will do."""
    place = tmp_path / "disk"
    place.mkdir()
    if trouble := mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)):
        pytest.skip(f"mounting is not allowed here: {trouble}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A recipe file, and what a run of it comes to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    file = recipe_file(folder / "mine.py", tiny)
    done(oneloop("train", file, f"steps={STEPS}", "save_share=0.0", "--out", folder / "run"))
    return file, end(folder / "run")


def fill(disk: Path, leave: int) -> Path:
    """A file that leaves this many bytes free."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(free - leave))
    return ballast


def hidden(run: Path) -> list[Path]:
    return [p for p in run.rglob(".*") if p.name != ".lock"]


def test_full_while_logging(disk, undisturbed):
    file, expected = undisturbed
    ballast = fill(disk, leave=72 << 10)
    train = oneloop("train", file, f"steps={STEPS}", "save_share=0.0", "--out", disk / "run")
    refused(train, "No space left on device", f"{disk}/run/log/", "free some space", f"oneloop resume {disk}/run")
    logs = sorted((disk / "run" / "log").iterdir())
    assert 1 <= len(logs) < STEPS
    assert not (disk / "run" / "checkpoints").exists()
    assert hidden(disk / "run") == []
    refused(oneloop("resume", disk / "run"), "No space left on device")  # nobody has freed any
    ballast.unlink()
    done(oneloop("resume", disk / "run"))
    assert end(disk / "run") == expected


def test_full_while_checkpointing(disk, undisturbed):
    file, expected = undisturbed
    ballast = fill(disk, leave=400 << 10)
    train = oneloop("train", file, f"steps={STEPS}", "save_share=0.0", "--out", disk / "run")
    refused(train, "No space left on device", "checkpoints/", f"oneloop resume {disk}/run")
    assert len(list((disk / "run" / "log").iterdir())) == STEPS
    assert list((disk / "run" / "checkpoints").iterdir()) == []
    ballast.unlink()
    done(oneloop("resume", disk / "run"))
    assert end(disk / "run") == expected


def test_full_while_measuring(disk, undisturbed):
    """The last byte is missing: of no line is half written."""
    from oneloop.tracking.run_directory import RunDirectory

    folder = RunDirectory(disk / "run")
    folder.measure(0, {"a": 1.0})
    ballast = fill(disk, leave=0)
    line = {"words": "x" * 3000}

    def measure_on() -> None:
        for step in range(1, 5):
            folder.measure(step, line)

    with pytest.raises(OSError, match="No space left") as caught:
        measure_on()
    assert caught.value.filename == str(disk / "run" / "metrics.jsonl")
    steps = [json.loads(x)["step"] for x in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps)))
    assert 1 <= len(steps) < 5
    folder.close()
    ballast.unlink()


def test_full_before_the_start(disk, undisturbed):
    file, _ = undisturbed
    ballast = fill(disk, leave=0)
    refused(oneloop("train", file, "--out", disk / "run"), "No space left on device")
    ballast.unlink()
    assert list(disk.iterdir()) == []


def test_read_only(disk, undisturbed):
    file, expected = undisturbed
    done(oneloop("train", file, "steps=2", "--out", disk / "run"))
    assert mount("-o", "remount,ro", str(disk)) == ""
    refused(oneloop("train", file, "--out", disk / "new"), "cannot be written", "Read-only file system", "--out")
    refused(oneloop("resume", disk / "run"), "cannot be written", "Read-only file system", "make it writable")
    assert mount("-o", "remount,rw", str(disk)) == ""
    done(oneloop("resume", disk / "run"))
    assert end(disk / "run")["metrics"] == expected["metrics"][:2]
