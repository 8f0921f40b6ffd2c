"""One file per paper; a module's `recipe` is its recipe. Importing them imports no torch.

Wherever a recipe's name is taken, so is the path of a Python file that defines `recipe`.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from oneloop.find import nearest
from oneloop.ops import one_line


def names() -> list[str]:
    """Every recipe here."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load_recipe(name: str) -> Any:
    """The recipe called so, or of that file. Raises UnknownName with the nearest one, RecipeError on a file without a recipe."""
    if is_file(name):
        return _of_file(Path(name).expanduser().resolve())
    if name not in names():
        raise nearest(name, [*names(), "FILE.py"], "recipe")
    return importlib.import_module(f"oneloop.recipes.{name}").recipe


def is_file(name: str) -> bool:
    """Whether a recipe is given by its file: it ends in .py or has a separator in it."""
    return name.endswith(".py") or "/" in name


def whole_name(name: str) -> str:
    """A name that means the same from any working directory."""
    return str(Path(name).expanduser().resolve()) if is_file(name) else name


def fingerprint(name: str) -> str | None:
    """The sha256 of a recipe's file; None for a recipe of this package, whose version says what it is."""
    return hashlib.sha256(Path(name).expanduser().read_bytes()).hexdigest() if is_file(name) else None


def _of_file(path: Path) -> Any:
    """`recipe` of a Python file, run once per content: its classes have a module, which run.json names."""
    from oneloop.recipe import Recipe, RecipeError

    if not path.is_file():
        near = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise nearest(path.name, near, f"recipe file in {path.parent}") if near else RecipeError(f"no recipe file {path}")
    module_name, content = f"recipe_file_{path.stem}", path.read_bytes()
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "content", None) != content:
        module = sys.modules[module_name] = ModuleType(module_name)
        module.__file__ = str(path)
        try:
            exec(compile(content, path, "exec"), vars(module))  # a recipe is code, as `python FILE` would run it
        except Exception as error:
            del sys.modules[module_name]
            raise RecipeError(f"{path} does not run: {one_line(error)}") from error
        module.content = content  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(found := getattr(module, "recipe", None), Recipe):
        raise RecipeError(f"{path} defines no recipe: a line like `recipe = replace(grpo, name=..., ...)` is missing")
    return found
