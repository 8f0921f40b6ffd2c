"""The teaching script and the recipe `grpo` are the same algorithm: two implementations that share no line.

On a tiny model in fp64 the tokens are identical, and losses, scores and gradient norms agree within RTOL over STEPS
steps of two updates each. The model's class computes its norms in fp32, and the updates carry that on: hence the bound.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from oneloop.environments.arithmetic import Arithmetic
from oneloop.environments.arithmetic import score as score_arithmetic
from oneloop.loop import step
from oneloop.stages import Model

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo_one_file.py"
STEPS, RTOL, ATOL = 6, 1e-6, 1e-8
SIZES = {"steps": STEPS, "prompts": 4, "rollouts": 4, "max_tokens": 3, "epochs": 2, "seed": 3, "lr": 3e-3}


def script(tmp_path: Path, *faults: tuple[str, str]):
    """The script as a module, with faults planted in its text."""
    text = SCRIPT.read_text()
    for old, new in faults:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    del sys.modules[path.stem]
    return module


def by_script(module, model: Path, **changes) -> list[dict]:
    args = SimpleNamespace(model=str(model), **{"task": "echo", "dtype": "float64", **SIZES, **changes})
    return list(module.train(args))


@pytest.fixture
def by_recipe(opened, toy, tiny):
    """The same six steps by oneloop: metrics and tokens."""
    changes = ("learners.policy.epochs=2", f"learners.policy.optimiser.lr={SIZES['lr']}", f"seed={SIZES['seed']}")
    session = opened(toy("grpo", *changes, models={"policy": Model(str(tiny), dtype="float64")}))
    out = []
    for i in range(STEPS):
        metrics = asyncio.run(step(session.run))
        rows, _ = session.run.log.read(i, 0)
        out.append({**metrics, "ids": [r.turns[0].context + r.turns[0].response for r in rows]})
    return out


def columns(records: list[dict], *names: str) -> np.ndarray:
    return np.array([[r.get(n, 0.0) for n in names] for r in records])


def differ(ours: list[dict], theirs: list[dict]) -> list[str]:
    """What is not the same: tokens exactly, numbers within the tolerance."""
    out = []
    if [r["ids"] for r in ours] != [[tuple(row.prompt + row.ids) for row in r["rows"]] for r in theirs]:
        out.append("tokens")
    for a, b in (("collect/score", "score"), ("policy/loss", "loss"), ("policy/grad_norm", "grad_norm")):
        if not np.allclose(columns(ours, a), columns(theirs, b), rtol=RTOL, atol=ATOL):
            out.append(b)
    return out


def test_script_and_recipe_are_the_same(by_recipe, tiny, tmp_path):
    theirs = by_script(script(tmp_path), tiny)
    assert differ(by_recipe, theirs) == []
    # the comparison is not empty: every step has a gradient, and the second update's loss is not 0
    assert min(r["grad_norm"] for r in theirs) > 1e-3
    assert max(abs(r["loss"]) for r in theirs) > 1e-3


FAULTS = {
    "std without Bessel": ("scores.std(ddof=1)", "scores.std()"),
    "ratio upside down": ("now - sampled, 0.0)", "sampled - now, 0.0)"),
    "no clipping": ("ratio.clamp(1 - clip, 1 + clip) * credit", "ratio * credit"),
    "mean over tokens": ("real / lengths[:, None]).sum() / num_rollouts", "real).sum() / lengths.sum() / 4"),
    "one token late": ("[:, :-1]  # position", "[:, 1:]  # position"),
    "other stream": ('"rollout", name, 0', '"rollout", name, 1'),
    "padding id without gradient": ("model.get_input_embeddings().padding_idx = None", "pass"),
    "gradient not clipped": ("if norm > 1.0:", "if norm > 1e9:"),
    "end token not learnt": ("if not row.ids or row.ids[-1] not in stop:", "if token not in stop or not row.ids:"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, by_recipe, tiny, tmp_path):
    assert differ(by_recipe, by_script(script(tmp_path, FAULTS[fault]), tiny)) != []


def test_the_wrong_std_is_seen(by_recipe, tiny, tmp_path):
    found = differ(by_recipe, by_script(script(tmp_path, FAULTS["std without Bessel"]), tiny))
    assert "grad_norm" in found


@pytest.mark.slow
def test_the_script_learns(tiny, tmp_path):
    changes = {"steps": 40, "prompts": 8, "rollouts": 8, "epochs": 1, "lr": 1e-2}
    scores = [r["score"] for r in by_script(script(tmp_path), tiny, dtype="float32", **changes)]
    assert np.mean(scores[-5:]) > 0.4 > 0.2 > scores[0]


def test_the_task_of_sums_is_the_same(tmp_path):
    module = script(tmp_path)
    items = Arithmetic(train_size=300).items("train")
    mine = module.sums(300)
    assert [(i.id, i.question, i.answer) for i in mine] == [(i.id, i.messages[0]["content"], i.meta["answer"]) for i in items]
    for text in ("12", "It is -7.", "1,0", "no number", "5.0", "-", "3 + 4 = 7", "", "007", "10 or 11"):
        for item in items[:20]:
            said = text.replace("7", item.meta["answer"].lstrip("-"))
            assert module.score_sums(said, item.meta["answer"]) == score_arithmetic(said, item.meta)["value"], said


def test_the_script_stands_alone_and_fits():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 250
    assert "import oneloop" not in text
    assert "from oneloop" not in text
