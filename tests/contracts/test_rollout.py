"""The contract of stage 2 on every mechanism found, against a sampler that needs no model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from oneloop.batch import pack
from oneloop.data import Noise, Prompt, Request
from tests.build import turn
from tests.contracts.common import every, made, plain
from tests.methods.rollout.sampling import Counting, Said

ALL = every("rollout")
PROMPT = Prompt("p", (1, 2), "task")
REQUESTS = [
    Request("one", PROMPT, 1, max_tokens=4),
    Request("many", PROMPT, 5, max_tokens=3, temperature=0.5, origin="pilot"),
    Request("noisy", PROMPT, 2, max_tokens=3, noise=Noise(3, 0.1)),
    Request("open", PROMPT, 3, max_tokens=5, prefix=(turn([-1.0, -2.0], finish="open"),)),
]


def roll(stage, name, request, replies=0):
    mechanism = made(stage, name)
    sampling = mechanism(request, Said(), Counting(replies), mechanism.init(), np.random.default_rng(4))
    return asyncio.run(sampling)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda q: q.id)
@pytest.mark.parametrize(("stage", "name"), ALL)
def test_rows_of_one_group(stage, name, request_):
    before = plain(request_)
    rows = roll(stage, name, request_)
    assert plain(request_) == before
    assert len(rows) == request_.count
    assert len({r.id for r in rows}) == len(rows)
    for r in rows:
        assert (r.group, r.origin, r.noise) == (request_.id, request_.origin, request_.noise)
        assert r.prompt == request_.prompt
        assert r.turns
        assert r.score is None or r.score.error
        for t in r.turns:
            assert all(s.temperature == request_.temperature for s in t.spans if s.version != 0 or not request_.prefix)
            assert all(len(t.recorded[k]) == len(t.response) for k in t.recorded)
    batch = pack(rows, 0)
    assert np.isfinite(batch.columns["sampled.logp"][batch.masks["sampled"]]).all()


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_same_rng_same_rollouts(stage, name):
    assert plain(roll(stage, name, REQUESTS[1])) == plain(roll(stage, name, REQUESTS[1]))


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_the_size_of_the_group_is_asserted_where_turns_are_many(stage, name):
    """Rows are grouped by request, never by rollout or turn."""
    batch = pack(roll(stage, name, REQUESTS[1], replies=3), 0)
    assert np.unique(batch.group_R, return_counts=True)[1].tolist() == [5]
