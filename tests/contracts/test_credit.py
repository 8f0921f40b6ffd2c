"""The contract of an Assign on every mechanism of credit/ and selection/, and on planted faults."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from oneloop.data import Map, State
from oneloop.stages import Assign
from tests.build import groups
from tests.contracts import assigns
from tests.contracts.common import every, made

ALL = every("credit", "selection")
CHECKS = [
    assigns.check_shapes, assigns.check_finite, assigns.check_order, assigns.check_strangers, assigns.check_state
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize(("stage", "name"), ALL)
def test_contract(stage, name, check):
    mechanism = made(stage, name)
    for scores in (assigns.VARIED, assigns.CONSTANT):
        check(mechanism, assigns.batch_for(mechanism, *scores))


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_batch_of_errors_alone(stage, name):
    mechanism = made(stage, name)
    batch = assigns.batch_for(mechanism, ["broke", "broke"], ["broke"])
    assigns.check_shapes(mechanism, batch)
    assigns.check_finite(mechanism, batch)


@dataclass(frozen=True)
class Faulty(Assign):
    """A batch-mean credit with one planted fault."""

    fault: str = ""

    needs = frozenset({"score"})
    writes = frozenset({"credit"})

    def init(self) -> State:
        return {"seen": 0}

    def __call__(self, batch, state, rng) -> tuple[Map, State]:
        score_R = np.asarray(batch.columns["score"], float)
        ours_R = ~np.isnan(score_R) & np.array([r.origin == "policy" for r in batch.rows])
        if self.fault == "errors are 0":
            score_R, ours_R = np.nan_to_num(score_R), np.array([r.origin == "policy" for r in batch.rows])
        if self.fault == "other origins are peers":
            ours_R = ~np.isnan(score_R)
        centre = score_R[ours_R].mean() if ours_R.any() else 0.0
        credit_R = np.nan_to_num(score_R - centre)
        if self.fault == "order":
            credit_R = credit_R + np.arange(len(credit_R))
        if self.fault == "divides by std":
            with np.errstate(all="ignore"):
                credit_R = credit_R / score_R[ours_R].std()
        if self.fault == "writes its input":
            batch.columns["score"][0] = 0.0
        if self.fault == "changes its state":
            state["seen"] += 1
        if self.fault == "counts in a set":
            state = {"seen": {1, 2}}
        out = {"credit": credit_R[batch.row_N]}
        if self.fault == "says more":
            out["advantage"] = credit_R
        if self.fault == "a wrong shape":
            out["credit"] = credit_R[:-1]
        return out, state


FAULTS = {
    "errors are 0": assigns.check_strangers,
    "other origins are peers": assigns.check_strangers,
    "order": assigns.check_order,
    "divides by std": assigns.check_finite,
    "writes its input": assigns.check_shapes,
    "changes its state": assigns.check_state,
    "counts in a set": assigns.check_state,
    "says more": assigns.check_shapes,
    "a wrong shape": assigns.check_shapes,
}


def test_the_mechanism_without_a_fault_passes():
    for check in CHECKS:
        check(Faulty(), assigns.batch_for(Faulty(), *assigns.VARIED))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault):
    scores = ([1, 1], [1, 1]) if fault == "divides by std" else assigns.VARIED
    with pytest.raises((AssertionError, ValueError, TypeError)):
        FAULTS[fault](Faulty(fault), assigns.batch_for(Faulty(fault), *scores))


def test_the_batches_hold_what_the_contract_is_about():
    batch = groups(*assigns.VARIED)
    assert len({(batch.row_N == r).sum() for r in range(len(batch.rows))}) > 1, "rows of unequal lengths"
    more, old_N = assigns.with_strangers(batch, [])
    assert (~old_N).any()
    assert set(more.streams) == {"policy", "oracle"}
