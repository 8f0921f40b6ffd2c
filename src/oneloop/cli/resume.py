"""oneloop resume RUN."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("resume")
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> None:
    """Go on with a run: its newest checkpoint, then its log, then new steps."""
    from oneloop.cli.running import work
    from oneloop.session import resume

    session = resume(run)
    logged = len([s for s in session.folder.log.steps() if s >= session.run.state.step])
    click.echo(f"{run}: going on at step {session.run.state.step}, with the logs of {logged} more to learn from again")
    work(session)
