"""The echo task by hand."""

import pytest

from oneloop.environments.arithmetic import score as arithmetic
from oneloop.environments.echo import Echo, score

META = {"answer": "w3", "extract": "verbatim", "partial": False}


def test_by_hand():
    assert score("w3", META) == {"value": 1.0, "parts": {"format": 1.0}}
    assert score(" w3 w1", META) == {"value": 1.0, "parts": {"format": 0.0}}
    assert score("w1 w3", META)["value"] == 0
    assert score("", META) == {"value": 0.0, "parts": {"format": 0.0}}


def test_on_one_word_it_is_the_verbatim_answer():
    assert [score(t, META)["value"] for t in ("w3", "w1", "")] == [
        arithmetic(t, {**META, "answer": "3"})["value"] for t in ("3", "1", "")
    ]


def test_items():
    items = Echo(3).items("train")
    assert [(i.messages[0]["content"], i.demonstration) for i in items] == [("w0", "w0"), ("w1", "w1"), ("w2", "w2")]


def test_bounds():
    with pytest.raises(ValueError, match=r"Echo\.words = 0"):
        Echo(0)
    with pytest.raises(ValueError, match="'train' or 'test'"):
        Echo().items("dev")
