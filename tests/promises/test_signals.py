"""Ctrl-C, and SIGTERM as clusters send it: the first finishes the step and saves, the second stops at once. Through real processes."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.promises.lives import command, done, end, oneloop, recipe_file, surroundings

pytestmark = pytest.mark.slow
SLOW = """
@dataclass(frozen=True)
class Slow(Verified):
    async def __call__(self, group, state):
        print("scoring", flush=True)
        await asyncio.sleep({seconds})
        return await super().__call__(group, state)
"""
IMPORTS = "import asyncio\nfrom dataclasses import dataclass\nfrom oneloop.rewards.verified import Verified"


def started(file: Path, out: Path, *until: str) -> subprocess.Popen[str]:
    """A training process that has said lines with these words in them, one after the other."""
    process = subprocess.Popen(
        command("train", file, "--out", out),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**surroundings(), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout
    words = list(until)
    for line in process.stdout:
        if words[0] in line:
            words.pop(0)
        if not words:
            return process
    raise AssertionError(process.stderr and process.stderr.read())


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_finishes_the_step_and_saves_and_says_how_to_go_on(tiny, tmp_path, signum, code):
    file = recipe_file(tmp_path / "mine.py", tiny, imports=IMPORTS, code=SLOW.format(seconds=0.5), fields="reward=Slow(),")
    run = tmp_path / "run"
    process = started(file, run, "step    1", "scoring")  # in the middle of step 2
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "finishing step 2, then saving" in err
    assert err.rstrip().endswith(f"stopped; go on with: oneloop resume {run}")
    assert "Traceback" not in err
    assert "step    2" in out
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["000003"]
    done(oneloop("resume", run))
    done(oneloop("train", file, "--out", tmp_path / "whole"))
    assert end(run) == end(tmp_path / "whole")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_second_stops_at_once(tiny, tmp_path, signum):
    hour = SLOW.format(seconds=3600)  # a step that would not end in time
    file = recipe_file(tmp_path / "mine.py", tiny, imports=IMPORTS, code=hour, fields="reward=Slow(),")
    process = started(file, tmp_path / "run", "scoring")
    assert process.stderr
    process.send_signal(signum)
    said = ""
    while "again stops at once" not in said:
        said = process.stderr.readline()
        assert said or process.poll() is None
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert err.strip() == f"stopped; go on with: oneloop resume {tmp_path / 'run'}"
    assert list((tmp_path / "run" / "log").iterdir()) == []
