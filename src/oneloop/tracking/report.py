"""A before/after table with 95% intervals, for the terminal and as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROWS = (
    ("accuracy", "accuracy"),
    ("format", "answers with a number in them"),
    ("accuracy_given_format", "accuracy given format"),
    ("truncated", "truncated"),
)


def percent(r: Mapping[str, Any]) -> str:
    """62.1% [56.0, 67.8]."""
    if r["value"] is None:
        return "none"
    return f"{100 * r['value']:.1f}% [{100 * r['low']:.1f}, {100 * r['high']:.1f}]"


def lines(before: Mapping[str, Any], after: Mapping[str, Any], difference: tuple[float, float, float]) -> list[list[str]]:
    """Rows of the table: what, before, after."""
    out = [[label, percent(before[key]), percent(after[key])] for key, label in ROWS]
    out.append(["mean response, tokens", f"{before['mean_tokens']:.1f}", f"{after['mean_tokens']:.1f}"])
    out.append(["answers that could not be scored", str(before["scoring_errors"]), str(after["scoring_errors"])])
    mean, low, high = (100 * x for x in difference)
    out.append(["gain, same problems", "", f"{mean:+.1f} points [{low:+.1f}, {high:+.1f}]"])
    return out


def table(title: str, rows: list[list[str]]) -> Any:
    """As a rich table."""
    from rich.table import Table

    out = Table(title=title, title_justify="left")
    for column in ("", "before", "after"):
        out.add_column(column)
    for row in rows:
        out.add_row(*row)
    return out
