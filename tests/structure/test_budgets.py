"""Growth is one-way, so it is tested: lines of files and functions, nesting of functions."""

from __future__ import annotations

import ast

import pytest

from tests.structure.tree import FILES, MECHANISMS, MODULES, functions, name_of

LOOP, MECHANISM, OTHER, FUNCTION = 150, 150, 500, 80


def budget(module):
    """Lines a file may have."""
    return LOOP if module == "loop" else MECHANISM if module in MECHANISMS else OTHER


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_lines_of_a_file(path):
    assert len(path.read_text().splitlines()) <= budget(name_of(path))


@pytest.mark.parametrize("module", MODULES)
def test_lines_of_a_function(module):
    assert {f.name: n for f, n in functions(MODULES[module]) if n > FUNCTION} == {}


def depth(node):
    """How deeply functions are nested in one another."""
    inner = [depth(n) for n in ast.iter_child_nodes(node)]
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) + max(inner, default=0)


@pytest.mark.parametrize("module", MODULES)
def test_at_most_one_function_inside_another(module):
    assert depth(MODULES[module]) <= 2


def test_a_long_function_and_a_deep_one_are_seen():
    body = "\n".join(f"    x{i} = {i}" for i in range(80))
    (found,) = functions(ast.parse(f'def f():\n    """A\n    docstring."""\n{body}'))
    assert found[1] == 81
    assert depth(ast.parse("def f():\n def g():\n  def h(): pass")) == 3
    assert (budget("loop"), budget("credit.group_mean"), budget("session")) == (150, 150, 500)
