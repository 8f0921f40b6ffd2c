"""How a mechanism is found, and what is said where it is not."""

from __future__ import annotations

import importlib
import sys

import pytest

from oneloop.credit.group_mean import GroupMean
from oneloop.find import STAGES, UnknownName, find, names, nearest


def test_a_mechanism_by_its_place():
    assert find("credit", "group_mean") is GroupMean
    assert "group_mean" in names("credit")


def test_a_third_party_by_import_path():
    assert find("credit", "oneloop.credit.group_mean:GroupMean") is GroupMean


@pytest.mark.parametrize(
    ("stage", "name", "words"),
    [
        ("credit", "group_maen", "no credit mechanism is called 'group_maen': did you mean 'group_mean'?"),
        ("credit", "zzz", "no credit mechanism is called 'zzz': there are: group_mean, "),
        ("credits", "group_mean", "no stage is called 'credits': did you mean 'credit'?"),
        (
            "credit",
            "oneloop.credit.group_mean:GroupMeen",
            "no class in oneloop.credit.group_mean is called 'GroupMeen': did you mean 'GroupMean'?",
        ),
    ],
)
def test_unknown_names_come_with_the_nearest(stage, name, words):
    with pytest.raises(UnknownName) as error:
        find(stage, name)
    assert str(error.value).startswith(words)


def test_a_module_that_is_not_there():
    with pytest.raises(ImportError, match="nowhere_at_all"):
        find("credit", "nowhere_at_all:Credit")


@pytest.mark.parametrize(("text", "count"), [("class A: ...\nclass B: ...", 2), ("x = 1\nclass _Private: ...", 0)])
def test_exactly_one_public_class(tmp_path, monkeypatch, text, count):
    (tmp_path / "planted.py").write_text(text)
    package = importlib.import_module("oneloop.credit")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    try:
        with pytest.raises(ValueError, match=rf"credit/planted.py must hold exactly one public class, it holds {count}"):
            find("credit", "planted")
    finally:
        sys.modules.pop("oneloop.credit.planted", None)


def test_helpers_and_imported_classes_do_not_count(tmp_path, monkeypatch):
    text = "from oneloop.credit.group_mean import GroupMean\nclass _Helper: ...\nclass Mine(GroupMean): ...\ndef f(): ..."
    (tmp_path / "planted_too.py").write_text(text)
    (tmp_path / "_private.py").write_text("")
    package = importlib.import_module("oneloop.credit")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    try:
        assert find("credit", "planted_too").__name__ == "Mine"
        assert "_private" not in names("credit")
    finally:
        sys.modules.pop("oneloop.credit.planted_too", None)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_mechanism_and_every_mechanism_one_class(stage):
    assert names(stage)
    for name in names(stage):
        assert inspect_name(find(stage, name)) == name


def inspect_name(cls):
    """The file a class should stand in: its own name in lower case, words apart."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("_").replace("adam_w", "adamw")


def test_nearest_is_one_line():
    assert "\n" not in str(nearest("x", [f"n{i}" for i in range(200)], "thing"))
