"""The contract of stage 3 on every mechanism found."""

from __future__ import annotations

import asyncio
import importlib
import json

import pytest

from oneloop.data import Prompt
from oneloop.find import find, names
from tests.build import turn
from tests.contracts.common import every, plain

ALL = every("environments")
SAME_SPLITS = {"echo"}  # says so itself: a first look at a loop, with nothing to generalise to


def texts(items):
    return {json.dumps(list(i.messages)) for i in items}


def check_disjoint(task):
    assert not texts(task.items("train")) & texts(task.items("test")), "a question is in both splits"


@pytest.mark.parametrize(("stage", "name"), ALL)
@pytest.mark.parametrize("split", ["train", "test"])
def test_items(stage, name, split):
    items = find(stage, name)().items(split)
    assert items
    assert len({i.id for i in items}) == len(items)
    for i in items:
        assert all(isinstance(m["role"], str) and m["content"] for m in i.messages)
        json.dumps(dict(i.meta))
    assert plain(list(items)) == plain(list(find(stage, name)().items(split))), "another on another call"


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_splits_share_no_question(stage, name):
    if name in SAME_SPLITS:
        with pytest.raises(AssertionError, match="in both splits"):
            check_disjoint(find(stage, name)())
    else:
        check_disjoint(find(stage, name)())


def test_exceptions_still_exist():
    assert set(names("environments")) >= SAME_SPLITS


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_gold_answers_score_1_and_silence_does_not(stage, name):
    for i in find(stage, name)().items("train")[:50]:
        if "scorer" not in i.meta or not i.demonstration:
            continue
        module, _, function = i.meta["scorer"].partition(":")
        score = getattr(importlib.import_module(module), function)
        assert score(i.demonstration, dict(i.meta))["value"] == 1.0
        assert score("", dict(i.meta))["value"] < 1.0


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_an_unknown_split_is_refused(stage, name):
    with pytest.raises(ValueError, match="'train' or 'test'"):
        find(stage, name)().items("tset")


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_reply_is_ids_or_the_end(stage, name):
    task = find(stage, name)()
    item = task.items("train")[0]
    said = asyncio.run(task.reply(Prompt(item.id, (1, 2), name, dict(item.meta)), (turn([-1.0]),)))
    assert said is None or all(type(i) is int for i in said)
