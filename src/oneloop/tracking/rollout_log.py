"""The write-ahead log: what a step collected is on the disk before anything is learnt from it.

One file a step and round, msgpack, written whole or not at all. `resume` learns from it again instead of sampling again, so the
same updates come out bit for bit. Floats keep their dtype and bits; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

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
        body = {"version": VERSION, "step": step, "round": round_, "rows": [pack(r) for r in rows], "errors": list(errors)}
        write_file(self.path(step, round_), msgpack.packb(body, default=_array))

    def read(self, step: int, round_: int) -> tuple[tuple[Rollout, ...], tuple[tuple[str, str], ...]] | None:
        """What `write` wrote, or None where there is nothing. Raises LogError on a file of another version or a damaged one."""
        path = self.path(step, round_)
        if not path.exists():
            return None
        try:
            body = msgpack.unpackb(path.read_bytes(), object_hook=_object, strict_map_key=False)
            version = body["version"]
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise LogError(f"{path} is damaged ({error}): remove it and resume; its step is sampled again") from None
        if version != VERSION:
            raise LogError(f"{path} has version {version}, this oneloop reads {VERSION}: use the versions in run.json")
        return tuple(rollout(r) for r in body["rows"]), tuple((t, e) for t, e in body["errors"])

    def forget_before(self, step: int) -> None:
        """Removes the steps that a checkpoint has made unnecessary."""
        for path in self.folder.glob("*.msgpack"):
            if int(path.name.split(".")[0]) < step:
                path.unlink()


def pack(node: Any) -> Any:
    """Nouns as plain maps; defaults are left out."""
    if isinstance(node, Prompt | Noise | Span | Turn | Score | Rollout):
        return {f.name: pack(getattr(node, f.name)) for f in fields(node)}
    if isinstance(node, Mapping):
        return {k: pack(v) for k, v in node.items()}
    if isinstance(node, tuple | list):
        return [pack(v) for v in node]
    return node.item() if isinstance(node, np.generic) else node


def _array(x: Any) -> Any:
    """A numpy array as its dtype, shape and bytes."""
    if isinstance(x, np.ndarray):
        return {"@dtype": x.dtype.str, "@shape": list(x.shape), "@bytes": np.ascontiguousarray(x).tobytes()}
    raise TypeError(f"a rollout holds a {type(x).__name__}: info, meta and kept hold numbers, text, arrays, lists and maps")


def _object(x: dict[Any, Any]) -> Any:
    if "@dtype" in x:
        return np.frombuffer(x["@bytes"], np.dtype(x["@dtype"])).reshape(x["@shape"]).copy()
    return x


def rollout(m: Mapping[str, Any]) -> Rollout:
    """The inverse of pack."""
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
