"""What was measured, as data: docs/evidence/<name>.json. Every figure in README and docs is rendered from such a file.

A file says what was asked (recipe, changes, seeds, command), where it was measured (commit, versions, CPU flags, cores, date),
and what came out: figures, each with its effect, interval, unit, and how both were computed; the runs behind them; tables and
pictures made of them. It holds no absolute path.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from oneloop.state import write_file
from oneloop.tracking.run_directory import surroundings

SCHEMA = 1
UNITS = ("share", "points", "minutes", "seconds", "bytes", "tokens", "tokens/s", "nats", "count", "ratio")
NAME = re.compile(r"[a-z][a-z0-9_]*")


class EvidenceError(ValueError):
    """An evidence file that says too little or something impossible, and what to do."""


@dataclass(frozen=True)
class Figure:
    """effect in `unit` (share: 0 to 1; points: hundredths), its 95% interval or None, and how both were computed."""

    effect: float
    interval: tuple[float, float] | None
    unit: str
    how: str


@dataclass(frozen=True)
class Evidence:
    """name: of the file. figures: metric -> Figure. runs: what each seed measured.

    tables: name -> {"columns", "rows"}; a row begins with its label; other cells that name a figure show it.
    pictures: name -> {"file", "caption"}.
    """

    name: str
    recipe: str
    changes: tuple[str, ...]
    seeds: tuple[int, ...]
    figures: Mapping[str, Figure]
    command: str
    commit: str
    cpu_flags: tuple[str, ...]
    cores: int
    date: str
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    runs: tuple[Mapping[str, Any], ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, Any] = field(default_factory=dict)


def write(evidence: Evidence, folder: Path) -> Path:
    """folder/<name>.json, whole or not at all. Raises EvidenceError before anything is written."""
    path = folder / f"{evidence.name}.json"
    body = json.loads(json.dumps({"schema": SCHEMA, **asdict(evidence)}, allow_nan=True))
    validate(body, str(path))
    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(body, indent=1) + "\n").encode())
    return path


def read(path: Path) -> Evidence:
    """What `write` wrote. Raises EvidenceError on a file that is not valid evidence."""
    try:
        body = json.loads(path.read_text())
    except ValueError as error:
        raise EvidenceError(f"{path} is no JSON ({error}): measure again, or put a copy back") from None
    validate(body, str(path))
    if path.stem != body["name"]:
        raise EvidenceError(f"{path} calls itself {body['name']!r}: name the file {body['name']}.json")
    lists = {n: tuple(body[n]) for n in ("changes", "seeds", "cpu_flags", "notes", "runs")}
    figures = {k: Figure(**{**f, "interval": f["interval"] and tuple(f["interval"])}) for k, f in body["figures"].items()}
    return Evidence(**{**{k: v for k, v in body.items() if k != "schema"}, **lists, "figures": figures})


def validate(body: Any, where: str) -> None:
    """Raises EvidenceError with one line: the first thing that is wrong and what it must be."""
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise EvidenceError(f"{where}: schema must be {SCHEMA}; write it with oneloop.tracking.evidence")
    for check in (_shape, _surroundings, _figures, _references):  # the later ones rely on the earlier
        for problem in check(body):
            raise EvidenceError(f"{where}: {problem}")


def _shape(body: Mapping[str, Any]) -> list[str]:
    """Fields missing, unknown, or of another type."""
    known = {f.name: f.type for f in fields(Evidence)}
    out = [f"{n} is missing" for n in known if n not in body]
    out += [f"{n} is no field: there are {', '.join(known)}" for n in body if n not in known and n != "schema"]
    for name in set(known) & set(body):
        kind = str(known[name]).split("[")[0]
        wanted = {"str": str, "int": int, "tuple": list, "Mapping": dict}[kind]
        if not isinstance(body[name], wanted) or isinstance(body[name], bool):
            out.append(f"{name} must be a {wanted.__name__}")
    return out


def _surroundings(body: Mapping[str, Any]) -> list[str]:
    """What was asked and where."""
    out = [f"{n} must not be empty" for n in ("recipe", "command", "commit", "seeds", "versions", "figures") if not body[n]]
    if not NAME.fullmatch(body["name"]):
        out.append(f"name = {body['name']!r}: lower-case letters, digits and _")
    if len(set(body["seeds"])) != len(body["seeds"]) or not all(type(s) is int for s in body["seeds"]):
        out.append(f"seeds = {body['seeds']}: whole numbers, each once")
    if body["cores"] < 1:
        out.append(f"cores = {body['cores']}: at least 1")
    try:
        datetime.date.fromisoformat(body["date"])
    except ValueError:
        out.append(f"date = {body['date']!r}: write it as 2026-01-31")
    if path := absolute_path([body["command"], body["recipe"], *body["changes"], *body["notes"]]):
        out.append(f"the absolute path {path} means nothing elsewhere: use one relative to the repository")
    return out


def absolute_path(texts: Sequence[str]) -> str:
    """The first absolute path in these texts, or ""."""
    found = re.search(r"(?:^|[\s='\"])(/[\w.-]+/\S*)", "\n".join(texts))
    return found[1] if found else ""


def _figures(body: Mapping[str, Any]) -> list[str]:
    """Each figure by itself."""
    out = []
    for name, f in body["figures"].items():
        if not NAME.fullmatch(name):
            out.append(f"figure {name!r}: lower-case letters, digits and _")
        if not isinstance(f, dict) or set(f) != {x.name for x in fields(Figure)}:
            out.append(f"figure {name} must have {', '.join(x.name for x in fields(Figure))}")
            continue
        numbers = [f["effect"], *(f["interval"] or ())]
        if not all(type(x) in (int, float) and math.isfinite(x) for x in numbers):
            out.append(f"figure {name} must be finite numbers, not {numbers}")
        elif f["interval"] is not None and (len(numbers) != 3 or not numbers[1] <= numbers[0] <= numbers[2]):
            out.append(f"figure {name}: interval {f['interval']} must be [low, high] around {f['effect']}")
        elif f["unit"] not in UNITS:
            out.append(f"figure {name}: unit {f['unit']!r}: one of {', '.join(UNITS)}")
        elif f["unit"] == "share" and not all(0 <= x <= 1 for x in numbers):
            out.append(f"figure {name}: a share lies between 0 and 1, not {numbers}")
        if not f["how"]:
            out.append(f"figure {name}: say how it was computed")
    return out


def _references(body: Mapping[str, Any]) -> list[str]:
    """Tables and pictures."""
    out = []
    for name, table in body["tables"].items():
        if not isinstance(table, dict) or set(table) != {"columns", "rows"}:
            out.append(f"table {name} must have columns and rows")
        elif any(len(row) != len(table["columns"]) for row in table["rows"]):
            out.append(f"table {name}: every row must have {len(table['columns'])} cells")
        elif digits := [c for row in table["rows"] for c in row[1:] if re.search(r"\d", c) and c not in body["figures"]]:
            out.append(f"table {name}: {digits[0]!r} names no figure: numbers come from figures only")
    for name, picture in body["pictures"].items():
        if not isinstance(picture, dict) or set(picture) != {"file", "caption"} or "/" in picture["file"]:
            out.append(f"picture {name} must have a file (beside this one) and a caption")
    return out


def here(notes: Sequence[str] = ()) -> dict[str, Any]:
    """commit, cpu_flags, cores, date, versions and notes of this machine, now: fields of an Evidence."""
    from oneloop.engine.device import cpu_flags

    now = surroundings()
    return {
        "commit": commit(now["commit"]),
        "cpu_flags": cpu_flags(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "date": datetime.date.today().isoformat(),
        "versions": {"oneloop": now["oneloop"], "python": now["python"], **now["packages"]},
        "notes": tuple(notes),
    }


def commit(head: str | None) -> str:
    """The commit, with "+changes" where the checked-out sources differ from it; "unknown" outside a checkout."""
    if not head:
        return "unknown"
    src = Path(__file__).resolve().parents[2]
    said = subprocess.run(
        ["git", "-C", str(src), "status", "--porcelain", "--", "."], capture_output=True, text=True, check=False
    )
    return f"{head}+changes" if said.stdout.strip() else head
