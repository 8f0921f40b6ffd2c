"""A stage's mechanisms are the modules of its folder: no list to edit. Third parties by import path, `package.module:Class`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any

STAGES = (
    "prompts",
    "rollout",
    "environments",
    "rewards",
    "join",
    "views",
    "credit",
    "selection",
    "objective",
    "estimate",
    "optimiser",
)


class UnknownName(ValueError):
    """A name nobody has, with the nearest one somebody has."""


def nearest(word: str, known: Iterable[str], what: str) -> UnknownName:
    """The error for a misspelt name: one line with the nearest valid names."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
    return UnknownName(f"no {what} is called {word!r}: {hint}")


def names(stage: str) -> list[str]:
    """The mechanisms of a stage, sorted."""
    if stage not in STAGES:
        raise nearest(stage, STAGES, "stage")
    package = importlib.import_module(f"oneloop.{stage}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def find(stage: str, name: str) -> type[Any]:
    """The one public class of a mechanism's module, or of `package.module:Class`. Raises UnknownName, ImportError, ValueError."""
    if ":" in name:
        module_name, _, attribute = name.partition(":")
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute):
            raise nearest(attribute, [a for a in vars(module) if not a.startswith("_")], f"class in {module_name}")
        return getattr(module, attribute)
    if name not in names(stage):
        raise nearest(name, names(stage), f"{stage} mechanism")
    module = importlib.import_module(f"oneloop.{stage}.{name}")
    own = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and c.__module__ == module.__name__ and not c.__name__.startswith("_")
    ]
    if len(own) != 1:
        raise ValueError(f"oneloop/{stage}/{name}.py must hold exactly one public class, it holds {len(own)}")
    return own[0]
