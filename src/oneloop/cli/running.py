"""What train, quickstart and resume share: a run from where it stands to its end, and what is said when it ends early."""

from __future__ import annotations

import shlex
from contextlib import closing
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:  # light import: these live beside torch
    from oneloop.evaluation.accuracy import Measured
    from oneloop.session import Session


def work(session: Session) -> None:
    """Steps until the end; with the table and the picture where the run was asked for them. Lets go of the session.

    Raises SystemExit with 128 + the signal's number where one stopped it. Other errors leave with a note of how to go on.
    """
    from oneloop.session import Interrupted, on_signals, run_to_end

    run = shlex.quote(str(session.folder.folder))
    with closing(session), on_signals():
        try:
            click.echo(f"run directory: {run}")
            for note in session.notes:
                click.echo(f"note: {note}", err=True)
            before = measure(session, "before") if session.is_reporting else None
            if not run_to_end(session, show_step):
                raise Interrupted(session.stopped_by)
            if before is not None:
                report(session, before, measure(session, "after"))
            click.echo(f"done: {run}")
        except Interrupted as stop:
            leave(run, stop.signum)
        except Exception as error:
            error.add_note(f"then go on with: oneloop resume {run}")
            raise


def leave(run: str, signum: int) -> NoReturn:
    """Stopped by a signal: not done, so not 0, as a shell would count it."""
    click.echo(f"stopped; go on with: oneloop resume {run}", err=True)
    raise SystemExit(128 + signum)


def show_step(step: int, metrics: object) -> None:
    """One line a step."""
    from oneloop.cli import show

    show(step, metrics)


def measure(session: Session, name: str) -> Measured:
    """The held-out problems by the weights as they stand, kept with the run; only once in a run's lives."""
    from oneloop.session import measured
    from oneloop.tracking.report import percent

    found = measured(session, name)
    summary = found.summary()
    click.echo(f"{name}: greedy accuracy on {summary['problems']} held-out problems {percent(summary['accuracy'])}")
    return found


def report(session: Session, before: Measured, after: Measured) -> None:
    """The table, the picture, and where the model is."""
    from rich.console import Console

    from oneloop.evaluation.intervals import paired
    from oneloop.tracking.plots import curves
    from oneloop.tracking.report import lines, table

    a, b = before.summary(), after.summary()
    gain = paired([float(x) for x in before.solved], [float(x) for x in after.solved])
    folder, last = session.folder, session.run.state.step
    points = [(i, s["accuracy"]["value"], s["accuracy"]["low"], s["accuracy"]["high"]) for i, s in ((0, a), (last, b))]
    title = f"{session.recipe.name}, {session.recipe.models['policy'].source}, seed {session.recipe.seed}"
    picture = curves(folder.measured(), folder.folder / "curves.png", title, {"test/accuracy": points})
    Console().print(table(f"{title}: {a['problems']} held-out problems, 95% intervals", lines(a, b, gain)))
    click.echo(f"curves: {picture}\nmodel: {folder.checkpoint(last) / 'models' / 'policy'}")
