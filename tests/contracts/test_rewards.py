"""The contract of stage 4 on every mechanism found: one value or one error for each rollout, in order."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from oneloop.find import find
from oneloop.stages import Resources
from tests.build import row, turn
from tests.contracts.common import every, plain

ALL = every("rewards")


@dataclass
class Outcome:
    value: Any = None
    error: str = ""


async def call(target, text, meta):
    """Slow for the first, broken for "bad": replies come in another order than they were asked for."""
    await asyncio.sleep(0.01 if text == "1" else 0)
    return Outcome(error="timed out") if text == "bad" else Outcome({"value": float(text), "parts": {"format": 1.0}})


def rollout(i, text):
    base = row(f"r{i}", "g", None, turns=[turn([-1.0], info={"text": text})])
    return replace(base, prompt=replace(base.prompt, meta={"scorer": "m:f"}))


def scored(stage, name, *texts, **fields):
    group = [rollout(i, t) for i, t in enumerate(texts)]
    before = plain(group)
    mechanism = find(stage, name)(**fields).open(Resources(call=call))
    out = asyncio.run(mechanism(group, mechanism.init()))
    assert plain(group) == before
    return out


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_one_score_each_in_order(stage, name):
    out = scored(stage, name, "1", "0", "0.5")
    assert [s.value for s in out] == [1.0, 0.0, 0.5]
    assert [s.value for s in scored(stage, name, "0.5", "1", "0")] == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_an_error_is_not_0_and_costs_nobody_else(stage, name):
    out = scored(stage, name, "1", "bad", "0")
    assert [s.value for s in out] == [1.0, None, 0.0]
    assert [bool(s.error) for s in out] == [False, True, False]


@pytest.mark.parametrize(("stage", "name"), ALL)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_value_is_finite_or_an_error(stage, name, text):
    (out,) = scored(stage, name, text)
    assert out.error
    assert out.value is None or math.isfinite(out.value)


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_constant_scores_stay_constant(stage, name):
    assert [s.value for s in scored(stage, name, *["0.35"] * 5)] == [0.35] * 5
