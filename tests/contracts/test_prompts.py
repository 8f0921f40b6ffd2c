"""The contract of stage 1 on every mechanism found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oneloop.batch import pack
from tests.build import row
from tests.contracts.common import LENT, every, made, plain, rng, through_disk

ALL = every("prompts")


def answered(requests, step):
    """What came of the requests: every other group all right, the rest half right."""
    rows = []
    for i, q in enumerate(requests):
        rows += [replace(row(f"{q.id}/{n}", q.id, s), prompt=q.prompt) for n, s in enumerate([1.0, float(i % 2)])]
    return pack(rows, step)


def asked(mechanism, steps, state=None, first=0):
    state = mechanism.init() if state is None else state
    out = []
    for step in range(first, first + steps):
        before = plain(state)
        kept = state
        requests, state = mechanism(step, state, rng(7, step))
        assert plain(kept) == before, "a state that is handed in is not changed in place"
        state = mechanism.observe(answered(requests, step), {}, state) if requests else state
        out.append(requests)
    return out, state


def check_ids(steps):
    ids = [q.id for requests in steps for q in requests]
    assert len(ids) == len(set(ids)), "every request is a group of its own"


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_same_rng_same_requests(stage, name):
    assert plain(asked(made(stage, name), 3)) == plain(asked(made(stage, name), 3))


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_requests_are_groups_of_known_prompts(stage, name):
    steps, _ = asked(made(stage, name), 4)
    check_ids(steps)
    for q in (q for requests in steps for q in requests):
        assert q.prompt in LENT.prompts
        assert q.count >= 1
        assert q.max_tokens >= 1
        assert q.temperature >= 0


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_state_through_the_disk_goes_on_the_same(stage, name):
    mechanism = made(stage, name)
    whole, end = asked(mechanism, 5)
    _, half = asked(mechanism, 2)
    rest, state = asked(mechanism, 3, through_disk(half), first=2)
    assert plain(rest) == plain(whole[2:])
    assert plain(state) == plain(end)


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_refill_asks_for_others(stage, name):
    """Called again within a step, with a stream of its own, it names new groups."""
    mechanism = made(stage, name)
    first, state = mechanism(0, mechanism.init(), rng(7, 0))
    again, _ = mechanism(0, state, rng(7, 1))
    check_ids([first, again])


def test_a_repeated_id_is_seen():
    steps, _ = asked(made("prompts", "epochs"), 1)
    with pytest.raises(AssertionError, match="group of its own"):
        check_ids([steps[0], steps[0]])
