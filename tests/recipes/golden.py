"""The resolved form of every recipe, so that a changed default shows in a review.

`python -m tests.recipes.golden` writes it anew.
"""

from __future__ import annotations

import json
from pathlib import Path

from oneloop.recipe import plain
from oneloop.recipes import load_recipe, names

FOLDER = Path(__file__).parent / "golden"


def resolved(name: str) -> dict:
    """What a recipe holds, defaults included, as it stands in a run's run.json."""
    return json.loads(json.dumps(plain(load_recipe(name))))


def main() -> None:
    """Writes golden/<recipe>.json for every recipe and removes those without one."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name in names():
        (FOLDER / f"{name}.json").write_text(json.dumps(resolved(name), indent=1) + "\n")


if __name__ == "__main__":
    main()
