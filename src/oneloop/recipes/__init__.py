"""One file per paper; a module's `recipe` is its recipe. Importing them imports no torch."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from oneloop.find import nearest


def names() -> list[str]:
    """Every recipe here."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load_recipe(name: str) -> Any:
    """The recipe called so. Raises UnknownName with the nearest one."""
    if name not in names():
        raise nearest(name, names(), "recipe")
    return importlib.import_module(f"oneloop.recipes.{name}").recipe
