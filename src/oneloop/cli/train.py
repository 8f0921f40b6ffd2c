"""oneloop train RECIPE [path=value ...]."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("train")
@click.argument("recipe")
@click.argument("changes", nargs=-1, metavar="[PATH=VALUE]...")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory; default runs/<recipe>-<number>.")
def command(recipe: str, changes: tuple[str, ...], out: Path | None) -> None:
    """Train by a recipe: a name, or a Python file that defines `recipe`.

    Changes are dotted paths, such as learners.policy.optimiser.lr=2e-5 or steps=50. Ctrl-C finishes the step and saves.
    """
    from oneloop.cli import fresh_folder
    from oneloop.cli.running import work
    from oneloop.session import start

    work(start(recipe, changes, out or fresh_folder(recipe)))
