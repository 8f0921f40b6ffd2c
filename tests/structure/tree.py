"""The package as syntax trees, and what can be read off them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import oneloop
from oneloop.find import STAGES

ROOT = Path(oneloop.__file__).parent
PROJECT = Path(__file__).parents[2]
FILES = sorted(p for p in ROOT.rglob("*.py") if "__pycache__" not in p.parts)


def name_of(path: Path) -> str:
    """Dotted name below `oneloop`: credit.group_mean, data; the package itself is ""."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(p): ast.parse(p.read_text()) for p in FILES}
MECHANISMS = [m for m in MODULES if "." in m and m.split(".")[0] in STAGES and not m.rsplit(".", 1)[1].startswith("_")]


def imported(tree: ast.AST) -> set[str]:
    """Modules below `oneloop` that a file imports anywhere in it, and other packages by their first name."""
    out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            full = [f"{node.module}.{a.name}" for a in node.names]
            out |= {f if f.removeprefix("oneloop.") in MODULES else node.module for f in full}
        elif isinstance(node, ast.ImportFrom):
            out.add("a relative import")
        elif isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
    return {m.removeprefix("oneloop.") if m.startswith("oneloop") else m.split(".")[0] for m in out}


def ours(tree: ast.AST) -> set[str]:
    """Of these the package's own."""
    return {m for m in imported(tree) if m in MODULES or m == "oneloop" or m == "a relative import"}


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Every function with its lines, docstring not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            yield node, lines


def public(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Public classes and functions of a module and the public methods of its public classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name, node
            for part in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and not part.name.startswith("_"):
                    yield f"{node.name}.{part.name}", part
