"""oneloop quickstart: measure, train, measure again."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("quickstart")
@click.argument("changes", nargs=-1, metavar="[PATH=VALUE]...")
@click.option("--recipe", default="quickstart", show_default=True, help="Recipe to run.")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory; default runs/<recipe>-<number>.")
def command(recipe: str, changes: tuple[str, ...], out: Path | None) -> None:
    """A language model learns sums and differences on this machine; prints a before/after table and the run's curves."""
    from oneloop.cli import fresh_folder
    from oneloop.cli.running import work
    from oneloop.engine.hub import NAMED, cached, pull
    from oneloop.session import checked, start

    source = checked(recipe, changes).models["policy"].source
    if source in NAMED and cached(source) is None:
        click.echo(f"fetching {source} ...")
        pull(source)
    work(start(recipe, changes, out or fresh_folder(recipe), report=True))
