"""Plain rollouts against a sampler that writes down what it was asked: turns, observations, resumption, failure."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from oneloop.data import Noise, Prompt, Request, Span
from oneloop.rollout.plain import Plain
from tests.build import turn
from tests.methods.rollout.sampling import Counting, Said

PROMPT = Prompt("p", (1, 2), "task")


def roll(request, *, sampler=None, environment=None, seed=0, **fields):
    rng = np.random.default_rng(seed)
    return asyncio.run(Plain(**fields)(request, sampler or Said(), environment or Counting(0), None, rng))


def test_a_single_turn_by_hand():
    said = Said()
    rows = roll(Request("q", PROMPT, 2, max_tokens=3, origin="replay", noise=Noise(1, 0.5)), sampler=said)
    assert [r.id for r in rows] == ["q/0", "q/1"]
    assert {(r.group, r.origin, r.noise, r.score) for r in rows} == {("q", "replay", Noise(1, 0.5), None)}
    first, second = np.random.default_rng(0).spawn(2)
    assert said.uniforms[0].tolist() == first.random(3).tolist()
    assert said.uniforms[1].tolist() == second.random(3).tolist()
    assert said.contexts == [(1, 2), (1, 2)]
    assert rows[0].turns[0].response == tuple(int(10 * u) for u in said.uniforms[0])


def test_turns_and_observations_by_hand():
    said = Said()
    (one,) = roll(Request("q", PROMPT, 1, max_tokens=1), sampler=said, environment=Counting(2), max_turns=9)
    a, b, c = one.turns
    assert b.context == (1, 2, *a.response, 50, 51)
    assert c.context == (*b.context, *b.response, 50, 51)
    assert [t.observed for t in one.turns] == [0, 2, 2]
    assert len({u.tobytes() for u in said.uniforms}) == 3, "every turn draws anew"


@pytest.mark.parametrize("max_turns", [1, 2])
def test_max_turns_ends_an_episode_that_would_go_on(max_turns):
    (one,) = roll(Request("q", PROMPT, 1, max_tokens=1), environment=Counting(99), max_turns=max_turns)
    assert len(one.turns) == max_turns


def test_one_turn_is_the_limit_of_an_environment_that_never_replies():
    request = Request("q", PROMPT, 3, max_tokens=4)
    assert same(roll(request, max_turns=9), roll(request, environment=Counting(9), max_turns=1))


def same(a, b):
    """Equal rollouts, their recorded arrays included."""
    return repr(a) == repr(b)


def test_a_rollout_does_not_depend_on_its_neighbours():
    few, many = (roll(Request("q", PROMPT, n, max_tokens=4)) for n in (2, 5))
    assert same(few, many[:2])
    assert len({r.turns[0].response for r in many}) > 1


def test_an_open_turn_is_continued_and_keeps_its_spans():
    half = turn([-1.0, -2.0], first=30, finish="open", observed=1, context=(1, 2))
    said = Said(version=5)
    (one,) = roll(Request("q", PROMPT, 1, prefix=(half,), max_tokens=5), sampler=said)
    (t,) = one.turns
    assert said.responses == [(30, 31)]
    assert t.response == (30, 31, *(int(10 * u) for u in said.uniforms[0]))
    assert len(said.uniforms[0]) == 3
    assert [(s.start, s.stop, s.version) for s in t.spans] == [(0, 2, 0), (2, 5, 5)]
    assert t.recorded["logp"][:2].tolist() == [-1, -2]
    assert (t.finish, t.observed) == ("length", 1)


def test_a_stripped_prefix_is_given():
    half = replace(turn([-1.0, -2.0], first=30, finish="open"), spans=(), recorded={})
    (one,) = roll(Request("q", PROMPT, 1, prefix=(half,), max_tokens=3))
    assert one.turns[0].spans == (Span(2, 3, 0, "d", 1.0),)
    assert np.isnan(one.turns[0].recorded["logp"][:2]).all()


def test_an_open_turn_with_no_room_left_is_cut():
    half = turn([-1.0, -2.0], first=30, finish="open")
    said = Said()
    (one,) = roll(Request("q", PROMPT, 1, prefix=(half,), max_tokens=2), sampler=said)
    assert one.turns[0].finish == "length"
    assert one.turns[0].response == (30, 31)
    assert not said.contexts


def test_a_closed_prefix_goes_on_with_the_environments_reply():
    done = turn([-1.0], first=30)
    (one,) = roll(Request("q", PROMPT, 1, prefix=(done,), max_tokens=1), environment=Counting(2), max_turns=9)
    assert one.turns[0] is done
    assert one.turns[1].context == (1, 2, 30, 50, 51)


def test_one_that_fails_costs_itself_only():
    rows = roll(Request("q", PROMPT, 3, max_tokens=2), sampler=Said(fails_at=1))
    assert [bool(r.score and r.score.error) for r in rows] == [False, True, False]
    assert "the sampler broke" in rows[1].score.error


def test_the_text_of_a_resumed_turn_is_the_whole_turns(opened, toy):
    """A scorer reads what stood before the interruption too."""
    run = opened(toy()).run
    prompt = run.mechanisms["prompts"].pool[0]
    w0, w1 = run.engine.encode("w0 w1")
    half = replace(turn([-1.0, -1.0], context=prompt.ids, finish="open"), response=(w0, w1))
    request = Request("q", prompt, 1, prefix=(half,), max_tokens=4)
    sampler = run.engine.sampler("policy", 0)
    (one,) = asyncio.run(Plain()(request, sampler, run.environment, None, np.random.default_rng(0)))
    ids = one.turns[0].response
    assert one.turns[0].info["text"].split()[:2] == ["w0", "w1"]
    assert one.turns[0].info["text"] == run.engine.text(ids)


def test_bounds():
    with pytest.raises(ValueError, match=r"Plain\.max_turns = 0"):
        Plain(max_turns=0)
