"""Who rests, how long, and who comes back."""

from dataclasses import replace

import numpy as np
import pytest

from oneloop.batch import pack
from oneloop.data import Prompt
from oneloop.prompts.epochs import Epochs
from oneloop.prompts.unsolved import Unsolved
from oneloop.stages import Resources
from tests.build import row

POOL = [Prompt(f"p{i}", (i, 7)) for i in range(4)]


def opened(pool=POOL, **fields):
    return Unsolved(**{"prompts": 1, "rest": 2, **fields}).open(Resources(prompts=pool))


def played(mechanism, steps, right):
    """Prompts asked at each step, where `right` ones are always answered right and the others half the time."""
    state, out = mechanism.init(), []
    for step in range(steps):
        requests, state = mechanism(step, state, np.random.default_rng([0, step]))
        out.append([q.prompt.id for q in requests])
        rows = []
        for q in requests:
            scores = [1.0, 1.0] if q.prompt.id in right else [1.0, 0.0]
            rows += [replace(row(f"{q.id}/{i}", q.id, s), prompt=q.prompt) for i, s in enumerate(scores)]
        state = mechanism.observe(pack(rows, step), {}, state)
    return out, state


def test_a_solved_prompt_rests_so_many_steps_and_comes_back():
    out, _ = played(opened(POOL[:2], prompts=1, rest=3), 12, right={"p0"})
    solved = [step for step, ids in enumerate(out) if ids == ["p0"]]
    assert len(solved) >= 2
    assert min(np.diff(solved)) >= 4, "asked at step s, it rests at s + 1, s + 2 and s + 3"
    assert len(solved) < sum(ids == ["p1"] for ids in out)


def test_what_varies_never_rests():
    out, state = played(opened(prompts=4), 3, right=set())
    assert [sorted(ids) for ids in out] == [["p0", "p1", "p2", "p3"]] * 3
    assert state["until"] == {}


def test_copies_of_a_question_rest_with_it():
    copy = Prompt("copy", POOL[0].ids)
    out, _ = played(opened([POOL[0], copy, POOL[1]], prompts=1, rest=100), 9, right={"p0", "copy"})
    asked = [ids[0] for ids in out]
    assert sum(name in ("p0", "copy") for name in asked) == 1


def test_where_everybody_rests_the_step_is_filled_all_the_same():
    out, _ = played(opened(prompts=4, rest=100), 3, right={"p0", "p1", "p2", "p3"})
    assert [len(ids) for ids in out] == [4, 4, 4]


def test_without_rest_it_is_epochs():
    ours, _ = played(opened(prompts=3, rest=0), 5, right={"p0", "p1"})
    state, theirs = Epochs().init(), []
    plain = Epochs(prompts=3).open(Resources(prompts=POOL))
    for step in range(5):
        requests, state = plain(step, state, np.random.default_rng([0, step]))
        theirs.append([q.prompt.id for q in requests])
    assert ours == theirs


def test_an_error_is_no_solution_and_bounds_are_kept():
    state = Unsolved().init()
    batch = pack([row("a", "g", "timed out"), row("b", "g", 0.5)], 0)
    assert Unsolved().observe(batch, {}, state)["until"] == {}
    with pytest.raises(ValueError, match=r"Unsolved.rest = -1: between 0 and"):
        Unsolved(rest=-1)
