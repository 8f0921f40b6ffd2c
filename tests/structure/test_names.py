"""Everything has its place: a test for each mechanism, a card for each recipe, words for names, bounds for settings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import math
import re
import subprocess

import pytest

from oneloop import recipes
from oneloop.find import STAGES, find, names
from oneloop.recipe import Evaluate, Recipe
from oneloop.stages import By
from tests.structure.tree import MECHANISMS, MODULES, PROJECT, public

ALL = [(s, n) for s in STAGES for n in names(s)]
CARD = ["Paper", "Equation", "Metrics", "Details", "Results", "Command", "Not checked"]
BLIND = ["loop", "collect", "batch", "terms", "metrics", "state", *[m for m in MODULES if m.startswith("engine.")]]


def test_find_sees_every_mechanism_file():
    assert sorted(f"{s}.{n}" for s, n in ALL) == sorted(MECHANISMS)


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_every_mechanism_has_a_test_file(stage, name):
    path = PROJECT / "tests" / "methods" / stage / f"test_{name}.py"
    assert path.is_file(), f"hand-computed numbers and a limit go to {path.relative_to(PROJECT)}"
    assert "def test_" in path.read_text()


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_contract(stage):
    assert (PROJECT / "tests" / "contracts" / f"test_{stage}.py").is_file()


def test_no_test_file_without_its_mechanism():
    found = {(p.parent.name, p.stem.removeprefix("test_")) for p in (PROJECT / "tests" / "methods").glob("*/test_*.py")}
    assert found == set(ALL)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_has_a_card(name):
    text = (PROJECT / "docs" / "methods" / f"{name}.md").read_text()
    heads = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert heads == CARD
    assert re.search(r"^1\. ", text, re.MULTILINE), "details are numbered"
    assert f"oneloop {'quickstart' if name == 'quickstart' else f'train {name}'}" in text


def test_no_card_without_its_recipe():
    assert {p.stem for p in (PROJECT / "docs" / "methods").glob("*.md")} <= set(recipes.names())


def test_metrics_on_cards_exist():
    """A metric that a card explains is one that code writes."""
    text = "\n".join(ast.unparse(t) for t in MODULES.values())
    for card in (PROJECT / "docs" / "methods").glob("*.md"):
        part = card.read_text().split("## Metrics")[1].split("\n## ")[0]
        for name in re.findall(r"^- `([^`]+)`", part, re.MULTILINE):
            assert re.search(rf"['\"/]{re.escape(name.rsplit('/', 1)[-1])}['\"]", text), f"{card.name}: {name}"


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_documented(module):
    assert ast.get_docstring(MODULES[module]), "the module itself"
    bare = [n for n, node in public(MODULES[module]) if ast.get_docstring(node) is None]
    if module == "loop":
        bare = [n for n in bare if not n.startswith("Engine.")]  # a list of verbs that engine.core documents
    assert bare == []


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_mechanism_is_a_frozen_dataclass_that_says_what_it_is(stage, name):
    mechanism = find(stage, name)
    assert dataclasses.is_dataclass(mechanism)
    assert mechanism.__dataclass_params__.frozen
    assert mechanism() == mechanism()
    assert inspect.getdoc(inspect.getmodule(mechanism))


def loose(cls):
    """Settings without bounds: neither both ends nor a list of values, and neither words nor a switch."""
    out = []
    for f in dataclasses.fields(cls):
        if "low" not in f.metadata or f.type in ("str", "bool") or f.metadata["one_of"]:
            continue
        if not math.isfinite(f.metadata["low"]):
            out.append(f.name)
    return out


@pytest.mark.parametrize("cls", [*(find(s, n) for s, n in ALL), Recipe, Evaluate, By], ids=lambda c: c.__name__)
def test_every_setting_has_bounds(cls):
    assert loose(cls) == []
    numbers = [f.name for f in dataclasses.fields(cls) if f.type in ("int", "float") and "low" not in f.metadata]
    assert numbers == [], "a number is made with `setting`"
    for f in dataclasses.fields(cls):
        assert f.metadata.get("source", "ours"), f"{f.name}: where does its default come from?"


def test_a_loose_setting_is_seen():
    module = importlib.import_module("oneloop.stages")

    @dataclasses.dataclass
    class Loose:
        free: float = module.setting(1.0)
        held: float = module.setting(1.0, low=0.0)
        word: str = module.setting("a")

    Loose.__dataclass_fields__["free"].type = "float"
    Loose.__dataclass_fields__["word"].type = "str"
    assert loose(Loose) == ["free"]


def spoken(tree):
    """Text constants that are not docstrings."""
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs}


def methods():
    """Words that only a branch on a method could need: recipes, classes of mechanisms, files whose name is no common word."""
    return {*recipes.names(), *(n for _, n in ALL if "_" in n), *(find(s, n).__name__ for s, n in ALL)}


@pytest.mark.parametrize("module", BLIND)
def test_loop_and_engine_know_no_method_by_name(module):
    assert sorted(spoken(MODULES[module]) & methods()) == []
    used = {n.id for n in ast.walk(MODULES[module]) if isinstance(n, ast.Name)}
    assert sorted(used & {find(s, n).__name__ for s, n in ALL}) == []
    paths = {t for t in spoken(MODULES[module]) if t.startswith(tuple(f"oneloop.{s}." for s in STAGES))}
    reviewed = {t for t in paths if module == "engine.verdicts" and t.endswith(":score")}  # scorers that only read text
    assert sorted(paths - reviewed) == []


def test_a_branch_on_a_name_is_seen():
    assert spoken(ast.parse("def f(r):\n    'grpo'\n    return r.name == 'grpo'")) & methods() == {"grpo"}
    assert not spoken(ast.parse("def f():\n    'grpo'")) & methods()


PLACES = re.compile(r"(?<![\w.~}])/(?:work|root|Users|home/(?!me/)\w+|mnt/\w+|tmp/w)/")


def test_no_place_of_one_machine_is_written_down():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    wrong = []
    for name in listed.stdout.splitlines():
        path = PROJECT / name
        if path.suffix in (".py", ".md", ".toml", ".json", ".yml", "") and path.is_file() and path.name != "test_names.py":
            wrong += [f"{name}: {m.group()}" for m in PLACES.finditer(path.read_text(errors="replace"))]
    assert wrong == []
    assert PLACES.search("see /home/someone/models")
    assert not PLACES.search("https://example.org/home/x and ~/code/x")
