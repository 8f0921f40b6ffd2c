"""Mistakes made as a user would, through the real command line: one clear line with the fix, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promises.lives import done, oneloop, recipe_file, refused, surroundings

NAN = """
@dataclass(frozen=True)
class Broken(Reward):
    async def __call__(self, group, state):
        return [Score(float("nan")) for _ in group]
"""
IMPORTS = "from dataclasses import dataclass\nfrom oneloop.data import Score\nfrom oneloop.stages import Reward"


@pytest.fixture
def mine(tiny: Path, tmp_path: Path) -> Path:
    return recipe_file(tmp_path / "mine.py", tiny)


@pytest.fixture(scope="module")
def begun(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe file, and a finished run of it."""
    folder = tmp_path_factory.mktemp("begun")
    done(oneloop("train", recipe_file(folder / "mine.py", tiny), "steps=2", "--out", folder / "run"))
    return folder


@pytest.fixture
def copy(begun: Path, tmp_path: Path) -> Path:
    """The same run, to be spoilt."""
    shutil.copytree(begun / "run", tmp_path / "run")
    return tmp_path / "run"


def imported(*arguments: str) -> tuple[str, set[str]]:
    """What a command says, and the modules it imports."""
    code = (
        "import sys, json, contextlib, io\nfrom oneloop.cli import main\nout = io.StringIO()\n"
        f"sys.argv = ['oneloop', *{list(arguments)!r}]\n"
        "with contextlib.redirect_stdout(out):\n    try: main()\n    except SystemExit as end: code = end.code\n"
        "print(json.dumps([out.getvalue(), sorted(sys.modules), code]))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=surroundings())
    text, modules, code = json.loads(said.stdout)
    assert code == 0
    return text, set(modules)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("train", "--help"), ("resume", "--help"), ("quickstart", "--help")])
def test_help_is_light(arguments):
    text, modules = imported(*arguments)
    assert "Usage: oneloop" in text
    assert not modules & {"torch", "transformers", "numpy", "matplotlib", "rich", "asyncio"}
    ours = {m for m in modules if m.startswith("oneloop")}
    assert ours <= {"oneloop", "oneloop.cli", *(f"oneloop.cli.{a}" for a in arguments)}


def test_every_command_is_in_the_help_and_in_its_file():
    text, _ = imported("--help")
    commands = Path(sys.modules["oneloop"].__file__).parent / "cli"
    for name in ("train", "resume", "quickstart", "model"):
        assert name in text
        assert (commands / f"{name}.py").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian", "grpo"), ("'trian'", "did you mean 'train'")),
        (("train",), ("Missing argument 'RECIPE'", "oneloop train --help")),
        (("train", "grpo", "--ot", "x"), ("No such option", "--out")),
        (("train", "gpro"), ("'gpro'", "did you mean 'grpo'")),
        (("train", "grpo", "step=3"), ("'step'", "did you mean 'steps'")),
        (("train", "grpo", "learners.policy.optimizer.lr=1"), ("'optimizer'", "did you mean 'optimiser'")),
        (("train", "grpo", "steps=many"), ("steps = 'many'", "int is wanted")),
        (("train", "grpo", "steps=1.5"), ("steps = 1.5", "int is wanted")),
        (("train", "grpo", "steps=-1"), ("steps = -1", "between 0 and")),
        (("train", "grpo", "learners.policy.optimiser.lr=fast"), ("lr = 'fast'", "float is wanted")),
        (("train", "grpo", "learners.policy.optimiser.lr=99"), ("lr = 99", "between 0 and 10")),
        (("train", "grpo", "steps"), ("'steps' is no change", "steps=50")),
        (("train", "grpo", "environment.extract=lastnumber"), ("'lastnumber'", "'last_number'")),
        (("train", "grpo", "learners.policy.minibatches=99"), ("99 minibatches", "at most 16")),
        (("train", "./nowhere.py"), ("no recipe file", "nowhere.py")),
        (("resume", "nowhere"), ("nowhere holds no run to resume",)),
    ],
)
def test_a_slip_of_the_pen(arguments, words, tmp_path):
    refused(oneloop(*arguments, cwd=tmp_path), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recip = 1\n", ("defines no recipe",)),
        ("recipe = 1\n", ("defines no recipe",)),
        ("import oneloop.nothing\n", ("does not run", "ModuleNotFoundError", "oneloop.nothing")),
        ("recipe = (\n", ("does not run", "SyntaxError", "line 1")),
        (
            "from dataclasses import replace\nfrom oneloop.recipes.grpo import recipe\nrecipe = replace(recipe, steps=-1)\n",
            ("does not run", "steps = -1"),
        ),
    ],
)
def test_a_recipe_file_that_is_none(text, words, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    refused(oneloop("train", "mine.py", cwd=tmp_path), "mine.py", *words)
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_recipe_file(mine, tmp_path):
    refused(oneloop("train", "./mien.py", cwd=tmp_path), "'mien.py'", "did you mean 'mine.py'")


@pytest.mark.slow
def test_a_reward_that_is_nan_names_itself_and_can_be_mended(tiny, tmp_path):
    file = recipe_file(tmp_path / "mine.py", tiny, imports=IMPORTS, code=NAN, fields="reward=Broken(),")
    line = refused(oneloop("train", file, "--out", tmp_path / "run"), "16 of 16 rollouts failed", "the reward gave nan")
    assert "max_errors" in line
    assert "go on with: oneloop resume" in line
    assert (tmp_path / "run" / "metrics.jsonl").exists() is False
    assert list((tmp_path / "run" / "log").iterdir()) == []  # what could not be scored is scored again


@pytest.mark.slow
def test_a_model_that_is_none(tiny, tmp_path):
    def model(name: str, *without: str) -> Path:
        shutil.copytree(tiny, tmp_path / name)
        for pattern in without:
            for path in (tmp_path / name).glob(pattern):
                path.unlink()
        return tmp_path / name

    wrong = {
        str(model("weightless", "*.safetensors")): ("has no weights", "model.safetensors"),
        str(model("speechless", "tokenizer*")): ("has no tokenizer",),
        str(model("configless", "config.json")): ("has no config.json",),
        "smollm2-135n": ("did you mean 'smollm2-135m'",),
        str(tmp_path / "weigthless"): ("no directory",),
    }
    for source, words in wrong.items():
        file = recipe_file(tmp_path / "mine.py", source)
        refused(oneloop("train", file, "--out", tmp_path / "new" / "run"), *words)
        assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_folder_that_holds_something_already(copy, mine, tmp_path):
    before = sorted((p, p.stat().st_mtime_ns) for p in copy.rglob("*") if p.name != ".lock")
    refused(oneloop("train", mine, "--out", copy), "already holds a run", f"oneloop resume {copy}", "--out")
    assert sorted((p, p.stat().st_mtime_ns) for p in copy.rglob("*") if p.name != ".lock") == before
    refused(oneloop("train", mine, "--out", tmp_path), "holds other files", "--out")
    refused(oneloop("train", mine, "--out", mine), "cannot be written", "--out")


@pytest.mark.slow
def test_a_run_in_use(copy):
    import fcntl

    with open(copy / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(oneloop("resume", copy), "in use by another process")


@pytest.mark.slow
def test_a_run_that_is_not_what_it_was(copy, begun, tiny):
    run_json = copy / "run.json"
    good = run_json.read_text()
    for bad in ("", good[:100], "[]", "{}"):
        run_json.write_text(bad)
        refused(oneloop("resume", copy), "run.json is damaged")
    run_json.unlink()
    refused(oneloop("resume", copy), "holds no run to resume")
    run_json.write_text(good)
    file, was = begun / "mine.py", (begun / "mine.py").read_text()
    try:
        file.write_text(was.replace("rollouts=4", "rollouts=5"))
        refused(oneloop("resume", copy), "prompts.rollouts was 4, is 5", "put it back")
        file.write_text(was + "\n# a thought\n")
        refused(oneloop("resume", copy), "mine.py is not what this run began with", "sha256")
        file.unlink()
        refused(oneloop("resume", copy), "no recipe file")
    finally:
        file.write_text(was)


@pytest.mark.slow
def test_a_log_that_is_damaged_or_of_another_version(copy):
    import msgpack
    import xxhash

    log = copy / "log" / "000002.0.msgpack"
    log.write_bytes(b"half of a log")
    refused(oneloop("resume", copy), "000002.0.msgpack is damaged", "remove it and resume")
    other = msgpack.packb({"version": 99, "rows": [], "errors": []})
    log.write_bytes(xxhash.xxh3_128_digest(other) + other)
    refused(oneloop("resume", copy), "has version 99", "run.json")


def test_the_line_of_these_tests_can_be_missing():
    """Negative control: a traceback, two lines or another exit code would be noticed."""
    for code, stderr in [(1, "oneloop: x"), (2, "Traceback\n  x"), (2, "oneloop: x\noneloop: y"), (2, "")]:
        with pytest.raises(AssertionError):
            refused(subprocess.CompletedProcess([], code, "", stderr))
