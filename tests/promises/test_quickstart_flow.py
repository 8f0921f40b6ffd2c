"""The quickstart command on a tiny recipe: table, run directory, picture; killed half-way, `oneloop resume` ends it the same way."""

from __future__ import annotations

import json
import signal
import subprocess

import matplotlib.image
import pytest

from tests.promises.lives import command, done, metrics, oneloop, recipe_file, surroundings

pytestmark = pytest.mark.slow
ROWS = ("before", "after", "accuracy", "format", "truncated", "gain, same problems")


def looks_right(out: str, run) -> None:
    """The table, and a picture with something in it."""
    for word in ROWS:
        assert word in out
    assert f"run directory: {run}" in out
    assert f"curves: {run / 'curves.png'}" in out
    picture = matplotlib.image.imread(run / "curves.png")
    assert picture.shape[0] > 500
    assert picture.shape[1] > 800
    assert picture[..., :3].std() > 0.05


def test_from_measuring_to_the_picture_and_killed_half_way(tiny, tmp_path):
    file = recipe_file(tmp_path / "mine.py", tiny, fields="slots=4,")
    whole = done(oneloop("quickstart", "--recipe", file, "steps=30", "--out", tmp_path / "whole"))
    looks_right(whole, tmp_path / "whole")
    run = tmp_path / "run"
    process = subprocess.Popen(
        command("quickstart", "--recipe", file, "steps=30", "--out", run),
        stdout=subprocess.PIPE,
        text=True,
        env={**surroundings(), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout
    for line in process.stdout:
        if "step    3" in line:
            process.send_signal(signal.SIGKILL)
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert json.loads((run / "run.json").read_text())["report"] is True
    before = (run / "before.json").read_bytes()
    assert not (run / "after.json").exists()
    out = done(oneloop("resume", run))
    looks_right(out, run)
    assert (run / "before.json").read_bytes() == before == (tmp_path / "whole" / "before.json").read_bytes()
    assert (run / "after.json").read_bytes() == (tmp_path / "whole" / "after.json").read_bytes()
    assert metrics(run) == metrics(tmp_path / "whole")
    looks_right(done(oneloop("resume", run)), run)  # a run that is done says so again


def test_a_plain_training_run_is_not_measured(tiny, tmp_path):
    file = recipe_file(tmp_path / "mine.py", tiny)
    out = done(oneloop("train", file, "steps=1", "--out", tmp_path / "run"))
    assert "gain" not in out
    assert not (tmp_path / "run" / "before.json").exists()
