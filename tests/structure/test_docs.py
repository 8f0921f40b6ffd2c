"""Docs are true: their code runs and prints what they say, their figures are the evidence's, what they name exists."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from oneloop.cli import HELP
from oneloop.prompts.epochs import Epochs
from oneloop.recipes import load_recipe
from oneloop.tracking import evidence

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [*PAGES, *(ROOT / n for n in ("CONTRIBUTING.md", "CHANGELOG.md", "LOG.md"))]
BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("docs_render", ROOT / "docs" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(code: str, scope: dict, where: str) -> None:
    """Runs a block; the lines it prints must be what its `# -> ` comments say."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, where, "exec"), scope)
    expected = re.findall(r"# -> (.*)$", code, re.MULTILINE)
    if expected:
        assert printed.getvalue().splitlines() == expected, where


def run_page(text: str, where: str) -> int:
    """All Python blocks of a page, one after the other in one namespace; a titled one is a module of that file."""
    blocks = [(title, code) for language, title, code in BLOCK.findall(text) if language == "python"]
    scope = {"__name__": "docs_page"}
    sys.modules["docs_page"] = type(sys)("docs_page")  # dataclasses look their module up
    try:
        for title, code in blocks:
            if title:
                Path(title).write_text(code)
            run(code, scope, where)
    finally:
        del sys.modules["docs_page"]
    return len(blocks)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_of_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page.read_text(), name(page))


def test_a_page_that_says_something_else_is_found(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_page("```python\nprint(2)  # -> 2\n```\n", "good") == 1
    with pytest.raises(AssertionError):
        run_page("```python\nprint(2)  # -> 3\n```\n", "bad")
    with pytest.raises(NameError):
        run_page("```python\nnot_there\n```\n", "bad")


def test_the_example_of_the_readme_is_short_and_trains(tmp_path: Path, monkeypatch, opened, toy):
    import asyncio

    from oneloop.loop import step

    monkeypatch.chdir(tmp_path)
    [code] = [code for _, title, code in BLOCK.findall((ROOT / "README.md").read_text()) if title == "my_method.py"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    Path("my_method.py").write_text(code)
    recipe = load_recipe("my_method.py")
    recipe.check()
    session = opened(toy("grpo", assign=recipe.assign, prompts=Epochs(prompts=8, rollouts=8, max_tokens=3)))
    metrics = asyncio.run(step(session.run))
    assert metrics["policy/grad_norm"] > 0


def test_the_screenfuls_stay_screenfuls():
    assert max(len((ROOT / "docs" / f"{n}.md").read_text().splitlines()) for n in ("loop", "stages", "data", "engine")) <= 80


# ---------------------------------------------------------------------------- figures


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_figures_are_those_of_the_evidence(page: Path, render):
    text = page.read_text()
    assert render.render(text, page, ROOT / "docs" / "evidence") == text, "run: python docs/render.py"
    assert render.strays(text) == []


def test_all_evidence_is_valid():
    for path in (ROOT / "docs" / "evidence").glob("*.json"):
        found = evidence.read(path)
        assert all((path.parent / p["file"]).exists() for p in found.pictures.values()), path.name


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    figures = {
        "accuracy": {"effect": 0.4123, "interval": [0.3, 0.5], "unit": "share", "how": "x"},
        "gain": {"effect": 12.5, "interval": None, "unit": "points", "how": "x"},
        "memory": {"effect": 2.5e9, "interval": None, "unit": "bytes", "how": "x"},
        "speed": {"effect": 612.4, "interval": None, "unit": "tokens/s", "how": "x"},
    }
    tables = {"main": {"columns": ["", "after"], "rows": [["accuracy", "accuracy"]]}}
    pictures = {"curves": {"file": "study.png", "caption": "Curves"}}
    body = {"figures": figures, "tables": tables, "pictures": pictures}
    (tmp_path / "study.json").write_text(json.dumps(body))
    return tmp_path


@pytest.mark.parametrize(
    ("marker", "shown"),
    [
        ("study.accuracy", "41.2%"),
        ("study.accuracy interval", "41.2% [30.0, 50.0]"),
        ("study.gain", "+12.5 points"),
        ("study.gain interval", "+12.5 points"),
        ("study.memory", "2.50 GB"),
        ("study.speed", "612 tokens/s"),
        ("study.main table", "\n|  | after |\n| --- | --- |\n| accuracy | 41.2% [30.0, 50.0] |\n"),
        ("study.curves picture", "![Curves](study.png)"),
        ("other.accuracy", "not measured yet"),
        ("other.main table", "\nmeasured figures: see docs/evidence\n"),
        ("other.curves picture", ""),
    ],
)
def test_a_marker_is_filled(render, measured: Path, marker: str, shown: str):
    page = measured / "page.md"
    text = f"a <!-- evidence: {marker} -->41.3%<!-- /evidence --> b"
    assert render.render(text, page, measured) == f"a <!-- evidence: {marker} -->{shown}<!-- /evidence --> b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- evidence: study.acuracy -->1%<!-- /evidence -->", "no figure 'acuracy'"),
        ("<!-- evidence: study.accuracy -->1%", "not closed"),
        ("<!-- evidence study.accuracy -->1%<!-- /evidence -->", "not closed or misspelt"),
    ],
)
def test_a_broken_marker_is_refused(render, measured: Path, text: str, said: str):
    with pytest.raises(render.RenderError, match=said):
        render.render(text, measured / "page.md", measured)


@pytest.mark.parametrize(
    "line",
    [
        "accuracy is 41.2%",
        "it gains 12 points",
        "a gain of 3 percentage points",
        "5 per cent",
        "612 tokens/s",
        "3.5 times as fast",
    ],
)
def test_a_figure_outside_markers_is_found(render, line: str):
    assert render.strays(line) == [line]
    assert render.strays(f"<!-- evidence: a.b -->{line}<!-- /evidence -->") == []
    assert render.strays(f"{line} <!-- not a result: the paper's own figure -->") == []
    assert render.strays(f"```text\n{line}\n```") == []


@pytest.mark.parametrize(
    "line", ["95% intervals", "with 95% confidence intervals", "at most 150 lines", "16 prompts a step", "lr `5%`"]
)
def test_what_is_no_result_may_stand(render, line: str):
    assert render.strays(line) == []


# ---------------------------------------------------------------------------- what they name


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_what_a_page_names_exists(page: Path):
    text, wrong = page.read_text(), []
    for file, function in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text):
        if not (ROOT / file).exists() or (function and f"def {function}(" not in (ROOT / file).read_text()):
            wrong.append(f"{file}::{function}")
    prose = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text))
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
        if not (page.parent / link).exists():
            wrong.append(link)
    for path in re.findall(r"`((?:src|docs|examples|benchmarks)/[\w/.]*\w)`", text):
        if not (ROOT / path).exists():
            wrong.append(path)
    shells = "\n".join(code for language, _, code in BLOCK.findall(text) if language == "sh")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wrong += [f"make {t}" for t in re.findall(r"\bmake (\w+)", shells) if t not in targets]
    wrong += [f"oneloop {c}" for c in re.findall(r"^oneloop (\w+)", shells, re.MULTILINE) if c not in HELP]
    assert wrong == []


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_pages_hold_no_machine_of_ours(page: Path):
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users)/\S*", page.read_text()) == []


def test_every_page_of_the_readme_is_there():
    text = (ROOT / "README.md").read_text()
    assert all((ROOT / p).exists() for p in re.findall(r"docs/\w+\.md", text))
    assert all(os.path.exists(ROOT / p) for p in ("LOG.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"))
