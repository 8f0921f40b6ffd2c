"""Verdicts as scores: a value or an error, never a silent 0."""

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from oneloop.environments.echo import score
from oneloop.rewards.verified import Verified, read_verdict
from oneloop.stages import Resources
from tests.build import row, turn


@dataclass
class Outcome:
    value: Any = None
    error: str = ""


def rollout(text, **meta):
    base = row("a", "g", None, turns=[turn([-1.0], info={"text": text})])
    return replace(base, prompt=replace(base.prompt, meta=meta))


def verdicts(call, *rows, scorer=""):
    return asyncio.run(Verified(scorer).open(Resources(call=call))(rows, None))


async def bare(target, text, meta):
    return Outcome(score(text, meta))


def test_it_is_the_scorer_on_the_text_of_the_last_turn():
    rows = [rollout(t, scorer="m:f", answer="w1") for t in ("w1", "w2", "w1 w2")]
    found = verdicts(bare, *rows)
    assert [s.value for s in found] == [1.0, 0.0, 1.0]
    assert [s.parts for s in found] == [{"format": 1.0}, {"format": 1.0}, {"format": 0.0}]
    two = replace(rows[0], turns=(*rows[0].turns, turn([-1.0], info={"text": "w2"})))
    assert verdicts(bare, two)[0].value == 0.0


def test_the_scorer_of_the_reward_overrides_the_tasks_own():
    asked = []

    async def note(target, text, meta):
        asked.append((target, text, meta))
        return Outcome(0.5)

    assert verdicts(note, rollout("x", scorer="a:b"))[0].value == 0.5
    assert verdicts(note, rollout("x", scorer="a:b"), scorer="c:d")[0].value == 0.5
    assert asked == [("a:b", "x", {"scorer": "a:b"}), ("c:d", "x", {"scorer": "a:b"})]


def test_a_failed_scorer_is_an_error_of_that_rollout_alone():
    async def fails(target, text, meta):
        return Outcome(error="timed out after 5 s") if text == "w2" else await bare(target, text, meta)

    found = verdicts(fails, *(rollout(t, scorer="m:f", answer="w1") for t in ("w1", "w2", "w3")))
    assert [(s.value, s.error) for s in found] == [(1.0, ""), (None, "timed out after 5 s"), (0.0, "")]


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (None, "m:f gave no value"),
        ({}, "m:f gave no value"),
        ({"score": 1.0}, "m:f gave no value"),
        (math.nan, "m:f gave nan: a reward must be a finite number"),
        (math.inf, "finite"),
        ("1.0", "finite"),
        ([1.0], "finite"),
        ({"value": "high"}, "finite"),
        ({"value": 1.0, "parts": {"a": math.nan}}, "parts that are not finite"),
        ({"value": 1.0, "parts": ["a"]}, "parts that are not finite"),
    ],
)
def test_anything_but_a_finite_number_is_an_error_that_says_so(said, match):
    found = read_verdict(said, "m:f")
    assert match in found.error
    assert found.value is None


@pytest.mark.parametrize(("said", "value"), [(1, 1.0), (0, 0.0), (-2.5, -2.5), (True, 1.0), ({"value": 0.25}, 0.25)])
def test_numbers(said, value):
    assert read_verdict(said, "m:f").value == value


def test_a_task_without_a_scorer_and_a_reward_without_a_sandbox():
    assert "names no scorer" in verdicts(bare, rollout("x"))[0].error
    with pytest.raises(ValueError, match="no sandbox"):
        asyncio.run(Verified()([rollout("x", scorer="m:f")], None))
