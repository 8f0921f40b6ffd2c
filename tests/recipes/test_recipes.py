"""Every recipe builds, is checked, holds only differences, says what it resolves to, and runs two steps."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from oneloop import recipes
from oneloop.find import STAGES
from oneloop.loop import step
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import Recipe, diff, plain
from oneloop.recipes import load_recipe, names
from tests.recipes import golden

LABELS = {"name", "base", "about"}


def source(name):
    return ast.parse(Path(importlib.import_module(f"oneloop.recipes.{name}").__file__).read_text())


@pytest.mark.parametrize("name", names())
def test_builds_and_passes_check(name):
    recipe = load_recipe(name)
    assert isinstance(recipe, Recipe)
    assert recipe.name == name
    assert recipe.about
    recipe.check()


@pytest.mark.parametrize("name", names())
def test_what_it_resolves_to(name):
    stored = json.loads((golden.FOLDER / f"{name}.json").read_text())
    assert diff(stored, golden.resolved(name)) == [], "meant? then `python -m tests.recipes.golden`"


def test_no_golden_file_without_a_recipe():
    assert sorted(p.stem for p in golden.FOLDER.glob("*.json")) == names()


@pytest.mark.parametrize("name", names())
def test_it_differs_from_its_base(name):
    recipe = load_recipe(name)
    base = load_recipe(recipe.base) if recipe.base else Recipe("")
    assert [p for p, _, _ in diff(base, recipe) if p.split(".")[0] not in LABELS]


def redundant(tree, namespace, base):
    """Arguments that say what is so without them: fields equal to the base's, settings equal to their defaults."""
    out = []
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        f = ast.unparse(call.func)
        for k in call.keywords:
            value = eval(compile(ast.Expression(k.value), "", "eval"), dict(namespace))
            if f in ("replace", "Recipe"):
                old = getattr(base, k.arg)
            else:
                parameter = inspect.signature(namespace[f]).parameters.get(k.arg)
                old = parameter.default if parameter else inspect.Parameter.empty
            if k.arg not in LABELS and plain(old) == plain(value):
                out.append(f"{f}({k.arg}={ast.unparse(k.value)})")
    return out


@pytest.mark.parametrize("name", names())
def test_it_holds_nothing_redundant(name):
    recipe = load_recipe(name)
    base = load_recipe(recipe.base) if recipe.base else Recipe("")
    assert redundant(source(name), vars(importlib.import_module(f"oneloop.recipes.{name}")), base) == []


def test_redundancy_is_seen():
    planted = "replace(grpo, name='x', steps=100, prompts=Epochs(prompts=16, max_tokens=9), seed=3)"
    found = redundant(ast.parse(planted), {**vars(recipes), "grpo": None, "Epochs": Epochs}, load_recipe("grpo"))
    assert found == ["replace(steps=100)", "Epochs(prompts=16)"]


@pytest.mark.parametrize("name", names())
def test_a_recipe_is_short_and_named_by_its_paper(name):
    text = Path(importlib.import_module(f"oneloop.recipes.{name}").__file__).read_text()
    assert len(text.splitlines()) <= 40
    assert ast.get_docstring(source(name))


@pytest.mark.parametrize("name", names())
def test_a_fixed_length_is_the_length_that_is_sampled(name):
    """Dr. GRPO's constant is the longest response; the number stands in two places, so a test holds them together."""
    recipe = load_recipe(name)
    for learner in recipe.learners.values():
        for term in learner.objective:
            if term.by.unit == "fixed" and term.by.length > 1:
                assert term.by.length == recipe.prompts.max_tokens


@pytest.mark.parametrize("name", names())
def test_two_steps_on_the_toy_model(name, toy, opened):
    recipe = toy(name)
    recipe.check()
    run = opened(recipe).run
    before = dict(run.state.digests)
    for _ in range(2):
        metrics = asyncio.run(step(run))
        assert metrics
        assert all(math.isfinite(v) for v in metrics.values())
        for learner in recipe.learners:
            assert math.isfinite(metrics[f"{learner}/loss"])
    assert run.state.step == 2
    if metrics["policy/read_tokens"]:
        assert run.state.digests != before


@pytest.mark.parametrize("name", names())
def test_a_group_is_the_rollouts_of_one_request(name, toy, opened):
    recipe = toy(name)
    if not isinstance(recipe.prompts, Epochs):
        pytest.skip("it samples nothing")
    run = opened(recipe).run
    asyncio.run(step(run))
    rows, errors = run.log.read(0, 0)
    assert not errors
    sizes = {g: sum(r.group == g for r in rows) for g in {r.group for r in rows}}
    assert set(sizes.values()) == {recipe.prompts.rollouts}
    assert len(sizes) == recipe.prompts.prompts


LIGHT = """
import sys, importlib
from oneloop.find import STAGES, find, names
from oneloop import recipe, recipes
found = [find(s, n) for s in STAGES for n in names(s)]
built = [recipes.load_recipe(n) for n in recipes.names()]
heavy = sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'peft', 'matplotlib', 'accelerate', 'gguf'})
print(len(found), len(built), *heavy)
"""


def loaded(code):
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout.split()


def test_importing_every_mechanism_and_recipe_imports_no_torch():
    num_mechanisms, num_recipes, *heavy = loaded(LIGHT)
    assert int(num_mechanisms) >= len(STAGES)
    assert int(num_recipes) == len(names())
    assert heavy == []


@pytest.mark.slow
def test_a_heavy_import_is_seen():
    assert loaded(LIGHT.replace("found =", "import oneloop.engine.core\nfound ="))[2:] != []
