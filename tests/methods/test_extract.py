"""How an answer is read out of a response, by hand."""

import pytest

from oneloop.extract import ASKS, EXTRACTS, LONGEST, extract


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"), ("  42\n", "42"), ("it is 42.", "it is 42."), ("", None), (" \n", None),
    ],
)  # fmt: skip
def test_verbatim(text, answer):
    assert extract(text, "verbatim") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"), ("3 + 4 = 7.", "7"), ("-7", "-7"), ("+7", "+7"), ("1,000.50 dollars", "1,000.50"),
        ("1, 2, 3", "3"), ("7, of course", "7"), ("10-3=7", "7"), ("5-3", "-3"), ("none", None), ("", None),
        ("3.", "3"), (".5", "5"), ("1e5", "5"),
    ],
)  # fmt: skip
def test_last_number(text, answer):
    assert extract(text, "last_number") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>42</answer>", "42"), ("<answer> a\nb </answer> tail", "a\nb"), ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>42", None), ("42</answer>", None), ("<answer></answer>", ""), ("<ANSWER>42</ANSWER>", None), ("42", None),
    ],
)  # fmt: skip
def test_tag(text, answer):
    assert extract(text, "tag") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{42}", "42"), (r"so \boxed{ 42 }.", "42"), (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\sqrt{\frac{a}{b}}} done", r"\sqrt{\frac{a}{b}}"), (r"\boxed{42", None), (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{}", ""), (r"\boxed 42", None), ("42", None),
    ],
)  # fmt: skip
def test_boxed(text, answer):
    assert extract(text, "boxed") == answer


@pytest.mark.parametrize("how", ["last_number", "tag", "boxed"])
def test_only_the_end_of_a_very_long_text_is_read(how):
    said = {"last_number": "42", "tag": "<answer>42</answer>", "boxed": r"\boxed{42}"}[how]
    assert extract("x" * 10**6 + said, how) == "42"
    assert extract(said + "x" * LONGEST, how) is None


@pytest.mark.parametrize("piece", ["<answer>", r"\boxed{", "{", "1,", "9" * 50 + " ", "-", "<answer></answer"])
@pytest.mark.parametrize("how", EXTRACTS)
def test_hostile_lengths_come_to_an_end(piece, how):
    text = piece * (200_000 // len(piece))
    found = extract(text, how)
    assert found is None or len(found) <= LONGEST


def test_every_format_says_what_it_asks_for_and_another_is_refused():
    assert set(ASKS) == set(EXTRACTS)
    with pytest.raises(ValueError, match="extract = 'json': one of verbatim, last_number, tag, boxed"):
        extract("42", "json")
