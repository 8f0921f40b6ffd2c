"""The command line: one file per command, loaded only when it is called, so that --help is quick."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path
from typing import Any

import click

HELP = {
    "train": "Train a model by a recipe.",
    "resume": "Go on with a run that was stopped or killed.",
    "quickstart": "Measure, train, measure again: a language model learns sums.",
    "model": "Get models without a hub.",
}


class Lazy(click.Group):
    """Commands are modules of this folder, each with a `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of HELP."""
        return list(HELP)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command's file. A misspelt one gets the nearest."""
        if cmd_name in HELP:
            return importlib.import_module(f"oneloop.cli.{cmd_name}").command
        from oneloop.find import nearest

        raise nearest(cmd_name, HELP, "command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From HELP alone: nothing is imported."""
        with formatter.section("Commands"):
            formatter.write_dl(list(HELP.items()))


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(package_name="oneloop")
@click.pass_context
def cli(context: click.Context) -> None:
    """oneloop: reinforcement-learning post-training of language models."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """The `oneloop` command: a user's mistake is one line on stderr and exit code 2; stopped by a signal is 128 + its number."""
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        sys.exit(cli(prog_name="oneloop", standalone_mode=False) or 0)
    except click.Abort:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if (said := in_words(error)) is None:
            raise
        notes = getattr(error, "__notes__", [])
        click.echo("; ".join([f"oneloop: {said}", *notes]), err=True)
        sys.exit(2)


def in_words(error: Exception) -> str | None:
    """What a user is told about a mistake; None where the error is not theirs."""
    if isinstance(error, click.ClickException):
        command = getattr(getattr(error, "ctx", None), "command_path", "oneloop")
        return f"{error.format_message()} See: {command} --help"
    if isinstance(error, OSError) and error.errno is not None:
        return os_error(error)
    return str(error) if is_expected(error) else None


def is_expected(error: Exception) -> bool:
    """Errors that speak to the user, by the names of their classes: importing the classes would import the engine."""
    names = {c.__name__ for c in type(error).__mro__}
    return bool(names & EXPECTED)


EXPECTED = {
    "RecipeError",
    "RunError",
    "ModelError",
    "UnknownName",
    "TooManyErrors",
    "SandboxUnavailable",
    "LogError",
    "OtherRequests",
}


def os_error(error: OSError) -> str:
    """A failed file operation with its fix."""
    import errno

    what = f"{error.strerror}: {error.filename}" if error.filename else str(error)
    fixes = {
        errno.ENOSPC: "free some space; nothing logged is lost",
        errno.EDQUOT: "free some space; nothing logged is lost",
        errno.EROFS: "the file system is read-only: mount it writable",
        errno.EACCES: "you may not write there: change its permissions",
    }
    return f"{what} ({fixes.get(error.errno or 0, 'see the path above')})"


def fresh_folder(recipe: str) -> Path:
    """runs/<recipe>-<number>, the first that is free."""
    return next(p for i in range(1, 10**6) if not (p := Path("runs") / f"{Path(recipe).stem}-{i:03d}").exists())


def show(step: int, metrics: Any) -> None:
    """One line a step, and one for each alarm."""
    from oneloop.tracking.alarms import lines

    for line in lines(metrics):
        click.echo(f"alarm: step {step}: {line}", err=True)
    if "time/step" not in metrics:
        return
    parts = [
        f"step {step:4d}",
        f"score {metrics.get('collect/score', float('nan')):.3f}",
        f"entropy {metrics.get('collect/entropy', float('nan')):.3f}",
        f"tokens {metrics.get('collect/response_tokens', float('nan')):.1f}",
        f"truncated {metrics.get('collect/truncated', 0):.0%}",
        f"varying {metrics.get('collect/groups_varying', 0):.0%}",
        f"{metrics['time/step']:.1f} s",
    ]
    click.echo("  ".join(parts))
