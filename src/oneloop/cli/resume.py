"""oneloop resume RUN."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("resume")
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> None:
    """Go on with a run: its newest checkpoint, then its log, then new steps."""
    from oneloop.cli import show
    from oneloop.session import resume, run_to_end

    session = resume(run)
    try:
        click.echo(f"{run}: going on at step {session.run.state.step}")
        is_done = run_to_end(session, show)
        click.echo(f"{'done' if is_done else 'stopped'}: {run}")
        if not is_done:
            click.echo(f"go on with: oneloop resume {run}")
    finally:
        session.close()
