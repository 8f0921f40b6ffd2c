"""What contracts share: mechanisms found in their folders, states through the disk's form, arrays compared."""

from __future__ import annotations

import json

import numpy as np
import torch

from oneloop.data import Prompt
from oneloop.find import find, names
from oneloop.stages import Item, Resources
from oneloop.state import flatten, restore

PROMPTS = tuple(Prompt(f"p{i}", (1, 2 + i), "task", {"hint_ids": [7, 8]}) for i in range(6))
ITEMS = tuple(Item(f"p{i}", ({"role": "user", "content": f"p{i}"},), demonstration=f"d{i}") for i in range(6))


async def call(target, *arguments):
    raise RuntimeError("a contract that scores lends its own call")


LENT = Resources(PROMPTS, ITEMS, encode=lambda text: tuple(text.encode()), end=9, call=call)


def every(*stages):
    """(stage, name) of all mechanisms of these stages, for parametrize."""
    return [(s, n) for s in stages for n in names(s)]


def made(stage, name, resources=LENT):
    """The mechanism with its defaults, opened."""
    return find(stage, name)().open(resources)


def through_disk(state):
    """A state as JSON and arrays, and back."""
    arrays = {}
    body = json.loads(json.dumps(flatten(state, arrays)))
    stored = {k: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v.clone() for k, v in arrays.items()}
    return restore(body, stored)


def plain(tree):
    """A tree of arrays, numbers and dataclasses as something that compares equal when it is."""
    if isinstance(tree, np.ndarray | torch.Tensor):
        return ["array", list(tree.shape), [repr(x) for x in tree.reshape(-1).tolist()]]
    if isinstance(tree, dict):
        return {str(k): plain(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(v) for v in tree]
    if hasattr(tree, "__dataclass_fields__"):
        return {f: plain(getattr(tree, f)) for f in tree.__dataclass_fields__}
    return repr(tree)


def rng(*name):
    return np.random.default_rng(list(name) or [0])
