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
    from oneloop.cli import fresh_folder, show
    from oneloop.engine.hub import NAMED, cached, pull
    from oneloop.session import checked, run_to_end, start

    asked = checked(recipe, changes)
    source = asked.models["policy"].source
    if source in NAMED and cached(source) is None:
        click.echo(f"fetching {source} ...")
        pull(source)
    session = start(recipe, changes, out or fresh_folder(recipe))
    try:
        click.echo(f"run directory: {session.folder.folder}")
        before = evaluate_now(session, "before")
        if not run_to_end(session, show):
            click.echo(f"stopped; go on with: oneloop resume {session.folder.folder}")
            return
        finish(session, before, evaluate_now(session, "after"))
    finally:
        session.close()


def evaluate_now(session, name: str):  # noqa: ANN001, ANN201 light import: the types live beside torch
    """Measures, keeps the measurement with the run, and says so."""
    import asyncio

    from oneloop.session import evaluate, record
    from oneloop.tracking.report import percent

    measured = asyncio.run(evaluate(session))
    summary = record(session, name, measured)
    click.echo(f"{name}: greedy accuracy on {summary['problems']} held-out problems {percent(summary['accuracy'])}")
    return measured


def finish(session, before, after) -> None:  # noqa: ANN001 as above
    """The table, the picture, and where they are."""
    from rich.console import Console

    from oneloop.evaluation.intervals import paired
    from oneloop.tracking.plots import curves
    from oneloop.tracking.report import lines, table

    a, b = before.summary(), after.summary()
    gain = paired([float(x) for x in before.solved], [float(x) for x in after.solved])
    folder, last = session.folder.folder, session.run.state.step
    points = [(i, s["accuracy"]["value"], s["accuracy"]["low"], s["accuracy"]["high"]) for i, s in ((0, a), (last, b))]
    title = f"{session.recipe.name}, {session.recipe.models['policy'].source}, seed {session.recipe.seed}"
    picture = curves(session.folder.measured(), folder / "curves.png", title, {"test/accuracy": points})
    Console().print(table(f"{title}: {a['problems']} held-out problems, 95% intervals", lines(a, b, gain)))
    click.echo(f"run directory: {folder}\ncurves: {picture}\nmodel: {folder / 'checkpoints' / f'{last:06d}' / 'models' / 'policy'}")
