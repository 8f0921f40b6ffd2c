"""Evidence comes back as it was written, and what says too little or something impossible is refused in one line."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from oneloop.tracking.evidence import Evidence, EvidenceError, Figure, commit, here, read, write

GOOD = Evidence(
    name="study",
    recipe="grpo",
    changes=("steps=2",),
    seeds=(1, 2),
    figures={
        "accuracy": Figure(0.5, (0.4, 0.6), "share", "mean over seeds; Student's t"),
        "gain": Figure(-3.25, None, "points", "after less before"),
    },
    command="python benchmarks/study.py",
    commit="abc",
    cpu_flags=("avx2",),
    cores=2,
    date="2026-01-31",
    versions={"torch": "2.13.0"},
    notes=("a note",),
    runs=({"seed": 1}, {"seed": 2}),
    tables={"main": {"columns": ["", "after"], "rows": [["accuracy", "accuracy"]]}},
    pictures={"curves": {"file": "study.png", "caption": "Curves"}},
)


def test_evidence_comes_back_as_written(tmp_path: Path):
    path = write(GOOD, tmp_path / "new")
    assert read(path) == GOOD


FAULTS = {
    "schema must be 1": lambda b: b.update(schema=2),
    "commit is missing": lambda b: b.pop("commit"),
    "comit is no field": lambda b: b.update(comit="x"),
    "cores must be a int": lambda b: b.update(cores="2"),
    "seeds must not be empty": lambda b: b.update(seeds=[]),
    "figures must not be empty": lambda b: b.update(figures={}),
    "each once": lambda b: b.update(seeds=[1, 1]),
    "cores = 0": lambda b: b.update(cores=0),
    "2026-01-31": lambda b: b.update(date="31.1.2026"),
    "/home/me/x means nothing elsewhere": lambda b: b.update(command="python /home/me/x"),
    "figure 'Accuracy'": lambda b: b["figures"].update(Accuracy=b["figures"]["gain"]),
    "must have effect, interval, unit, how": lambda b: b["figures"]["gain"].pop("how"),
    "must be finite numbers": lambda b: b["figures"]["gain"].update(effect=float("nan")),
    "around 0.5": lambda b: b["figures"]["accuracy"].update(interval=[0.6, 0.7]),
    "unit 'percent'": lambda b: b["figures"]["accuracy"].update(unit="percent"),
    "between 0 and 1": lambda b: b["figures"]["accuracy"].update(effect=50, interval=None),
    "say how it was computed": lambda b: b["figures"]["gain"].update(how=""),
    "every row must have 2 cells": lambda b: b["tables"]["main"]["rows"].append(["one"]),
    "'60%' names no figure": lambda b: b["tables"]["main"]["rows"].append(["accuracy", "60%"]),
    "beside this one": lambda b: b["pictures"]["curves"].update(file="../x.png"),
    "name the file other.json": lambda b: b.update(name="other"),
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_fault_is_refused_in_one_line(said: str, tmp_path: Path):
    path = write(GOOD, tmp_path)
    body = copy.deepcopy(json.loads(path.read_text()))
    FAULTS[said](body)
    path.write_text(json.dumps(body))
    with pytest.raises(EvidenceError) as error:
        read(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_refused(tmp_path: Path):
    path = write(GOOD, tmp_path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(EvidenceError, match="is no JSON"):
        read(path)


def test_nothing_is_written_where_something_is_wrong(tmp_path: Path):
    with pytest.raises(EvidenceError, match="seeds"):
        write(Evidence(**{**vars(GOOD), "seeds": ()}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_this_machine_is_evidence_enough(tmp_path: Path):
    found = here(["measured by a test"])
    assert read(write(Evidence(**{**vars(GOOD), **found}), tmp_path)).cores >= 1
    assert commit(None) == "unknown"
