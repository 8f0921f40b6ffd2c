"""oneloop train RECIPE [path=value ...]."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("train")
@click.argument("recipe")
@click.argument("changes", nargs=-1, metavar="[PATH=VALUE]...")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory; default runs/<recipe>-<number>.")
def command(recipe: str, changes: tuple[str, ...], out: Path | None) -> None:
    """Train by a recipe; changes are dotted paths, such as learners.policy.optimiser.lr=2e-5 or steps=50."""
    from oneloop.cli import fresh_folder, show
    from oneloop.session import checked, run_to_end, start

    checked(recipe, changes)
    session = start(recipe, changes, out or fresh_folder(recipe))
    try:
        is_done = run_to_end(session, show)
        folder = session.folder.folder
        click.echo(f"{'done' if is_done else 'stopped'}: {folder}")
        if not is_done:
            click.echo(f"go on with: oneloop resume {folder}")
    finally:
        session.close()
