"""Fills every figure of README.md and docs/ from docs/evidence/*.json, between markers; needs the standard library only.

    python docs/render.py            rewrites the files that differ
    python docs/render.py --check    only says what differs, and fails if anything does

    <!-- evidence: quickstart.accuracy_after -->41.2%<!-- /evidence -->
    <!-- evidence: quickstart.accuracy_after interval -->41.2% [35.3, 47.4]<!-- /evidence -->
    <!-- evidence: quickstart.summary table -->   and   <!-- evidence: quickstart.curves picture -->

Until the evidence file exists, a figure reads "not measured yet", and a table points to docs/evidence. A figure that stands
outside markers is refused (`strays`): a percentage, a number of points, a speed, a speed-up. What is no result of ours (a
paper's figure, a setting) says so in its line: <!-- not a result: why -->.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARKER = re.compile(r"(<!-- evidence: (\w+)\.(\w+)(?: (interval|table|picture))? -->)(.*?)(<!-- /evidence -->)", re.DOTALL)
OPEN = re.compile(r"<!-- /?evidence")
NOT_YET = {"table": "\nmeasured figures: see docs/evidence\n", "picture": ""}
DECIMALS = {"tokens/s": 0, "nats": 4, "count": 0, "ratio": 2}
RESULT = re.compile(
    r"\d\s?%|\d\s(?:per ?cent|percentage points?|points)\b|\d\s?(?:tokens?|tok)(?:/s|\sa second|\sper second)\b"
    r"|\d\s?(?:x|times)\s(?:as|faster|slower|less|more|smaller|larger|cheaper)\b",
    re.IGNORECASE,
)
CONFIDENCE = re.compile(r"\b9[059]% (?:confidence |bootstrap |Wilson )?(?:intervals?|confidence)\b")


class RenderError(ValueError):
    """A marker that cannot be filled."""


def pages() -> list[Path]:
    """README.md and every Markdown file of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def evidence(name: str, folder: Path) -> dict[str, Any] | None:
    """An evidence file, or None where it is not there yet."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def number(x: float, unit: str, *, bare: bool = False) -> str:
    """One number in its unit; bare leaves the unit out."""
    if unit in ("share", "points"):
        text = f"{100 * x:.1f}" if unit == "share" else f"{x:+.1f}"
        return text if bare else text + ("%" if unit == "share" else " points")
    if unit == "bytes":
        return f"{x / 1e9:.2f}" + ("" if bare else " GB")
    word = "" if bare or unit in ("count", "ratio") else " " + {"seconds": "s"}.get(unit, unit)
    return f"{x:.{DECIMALS.get(unit, 1)}f}{word}"


def figure(f: dict[str, Any], *, interval: bool) -> str:
    """41.2% or 41.2% [35.3, 47.4]."""
    text = number(f["effect"], f["unit"])
    if not interval or f["interval"] is None:
        return text
    return f"{text} [{', '.join(number(x, f['unit'], bare=True) for x in f['interval'])}]"


def table(body: dict[str, Any], name: str) -> str:
    """A Markdown table. The first cell of a row is its label; others that name a figure show it with its interval."""
    spec, figures = body["tables"][name], body["figures"]
    shown = {name: figure(f, interval=True) for name, f in figures.items()}
    rows = [[label, *(shown.get(c, c) for c in cells)] for label, *cells in spec["rows"]]
    lines = [spec["columns"], ["---"] * len(spec["columns"]), *rows]
    return "\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def fill(file: str, name: str, form: str, page: Path, folder: Path) -> str:
    """What belongs between one pair of markers. Raises RenderError where the evidence has no such figure."""
    body = evidence(file, folder)
    if body is None:
        return NOT_YET.get(form, "not measured yet")
    kind = {"table": "tables", "picture": "pictures"}.get(form, "figures")
    if name not in body[kind]:
        raise RenderError(f"{page.name}: {file}.json has no {kind[:-1]} {name!r}: there are {', '.join(body[kind])}")
    if form == "table":
        return table(body, name)
    if form == "picture":
        path = os.path.relpath(folder / body["pictures"][name]["file"], page.parent)
        return f"![{body['pictures'][name]['caption']}]({path})"
    return figure(body["figures"][name], interval=form == "interval")


def render(text: str, page: Path, folder: Path) -> str:
    """The page with every figure as the evidence has it. Raises RenderError on a broken marker."""
    if len(OPEN.findall(text)) != 2 * len(MARKER.findall(text)):
        raise RenderError(
            f"{page.name}: a marker is not closed or misspelt: <!-- evidence: file.metric -->...<!-- /evidence -->"
        )
    return MARKER.sub(lambda m: m[1] + fill(m[2], m[3], m[4] or "", page, folder) + m[6], text)


def strays(text: str) -> list[str]:
    """Lines with a figure outside markers. Code, links' targets and names of intervals are not looked at."""

    def blank(pattern: str, text: str) -> str:
        """The text without what matches, its lines kept."""
        return re.sub(pattern, lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)

    for pattern in (MARKER.pattern, r"^(```+|~~~+).*?^\1", r"`[^`\n]*`", r"\]\([^)\n]*\)"):
        text = blank(pattern, text)
    lines = [line for line in text.splitlines() if not re.search(r"<!-- not a result: \S.*-->", line)]
    return [line.strip() for line in lines if RESULT.search(CONFIDENCE.sub("", line))]


def main() -> int:
    """Renders or checks every page; 0 where all is as it should be."""
    is_check, wrong = "--check" in sys.argv[1:], []
    try:
        for page in pages():
            old = page.read_text()
            new = render(old, page, ROOT / "docs" / "evidence")
            wrong += [f"{page.relative_to(ROOT)}: a figure outside markers: {line}" for line in strays(new)]
            if new != old and is_check:
                wrong.append(f"{page.relative_to(ROOT)} differs from docs/evidence: run `python docs/render.py`")
            elif new != old:
                page.write_text(new)
                print(f"rendered {page.relative_to(ROOT)}")
    except RenderError as error:
        wrong.append(str(error))
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
