"""The write-ahead log: what a step collected is on the disk before anything is learnt from it.

One file a step and round, msgpack after the 128 bits of its digest, written whole or not at all. `resume` learns from it again
instead of sampling again, so the same updates come out bit for bit. Floats keep their dtype and bits; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from oneloop.data import Noise, Prompt, Rollout, Score, Span, Turn
from oneloop.state import write_file

VERSION = 1
Errors = Sequence[tuple[str, str]]


class LogError(ValueError):
    """A log that cannot be used, and what to do."""


class RolloutLog:
    """Files log/<step>.<round>.msgpack of a run."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, step: int, round_: int) -> Path:
        """Where one round of a step is kept."""
        return self.folder / f"{step:06d}.{round_}.msgpack"

    def write(self, step: int, round_: int, rows: Sequence[Rollout], errors: Errors) -> None:
        """Returns when it is on the disk."""
        body = {"version": VERSION, "step": step, "round": round_, "rows": list(rows), "errors": list(errors)}
        content = bytes(msgpack.packb(body, default=plain) or b"")
        write_file(self.path(step, round_), _digest(content) + content)

    def read(self, step: int, round_: int) -> tuple[tuple[Rollout, ...], tuple[tuple[str, str], ...]] | None:
        """What `write` wrote, or None where there is nothing. Raises LogError on a file of another version or a damaged one."""
        path = self.path(step, round_)
        if not path.exists():
            return None
        body = _open(path)
        return tuple(rollout(r) for r in body["rows"]), tuple((t, e) for t, e in body["errors"])

    def check(self, step: int) -> None:
        """Raises LogError where a file of this step or a later one cannot be read."""
        for logged, _, path in self.files():
            if logged >= step:
                _open(path)

    def files(self) -> list[tuple[int, int, Path]]:
        """(step, round, file) of everything logged, in order."""
        parts = ((p.name.split("."), p) for p in self.folder.glob("[0-9]*.msgpack"))
        return sorted((int(name[0]), int(name[1]), path) for name, path in parts)

    def steps(self) -> list[int]:
        """The logged steps, in order."""
        return sorted({step for step, _, _ in self.files()})

    def forget_before(self, step: int) -> None:
        """Removes the steps that a checkpoint has made unnecessary, oldest first: killed half-way, what is left is of use."""
        for logged, _, path in self.files():
            if logged < step:
                path.unlink()


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_128_digest(content)


def _open(path: Path) -> dict[str, Any]:
    """A file's map. Raises LogError."""
    raw = path.read_bytes()
    if _digest(raw[16:]) != raw[:16]:
        raise LogError(f"{path} is damaged: remove it and resume; its step is sampled again")
    body = msgpack.unpackb(raw[16:], object_hook=_object, strict_map_key=False)
    if body.get("version") != VERSION:
        raise LogError(
            f"{path} has version {body.get('version')}, this oneloop reads {VERSION}: resume with the oneloop named in run.json"
        )
    return body


def plain(x: Any) -> Any:
    """What msgpack does not know: a noun as the map of its fields, an array as its dtype, shape and bytes."""
    if isinstance(x, Prompt | Noise | Span | Turn | Score | Rollout):
        return {f.name: getattr(x, f.name) for f in fields(x)}
    if isinstance(x, np.ndarray):
        return {"@dtype": x.dtype.str, "@shape": list(x.shape), "@bytes": np.ascontiguousarray(x).tobytes()}
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, Mapping):
        return dict(x)
    raise TypeError(f"a rollout holds a {type(x).__name__}: info, meta and kept hold numbers, text, arrays, lists and maps")


def _object(x: dict[Any, Any]) -> Any:
    if "@dtype" in x:
        return np.frombuffer(x["@bytes"], np.dtype(x["@dtype"])).reshape(x["@shape"]).copy()
    return x


def rollout(m: Mapping[str, Any]) -> Rollout:
    """The inverse of plain."""
    turns = tuple(
        Turn(
            **{
                **t,
                "context": tuple(t["context"]),
                "response": tuple(t["response"]),
                "spans": tuple(Span(**s) for s in t["spans"]),
            }
        )
        for t in m["turns"]
    )
    score, noise, of = m["score"], m["noise"], m["of"]
    return Rollout(
        **{
            **m,
            "prompt": Prompt(**{**m["prompt"], "ids": tuple(m["prompt"]["ids"])}),
            "turns": turns,
            "score": score and Score(**{**score, "marks": tuple(map(tuple, score["marks"])), "note": tuple(score["note"])}),
            "noise": noise and Noise(**noise),
            "of": of and (of[0], of[1]),
        }
    )
