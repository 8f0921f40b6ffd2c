"""What a step's alarms say, and when they keep silent."""

from __future__ import annotations

import pytest

from oneloop.cli import show
from oneloop.tracking.alarms import Bounds, bounds_of, check, lines

CALM = {
    "policy/policy.0/mismatch": 0.004,
    "policy/policy.0/ratio": 1.01,
    "policy/skipped": 0.0,
    "policy/loss": 3.0,
    "collect/entropy": 1.2,
    "collect/error_rate": 0.0,
    "collect/truncated": 0.1,
    "collect/groups_learnt": 5.0,
    "time/step": 2.0,
}
RAISED = {
    "policy/policy.0/mismatch": (0.16, "differ by 0.16 nats a token at equal weights"),
    "policy/policy.0/ratio": (3e-7, "mean importance ratio is 3e-07"),
    "policy/skipped": (0.5, "50% of the updates had no finite gradient"),
    "collect/error_rate": (0.2, "20% of the rollouts failed"),
    "collect/error_rate.shop": (0.3, "30% of the rollouts of shop failed"),
    "collect/truncated": (0.9, "90% of the rollouts ended at the token limit"),
    "collect/groups_learnt": (0.0, "nothing was learnt"),
}


def test_a_calm_step_is_silent():
    assert check(CALM, [CALM, CALM]) == {}
    assert lines(CALM) == []


@pytest.mark.parametrize("key", RAISED)
def test_each_metric_out_of_bound_is_said_in_one_line(key):
    value, words = RAISED[key]
    found = check({**CALM, key: value})
    assert found == {f"alarm/{key}": value}
    (line,) = lines(found)
    assert words in line
    assert "\n" not in line


def test_entropy_is_held_against_the_start_of_the_run():
    low = {**CALM, "collect/entropy": 0.1}
    assert check(low, [low, CALM]) == {}
    assert check(low, [CALM, low]) == {"alarm/collect/entropy": pytest.approx(0.1 / 1.2)}
    assert "8% of its start" in lines(check(low, [CALM]))[0]


def test_a_mismatch_that_drifts_is_said_before_it_is_large():
    drifted = {**CALM, "policy/policy.0/mismatch": 0.02}
    assert check(drifted, [drifted]) == {}
    assert check(drifted, [CALM]) == {"alarm/policy/policy.0/drift": pytest.approx(5.0)}
    assert "5.0 times" in lines(check(drifted, [CALM]))[0]
    tiny = {**CALM, "policy/policy.0/mismatch": 1e-6}
    assert check({**CALM, "policy/policy.0/mismatch": 1e-5}, [tiny]) == {}


def test_the_bound_on_the_mismatch_is_that_of_the_dtype():
    raised = {"alarm/policy/policy.0/mismatch": 0.004}
    assert check(CALM, bounds=bounds_of(["torch.float32"])) == raised == check(CALM, bounds=Bounds(mismatch=0.001))
    assert check(CALM, bounds=bounds_of(["torch.float32", "torch.bfloat16"])) == {}


def test_the_command_line_prints_alarms(capsys):
    show(3, {**CALM, **check({**CALM, "policy/skipped": 1.0})})
    out, err = capsys.readouterr()
    assert "step    3" in out
    assert err == "alarm: step 3: policy: 100% of the updates had no finite gradient and moved nothing\n"
    show(3, {"alarm/replay_differs": 2.0})
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("alarm: step 3: learnt again from its log, 2 metrics")
