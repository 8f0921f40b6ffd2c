"""Every mutable thing the loop owns, apart from weights: save, load, digest, and the streams of random numbers.

A state is None, numbers, text, numpy or torch arrays, and lists and dicts of these. It is written as JSON with its arrays beside
it in safetensors; nothing is ever pickled or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ARRAY = "@array"


@dataclass
class State:
    """step: the next one to do. mechanisms: name -> state. first_version: the oldest weights still to be had. digests: model -> digest."""

    step: int = 0
    mechanisms: dict[str, Any] = field(default_factory=dict)
    first_version: int = 0
    digests: dict[str, str] = field(default_factory=dict)


def rng(run: Any, *name: Any) -> np.random.Generator:
    """The stream of random numbers called (seed, step, *name); nothing else draws."""
    return stream(run.recipe.seed, run.state.step, *name)


def stream(seed: int, *name: Any) -> np.random.Generator:
    """A generator named by words and numbers; different names are independent, the same name is the same stream."""
    words = "\x1f".join(map(str, name)).encode()
    key = int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "big")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, key])))


def is_array(x: Any) -> bool:
    """Whether a leaf is a numpy or torch array."""
    return isinstance(x, np.ndarray) or type(x).__module__.startswith("torch")


def flatten(tree: Any, arrays: dict[str, Any], path: str = "") -> Any:
    """The tree with arrays replaced by their names, which `arrays` collects. Raises TypeError on what cannot be saved."""
    if is_array(tree):
        arrays[path or "root"] = tree
        return {ARRAY: path or "root", "numpy": isinstance(tree, np.ndarray)}
    if isinstance(tree, Mapping):
        if not all(isinstance(k, str) and k != ARRAY for k in tree):
            raise TypeError(f"state {path}: keys must be text, not {[k for k in tree if not isinstance(k, str)][:3]}")
        return {k: flatten(v, arrays, f"{path}/{k}") for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [flatten(v, arrays, f"{path}/{i}") for i, v in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, np.generic):
        return tree.item()
    raise TypeError(f"state {path} is a {type(tree).__name__}: a mechanism's state holds numbers, text, arrays, lists, dicts")


def restore(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """The inverse of flatten; tuples come back as lists."""
    if isinstance(tree, dict) and ARRAY in tree:
        return arrays[tree[ARRAY]].numpy() if tree["numpy"] else arrays[tree[ARRAY]]
    if isinstance(tree, dict):
        return {k: restore(v, arrays) for k, v in tree.items()}
    return [restore(v, arrays) for v in tree] if isinstance(tree, list) else tree


def save(state: State, folder: Path) -> None:
    """state.json and state.safetensors in an existing folder, flushed to the disk."""
    arrays: dict[str, Any] = {}
    body = flatten(asdict_shallow(state), arrays)
    save_arrays(arrays, folder / "state.safetensors")
    write_file(folder / "state.json", json.dumps(body, indent=1).encode())


def load(folder: Path) -> State:
    """The state that `save` wrote."""
    body = json.loads((folder / "state.json").read_text())
    return State(**restore(body, load_arrays(folder / "state.safetensors")))


def asdict_shallow(state: State) -> dict[str, Any]:
    """The fields of a State, arrays not copied."""
    return {name: getattr(state, name) for name in ("step", "mechanisms", "first_version", "digests")}


def digest(tree: Any) -> str:
    """128 bits over a tree: structure, dtypes, shapes and the arrays' bytes."""
    import xxhash

    arrays: dict[str, Any] = {}
    body = flatten(tree, arrays)
    h = xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode())
    for name in sorted(arrays):
        h.update(f"{name}{arrays[name].dtype}{tuple(arrays[name].shape)}".encode())
        h.update(raw_bytes(arrays[name]))
    return h.hexdigest()


def raw_bytes(x: Any) -> Any:
    """The bytes of an array, in place where it is contiguous (bf16 included)."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
    import torch

    flat = x.detach().contiguous().reshape(-1)
    return (flat if flat.device.type == "cpu" else flat.cpu()).view(torch.uint8).numpy().data


def save_arrays(arrays: Mapping[str, Any], path: Path) -> None:
    """Arrays as one safetensors file, flushed; numpy ones come back as torch on load."""
    import torch
    from safetensors.torch import save_file

    out = {k: torch.from_numpy(np.ascontiguousarray(v)) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    save_file({k: v.detach().contiguous() for k, v in out.items()}, path)
    flush(path)


def load_arrays(path: Path) -> dict[str, Any]:
    """The arrays of a safetensors file, as torch tensors."""
    from safetensors.torch import load_file

    return dict(load_file(path))


def flush(path: Path) -> None:
    """Fsync a file or folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, content: bytes) -> None:
    """A small file, whole or not at all: written beside, flushed, renamed. Raises OSError that names it; leaves no part behind."""
    part = part_of(path)
    with naming(path):
        try:
            with open(part, "wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        flush(path.parent)


def part_of(path: Path) -> Path:
    """Where something is written before it has its name; nothing reads such a place, and an opened run sweeps it away."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the file system name the path they are about; safetensors' own error becomes the OSError it stands for."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        said = re.search(r"os error (\d+)", str(error))
        if type(error).__name__ != "SafetensorError" or not said:
            raise
        raise OSError(int(said[1]), os.strerror(int(said[1])), str(path)) from None


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under its name only when everything in it is on the disk. What failed half-way is removed."""
    part = part_of(path)
    shutil.rmtree(part, ignore_errors=True)
    with naming(path):
        try:
            part.mkdir(parents=True)
            yield part
            for file in sorted(part.rglob("*")):
                flush(file)
            flush(part)
            os.rename(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        flush(path.parent)


def remove_folder(path: Path) -> None:
    """The opposite of whole_folder: the name goes first, so that nobody finds a folder with half of its files."""
    part = part_of(path)
    shutil.rmtree(part, ignore_errors=True)
    os.rename(path, part)
    shutil.rmtree(part)
