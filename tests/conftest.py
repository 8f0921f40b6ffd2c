"""Shared fixtures: tiny models, and opened runs over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oneloop import session
from oneloop.environments.echo import Echo
from oneloop.lab.tiny import tiny_model
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import Evaluate, Recipe, override
from oneloop.recipes import load_recipe
from oneloop.stages import Model

WORDS = [f"w{i}" for i in range(8)]
torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama that knows eight words, fp32."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", WORDS, width=32)


@pytest.fixture(scope="session")
def toy(tiny: Path):
    """A recipe by name, made small: the echo task on the tiny model."""

    def make(name: str = "grpo", *changes: str, **fields) -> Recipe:
        recipe = replace(
            load_recipe(name),
            environment=Echo(8),
            models={"policy": Model(str(tiny), dtype="float32")},
            steps=2,
            evaluate=Evaluate(problems=8, max_tokens=3),
        )
        if isinstance(recipe.prompts, Epochs):
            recipe = replace(recipe, prompts=Epochs(prompts=4, rollouts=4, max_tokens=3))
        return override(replace(recipe, **fields), changes)

    return make


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Opens a session over a recipe value; closes it after the test."""
    live = []

    def start(recipe: Recipe, out: Path | None = None) -> session.Session:
        monkeypatch.setattr(session, "load_recipe", lambda name: recipe)
        live.append(session.start(recipe.name, [], out or tmp_path / f"run{len(live)}"))
        return live[-1]

    yield start
    for s in live:
        s.close()
