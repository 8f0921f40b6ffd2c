"""Imports run one way: data <- stages, ops <- mechanisms <- recipes <- cli. The plumbing's own table is written out."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from oneloop.find import STAGES
from tests.structure.tree import MECHANISMS, MODULES, imported, ours

MECHANISM = {"data", "stages", "ops", "extract"}
ANY_MECHANISM = "any mechanism"

# Who may import what; a folder stands for all its modules. What is not named here may import nothing of ours.
ALLOWED = {
    "data": set(),
    "find": set(),
    "extract": set(),
    "state": set(),
    "stages": {"data"},
    "ops": {"data"},
    "batch": {"data"},
    "collect": {"data", "ops", "state"},
    "terms": {"data", "ops", "stages"},
    "metrics": {"collect", "data", "ops", "stages"},
    "loop": {"batch", "collect", "data", "metrics", "ops", "stages", "state", "terms"},
    "recipe": {"data", "find", "ops", "stages", ANY_MECHANISM},
    "recipes": {"data", "find", "ops", "recipe", "recipes", "stages", ANY_MECHANISM},
    "precision": {"data", "stages", "ops"},
    "refit": {"data", "stages", "ops", "state", "refit"},
    "transfer": {"state", "ops", "transfer"},
    "evaluation": {"data", "stages", "ops", "evaluation"},
    "tracking": {"data", "ops", "state", "evaluation", "tracking", "engine.device", "oneloop"},  # device: the CPU's flags
    "lab": {"lab"},
    "engine": {"batch", "data", "metrics", "ops", "stages", "state", "engine"},
    "session": {
        "data", "evaluation", "find", "loop", "ops", "recipe", "recipes", "stages", "state", "tracking", "engine"
    },
    "cli": {"find", "ops", "recipe", "recipes", "session", "state", "tracking", "evaluation", "engine", "cli", "oneloop"},
    "": set(),
}  # fmt: skip


def role(module):
    """The row of ALLOWED that a module belongs to."""
    first = module.split(".")[0]
    return "mechanism" if first in STAGES else first


def wrong(module, tree):
    """Imports that the table does not allow."""
    out = set()
    for target in ours(tree) - {module}:
        first = target.split(".")[0]
        if role(module) == "mechanism":
            same = first == module.split(".")[0]
            if not (target in MECHANISM or same):
                out.add(target)
        else:
            allowed = ALLOWED.get(role(module), set())
            if not {first, target} & allowed and not (ANY_MECHANISM in allowed and first in STAGES):
                out.add(target)
    return out


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    assert wrong(module, MODULES[module]) == set()


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("loop", "from oneloop.credit.group_mean import GroupMean", "credit.group_mean"),
        ("engine.core", "from oneloop.objective.policy import Policy", "objective.policy"),
        ("engine.core", "def f():\n    import oneloop.recipes.grpo", "recipes.grpo"),
        ("credit.group_mean", "from oneloop.objective.policy import Policy", "objective.policy"),
        ("credit.group_mean", "from oneloop.engine import passes", "engine.passes"),
        ("credit.group_mean", "from oneloop.batch import pack", "batch"),
        ("data", "from oneloop import ops", "ops"),
        ("evaluation.accuracy", "from . import intervals", "a relative import"),
        ("terms", "from oneloop.loop import step", "loop"),
    ],
)
def test_a_planted_import_is_seen(module, line, found):
    assert found in wrong(module, ast.parse(line))


def test_the_table_names_every_part_of_the_package():
    assert {role(m) for m in MODULES} - {"mechanism", "oneloop"} <= set(ALLOWED)


@pytest.mark.parametrize("module", MECHANISMS)
def test_a_mechanism_imports_no_heavy_library_at_its_head(module):
    head = ast.Module([n for n in MODULES[module].body if isinstance(n, ast.Import | ast.ImportFrom)], [])
    assert not imported(head) & HEAVY


def fresh(code):
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


HEAVY = {"torch", "transformers", "peft", "matplotlib", "gguf"}
SEEN = f"; print('heavy', *sorted({HEAVY} & {{m.split('.')[0] for m in sys.modules}}))"


@pytest.mark.parametrize(
    "code",
    [
        "import oneloop.recipes",
        "import oneloop.recipe, oneloop.loop, oneloop.terms, oneloop.batch",
        "from oneloop.recipes import load_recipe; load_recipe('grpo').check()",
        "import oneloop.cli",
    ],
)
def test_light_imports(code):
    assert fresh(f"import sys; {code}{SEEN}").split() == ["heavy"]


def test_help_is_light_and_lists_the_commands():
    run = "from oneloop.cli import cli; cli(['--help'], standalone_mode=False)"
    out = fresh(f"import sys; {run}{SEEN}")
    assert out.rstrip().endswith("heavy")
    for command in ("train", "resume", "quickstart", "model"):
        assert f"  {command}" in out


def test_a_heavy_module_would_be_seen():
    assert fresh(f"import sys; import oneloop.engine.device{SEEN}").split() != ["heavy"]
