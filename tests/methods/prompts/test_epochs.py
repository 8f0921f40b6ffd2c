"""Order, epochs and requests, by hand."""

import numpy as np
import pytest

from oneloop.data import Prompt
from oneloop.prompts.epochs import Epochs
from oneloop.stages import Resources

POOL = [Prompt(f"p{i}", (i,)) for i in range(5)]


def opened(**fields):
    return Epochs(**fields).open(Resources(prompts=POOL))


def asked(mechanism, steps, seed=0):
    state, out = mechanism.init(), []
    for step in range(steps):
        requests, state = mechanism(step, state, np.random.default_rng([seed, step]))
        out.append(requests)
    return out, state


def test_every_prompt_once_before_any_comes_again():
    out, state = asked(opened(prompts=2), 5)
    ids = [q.prompt.id for requests in out for q in requests]
    assert sorted(ids[:5]) == sorted(ids[5:]) == ["p0", "p1", "p2", "p3", "p4"]
    assert ids[:5] != ids[5:], "a new order each epoch"
    assert (state["epoch"], state["place"]) == (2, 5)


def test_a_step_may_hold_the_end_of_an_epoch_and_the_start_of_the_next():
    out, _ = asked(opened(prompts=3), 2)
    assert [q.id.split(".")[0] for q in out[1]] == ["1", "1", "2"]
    assert len({q.id for requests in out for q in requests}) == 6


def test_more_prompts_than_the_pool_holds():
    out, _ = asked(opened(prompts=12), 1)
    counts = np.unique([q.prompt.id for q in out[0]], return_counts=True)[1]
    assert sorted(counts.tolist()) == [2, 2, 2, 3, 3]


def test_requests_carry_the_settings():
    out, _ = asked(opened(prompts=1, rollouts=7, temperature=0.5, max_tokens=9), 1)
    q = out[0][0]
    assert (q.count, q.temperature, q.max_tokens, q.model, q.origin) == (7, 0.5, 9, "policy", "policy")


def test_one_prompt_a_step_over_a_pool_of_one_is_that_prompt():
    mechanism = Epochs(prompts=1).open(Resources(prompts=POOL[:1]))
    assert [[q.prompt.id for q in requests] for requests in asked(mechanism, 3)[0]] == [["p0"]] * 3


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="training split empty"):
        Epochs()(0, Epochs().init(), np.random.default_rng(0))


@pytest.mark.parametrize("wrong", [{"prompts": 0}, {"rollouts": 0}, {"temperature": -0.1}, {"max_tokens": 0}, {"prompts": 2.5}])
def test_bounds(wrong):
    with pytest.raises(ValueError, match=rf"Epochs\.{next(iter(wrong))}"):
        Epochs(**wrong)
