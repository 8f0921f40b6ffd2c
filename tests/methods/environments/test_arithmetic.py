"""Questions and scores equal chain_sum's; splits share no question; what a user may get wrong is refused."""

import json
import re
from pathlib import Path

import pytest

from oneloop.environments.arithmetic import Arithmetic, in_test, question, score, similarity

ROWS = json.loads((Path(__file__).parents[2] / "fixtures" / "chain_sum.json").read_text())["rows"]
ODD = ["5", "+5", "-5", "05", "5.0", "5,0", ",5", "5.", " 5", "5 ", "5x", "x5", "five", "", ",", "55", "5e0", "0.5e1", "5_0",
       "NaN", "sNaN", "Infinity", "-Infinity", "0", "-0", "--5", "5-", "1E+999999999", "1/2", "\u0665", "\uff15", "5\n",
       "the answer is 5"]  # fmt: skip
SETTINGS = [((2, 2), (1, 2)), ((1, 3), (1, 1)), ((2, 6), (1, 4)), ((3, 3), (4, 4))]


def asked(item):
    return item.messages[-1]["content"]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['seed']}.{r['index']}")
def test_twenty_recorded_rows(row):
    found = question(row["seed"] + row["index"], tuple(row["terms"]), tuple(row["digits"]))
    assert found == (row["question"], row["answer"])
    assert {a: similarity(a, row["answer"]) for a in row["scores"]} == row["scores"]


def test_the_recorded_rows_hold_both_signs_and_every_length():
    assert len(ROWS) == 20
    assert {r["answer"][0] == "-" for r in ROWS} == {True, False}
    assert {r["question"].count(" + ") + r["question"].count(" - ") for r in ROWS} >= {0, 1, 2, 3}


@pytest.mark.parametrize(("terms", "digits"), SETTINGS)
def test_questions_and_scores_equal_reasoning_gym(terms, digits):
    gym = pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    limits = dict(zip(("min_terms", "max_terms", "min_digits", "max_digits"), (*terms, *digits), strict=True))
    task = gym.create_dataset("chain_sum", **limits, seed=11, size=300)
    for i in range(300):
        theirs = task[i]
        assert question(11 + i, terms, digits) == (theirs["question"], theirs["answer"])
    for gold in ("5", "-5", "0", "50"):
        entry = {"answer": gold}
        for answer in ODD:
            assert similarity(answer, gold) == task.score_answer(answer, entry), (answer, gold)
    assert similarity(None, "5") == task.score_answer(None, {"answer": "5"}) == 0


def test_scores_by_hand():
    assert [similarity(a, "12") for a in ("12", "+012.0", "1,2", "0012")] == [1, 1, 1, 1]
    assert similarity("x = 12", "12") == 2 / 6
    assert [similarity(a, "12") for a in ("21", "-12.5", "", "twelve")] == [0, 2 / 5, 0, 0]
    meta = {"answer": "12", "extract": "last_number", "partial": False}
    assert score("3 + 9 is 12.", meta) == {"value": 1.0, "parts": {"format": 1.0}}
    assert score("no idea", meta) == {"value": 0.0, "parts": {"format": 0.0}}
    assert score("112", meta)["value"] == 0
    assert score("112", {**meta, "partial": True})["value"] == pytest.approx(2 / 3)


def test_one_term_of_one_digit_is_that_digit():
    for seed in range(30):
        text, answer = question(seed, (1, 1), (1, 1))
        assert text.endswith(f": {answer} =")
        assert answer in "0123456789"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": 1},
        {"min_terms": 1, "max_terms": 2, "test_size": 64},
        {"max_terms": 4, "max_digits": 3},
        {"min_digits": 2, "test_share": 0.1},
        {"max_digits": 1, "test_size": 64, "train_size": 4096},
    ],
)
def test_train_and_test_share_no_question(fields):
    task = Arithmetic(**fields)
    train, test = task.items("train"), task.items("test")
    assert not {asked(i) for i in train} & {asked(i) for i in test}
    assert len({asked(i) for i in test}) == len(test) == task.test_size
    assert len(train) == task.train_size


def test_the_held_out_questions_follow_the_generators_frequencies():
    def one_digit(text):
        return max(map(len, re.findall(r"\d+", text))) == 1

    drawn = sum(one_digit(question(i, (2, 2), (1, 2))[0]) for i in range(256))
    assert sum(one_digit(asked(i)) for i in Arithmetic(test_share=0.7).items("test")) == drawn
    assert 110 < drawn < 146
    few = Arithmetic(test_share=0.2).items("test")  # 200 questions of one digit exist, so about 40 are held out
    assert 25 < sum(one_digit(asked(i)) for i in few) < 60
    assert len(few) == 256


def test_every_seed_agrees_on_what_is_held_out():
    test = {asked(i) for i in Arithmetic(seed=5).items("test")}
    assert not test & {asked(i) for i in Arithmetic(seed=10**6).items("train")}


def test_a_split_by_distant_seeds_does_intersect():
    """The fault that the split by text is there for: the generator draws item i from seed + i."""
    near = {question(i, (2, 2), (1, 2))[0] for i in range(2048)}
    far = {question(10**6 + i, (2, 2), (1, 2))[0] for i in range(256)}
    assert near & far
    assert len({question(100 + i, (2, 2), (1, 2))[0] for i in range(256)} - near) == 0, "close seeds even share every item"


def test_the_share_of_held_out_questions():
    texts = {question(i, (2, 2), (1, 2))[0] for i in range(4000)}
    for share in (0.1, 0.5):
        assert sum(in_test(t, share) for t in texts) / len(texts) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("how", ["verbatim", "last_number", "tag", "boxed"])
def test_the_demonstration_scores_1_and_the_prompt_asks_for_its_format(how):
    items = Arithmetic(extract=how, max_digits=4, max_terms=3).items("train")[:50]
    assert all(score(i.demonstration, i.meta)["value"] == 1 for i in items)
    assert {"tag": "<answer>", "boxed": "boxed"}.get(how, "") in asked(items[0])
    assert score("", items[0].meta)["value"] == 0


def test_too_few_questions_is_one_line_with_the_fix():
    with pytest.raises(ValueError, match=r"only .* distinct test questions of 256: raise max_terms or max_digits"):
        Arithmetic(min_terms=1, max_terms=1, max_digits=1).items("test")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"min_terms": 0}, r"min_terms = 0: between 1 and 20"),
        ({"min_terms": 3}, r"min_terms = 3: at most max_terms = 2"),
        ({"min_digits": 3}, r"min_digits = 3: at most max_digits = 2"),
        ({"extract": "last"}, "one of 'verbatim', 'last_number', 'tag', 'boxed'"),
        ({"test_share": 1.0}, "test_share = 1.0"),
        ({"partial": "yes"}, "bool is wanted"),
    ],
)
def test_bounds(fields, match):
    with pytest.raises(ValueError, match=match):
        Arithmetic(**fields)


def test_unknown_split():
    with pytest.raises(ValueError, match="'train' or 'test'"):
        Arithmetic().items("validation")
