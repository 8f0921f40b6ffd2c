"""kill -9 anywhere, in small: benchmarks/kill_anywhere.py with a dozen kills, and its negative controls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oneloop.tracking import evidence
from tests.promises.lives import surroundings

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kill_anywhere.py"


def kill(*arguments: str) -> tuple[int, str]:
    said = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=surroundings(), timeout=600, check=False
    )
    return said.returncode, said.stdout or said.stderr


def test_a_dozen_kills_lose_nothing(tmp_path):
    code, said = kill("--kills", "12", "--seed", "3", "--out", str(tmp_path))
    assert code == 0, said
    found = evidence.read(tmp_path / "kill_anywhere.json").figures
    assert found["lost"].effect == 0
    assert found["kills"].effect == 12
    assert found["runs"].effect > 0
    assert found["replayed"].effect > 0


@pytest.mark.parametrize(
    ("fault", "only", "words"),
    [
        ("plain_files", "writes", ("differs", "Error")),
        ("plain_folders", "points", ("checkpoint",)),
        ("forgetful", "points", ("sampled again",)),
    ],
)
def test_a_run_without_the_promise_is_found_out(fault, only, words):
    code, said = kill("--kills", "40", "--fault", fault, "--only", only)
    assert code == 1, said
    assert any(word in said.splitlines()[-1] for word in words), said
