"""kill -9 at moments drawn at random over whole runs, saving, pruning, resuming and replaying included: is anything lost?

A parent that has imported torch, but never computed with it, forks one child a life. A life starts or resumes the run and goes on
until it is killed or done. Half of the moments are drawn by time, half by counting calls that change the disk: a child dies before
or after its n-th one, or in the middle of its n-th write. After every death the parent looks at what is left; after every run that got
to its end it compares it with an undisturbed one.

    python benchmarks/kill_anywhere.py --kills 200 --out docs/evidence
    python benchmarks/kill_anywhere.py --kills 20 --fault plain_files --only writes    # a negative control: must find damage
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 a child would import it anew in every life
from killed_life import FAULTS, Death, Journal, live

from oneloop.engine import core  # noqa: F401 as above
from oneloop.environments.echo import Echo
from oneloop.evaluation.intervals import wilson
from oneloop.lab.tiny import tiny_model
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import Evaluate, Recipe, learner
from oneloop.recipes.grpo import recipe as grpo
from oneloop.stages import Model
from oneloop.tracking import rollout_log, run_directory
from oneloop.tracking.evidence import Evidence, Figure, here, write

WEIGHTS = ("model.safetensors", "masters.safetensors")


def tiny_recipe(model: Path, steps: int) -> Recipe:
    """GRPO on the echo task, sampled in an instant; the held-out words are measured every third step."""
    return replace(
        grpo,
        name="kill_anywhere",
        environment=Echo(8),
        models={"policy": Model(str(model), dtype="float32")},
        learners={"policy": learner(lr=1e-2)},
        prompts=Epochs(prompts=4, rollouts=4, max_tokens=3),
        evaluate=Evaluate(every=3, problems=8, max_tokens=3),
        max_errors=0.0,
        steps=steps,
    )


# ---------------------------------------------------------------------- lives


def spawn(*life: Any) -> int:
    """Forks a life; returns its pid."""
    pid = os.fork()
    if pid == 0:
        live(*life)
    return pid


def end(pid: int, seconds: float | None) -> int | None:
    """Waits for a life, and kills it when its time has come. Its exit code, None where it was killed."""
    until = time.monotonic() + (600 if seconds is None else seconds)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return (
                None if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else os.waitstatus_to_exitcode(status)
            )
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            seconds = until = 1e18
        time.sleep(0.001)


# ---------------------------------------------------------------------- what is left, seen by the parent


@dataclass
class Reference:
    """An undisturbed run: by step, its log, its checkpoint's arrays and state; its metrics; how long and how many points it took."""

    logs: dict[int, str]
    checkpoints: dict[int, dict[str, str]]
    metrics: list[dict[str, float]]
    seconds: float
    points: int
    writes: int
    steps: int


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if not k.startswith("time/")}


def read_checkpoint(folder: Path) -> dict[str, str]:
    """What a checkpoint must equal: arrays byte by byte, states, digests. Raises where a file is missing or torn."""
    body = json.loads((folder / "state.json").read_text())
    if body["step"] != int(folder.name):
        raise ValueError(f"holds step {body['step']}")
    files = [folder / "state.safetensors", *(folder / "models" / "policy" / n for n in WEIGHTS)]
    for extra in ("config.json", "tokenizer.json"):
        json.loads((folder / "models" / "policy" / extra).read_text())
    out = {f.name: sha(f.read_bytes()) for f in files}
    return out | {"mechanisms": json.dumps(body["mechanisms"], sort_keys=True), "digests": json.dumps(body["digests"])}


def read_lines(path: Path, *, is_done: bool) -> list[dict[str, Any]]:
    """metrics.jsonl; the last line of a killed run may be torn."""
    lines = path.read_text().splitlines() if path.exists() else []
    out = []
    for i, line in enumerate(lines):
        try:
            out.append(without_time(json.loads(line)))
        except ValueError:
            if is_done or i + 1 < len(lines):
                raise
    return out


def begun(journal: list[str]) -> int:
    """The step that the run has come to."""
    return max((int(line.split()[1]) for line in journal if line.startswith("begin ")), default=0)


def wrong_after_death(run: Path, reference: Reference, journal: list[str]) -> list[str]:
    """Everything a death has damaged or lost; nothing, if all is well."""
    wrong: list[str] = []

    def check(what: str, verdict: Any) -> Any:
        try:
            said = verdict()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if isinstance(said, str):
            wrong.append(f"{what}: {said}")
        return said

    if not (run / "run.json").exists():
        return ["a run without run.json has logs"] if list((run / "log").glob("*.msgpack")) else []
    check("run.json", lambda: json.loads((run / "run.json").read_text()) and None)
    found = sorted(p for p in (run / "checkpoints").glob("*") if not p.name.startswith("."))
    for p in found:
        step = int(p.name)
        check(f"checkpoint {step}", lambda p=p, step=step: read_checkpoint(p) != reference.checkpoints[step] and "differs")
    logs = sorted((run / "log").glob("[0-9]*"))
    for p in logs:
        step = int(p.name[:6])
        check(f"log {step}", lambda p=p, step=step: sha(p.read_bytes()) != reference.logs[step] and "differs")
    newest = max((int(p.name) for p in found), default=0)
    lost = [s for s in range(newest, begun(journal)) if s not in {int(p.name[:6]) for p in logs}]
    if lost:
        wrong.append(f"steps {lost} are neither in checkpoint {newest} nor in the log")
    lines = check("metrics.jsonl", lambda: read_lines(run / "metrics.jsonl", is_done=False))
    if isinstance(lines, list) and lines != reference.metrics[: len(lines)]:
        wrong.append("metrics.jsonl differs")
    return wrong


def wrong_in_life(before: set[int], newest: int, journal: list[str]) -> list[str]:
    """Steps that a life sampled or did again though they were on the disk."""
    did = [(line.split()[0], int(line.split()[1])) for line in journal if line.startswith(("sampled ", "begin "))]
    again = sorted({s for what, s in did if what == "sampled" and s in before and s >= newest})
    old = sorted({s for _, s in did if s < newest})
    failed = [
        json.loads(line.removeprefix("failed ")).strip().splitlines()[-1] for line in journal if line.startswith("failed ")
    ]
    out = [f"sampled again: {again}"] if again else []
    return out + ([f"done again: {old}"] if old else []) + [f"cannot go on: {f}" for f in failed]


def wrong_at_end(run: Path, reference: Reference) -> list[str]:
    """Everything in which a run that got to its end differs from an undisturbed one."""
    wrong = []
    if read_lines(run / "metrics.jsonl", is_done=True) != reference.metrics:
        wrong.append("final metrics differ")
    if read_checkpoint(run / "checkpoints" / f"{reference.steps:06d}") != reference.checkpoints[reference.steps]:
        wrong.append("final weights, moments or states differ")
    parts = [str(p.relative_to(run)) for p in run.rglob(".*.part")]
    return wrong + ([f"left behind: {parts}"] if parts else [])


# ---------------------------------------------------------------------- the experiment


def make_model(folder: Path) -> None:
    """In a child, since the parent must not compute."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        tiny_model(folder, [f"w{i}" for i in range(8)], width=32)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def undisturbed(folder: Path, recipe: Recipe) -> Reference:
    """A run whose every step is kept, and one as the lives are, for its length."""
    whole, plain = folder / "undisturbed", folder / "plain"
    pid = os.fork()
    if pid == 0:
        run_directory.KEEP = 10**6
        rollout_log.RolloutLog.forget_before = lambda *_: None
        always = random.Random(0)
        always.random = lambda: 0.0
        live(whole, recipe, Journal(folder / "undisturbed.txt"), Death(), always)
    if os.waitpid(pid, 0)[1] != 0:
        sys.exit((folder / "undisturbed.txt").read_text()[-2000:])
    logs = {int(p.name[:6]): sha(p.read_bytes()) for p in (whole / "log").glob("*.msgpack")}
    checkpoints = {int(p.name): read_checkpoint(p) for p in (whole / "checkpoints").glob("[0-9]*")}
    begin = time.monotonic()
    assert end(spawn(plain, recipe, Journal(folder / "plain.txt"), Death(), random.Random(1)), None) == 0
    seconds = time.monotonic() - begin
    points, writes = map(int, (folder / "plain.txt").read_text().rsplit("points ", 1)[1].split())
    metrics = read_lines(whole / "metrics.jsonl", is_done=True)
    assert read_lines(plain / "metrics.jsonl", is_done=True) == metrics
    return Reference(logs, checkpoints, metrics, seconds, points, writes, recipe.steps)


def draw_death(draw: random.Random, reference: Reference, only: str) -> Death:
    """Uniform over the time, over the points or over the writes of an undisturbed run."""
    kind = only or draw.choice(("time", "time", "time", "points", "points", "writes"))
    if kind == "time":
        return Death(seconds=draw.uniform(0, reference.seconds))
    if kind == "writes":
        return Death(point=draw.randint(1, reference.writes), when="torn")
    return Death(point=draw.randint(1, reference.points), when=draw.choice(("before", "after")))


@dataclass
class Tally:
    """What happened."""

    kills: int = 0
    lives: int = 0
    runs: int = 0
    replayed: int = 0
    phases: Counter = field(default_factory=Counter)
    means: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def count_kill(self, death: Death, journal: list[str]) -> None:
        self.kills += 1
        self.phases[next((x.split()[1] for x in reversed(journal) if x.startswith("phase ")), "start")] += 1
        died = next((x.split()[1:] for x in reversed(journal) if x.startswith("dying ")), None)
        self.means["time" if death.seconds is not None else " ".join(died or ["?"])] += 1


def one_run(run: Path, recipe: Recipe, reference: Reference, tally: Tally, args: argparse.Namespace) -> None:
    """Lives of one run until it is done, or damaged, or there have been enough kills."""
    past: list[str] = []
    while True:
        life = tally.lives
        draw = random.Random(f"{args.seed}.{life}")
        death = draw_death(draw, reference, args.only) if tally.kills < args.kills else Death()
        logged = {int(p.name[:6]) for p in (run / "log").glob("[0-9]*")}
        newest = max((int(p.name) for p in (run / "checkpoints").glob("[0-9]*")), default=0)
        diary = Journal(run.with_suffix(f".{life}.txt"))
        code = end(spawn(run, recipe, diary, death, draw, args.fault), death.seconds)
        os.close(diary.fd)
        journal = diary.path.read_text().splitlines()
        past += journal
        tally.lives += 1
        tally.replayed += sum(line.startswith("replayed ") for line in journal)
        wrong = wrong_in_life(logged, newest, journal)
        if code is None:
            tally.count_kill(death, journal)
            wrong += wrong_after_death(run, reference, past)
        elif code == 0:
            tally.runs += 1
            wrong += wrong_at_end(run, reference)
        tally.wrong += [f"run {run.name}, life {life}, {death}: {w}" for w in wrong]
        if code is not None or wrong:
            return


def evidence(tally: Tally, reference: Reference, args: argparse.Namespace) -> Evidence:
    """What docs/evidence/kill_anywhere.json holds."""
    bad = len({w.split(": ")[0] for w in tally.wrong})
    lost = "kills after which more than the step in flight was lost, or the run came out otherwise than undisturbed"
    figures = {
        "lost": Figure(bad / tally.kills, wilson(bad, tally.kills), "share", f"{lost}; Wilson's interval over all kills"),
        "kills": Figure(
            tally.kills, None, "count", "kill -9 at a moment drawn at random, counted where the process died of it"
        ),
        "lives": Figure(tally.lives, None, "count", "processes, those that got to the end included"),
        "runs": Figure(tally.runs, None, "count", "runs that got to their end and were compared with an undisturbed one"),
        "replayed": Figure(tally.replayed, None, "count", "steps learnt again from the log after a kill"),
    }
    counts = {"killed_during": dict(tally.phases.most_common()), "killed_by": dict(tally.means.most_common())}
    return Evidence(
        name="kill_anywhere",
        recipe="grpo",
        changes=("echo task", "random 2-layer Llama, fp32", f"steps={reference.steps}", "lag=0", "1 thread"),
        seeds=(args.seed,),
        figures=figures,
        runs=({"seed": args.seed, **counts, "points_in_an_undisturbed_run": reference.points},),
        command=f"python benchmarks/kill_anywhere.py --kills {args.kills} --seed {args.seed} --steps {args.steps}",
        **here(["killed_by: by the clock, or before, after or in the middle of a call that changes the disk"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=("", "time", "points", "writes"), default="")
    parser.add_argument("--fault", choices=("", *FAULTS), default="")
    parser.add_argument("--out", type=Path, help="folder for kill_anywhere.json")
    args = parser.parse_args()
    folder, tally = Path(tempfile.mkdtemp(prefix="kill_anywhere.")), Tally()
    try:
        make_model(folder / "model")
        recipe = tiny_recipe(folder / "model", args.steps)
        reference = undisturbed(folder, recipe)
        print(f"undisturbed: {reference.seconds:.1f} s, {reference.points} points", flush=True)
        number = 0
        while tally.kills < args.kills and not (args.fault and tally.wrong):
            one_run(folder / f"{number:04d}", recipe, reference, tally, args)
            shutil.rmtree(folder / f"{number:04d}", ignore_errors=True)
            number += 1
            print(f"{tally.kills} kills, {tally.runs} runs to the end, {len(tally.wrong)} wrong", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"phases": tally.phases, "means": tally.means, "replayed": tally.replayed}, indent=1))
    print("\n".join(tally.wrong))
    if args.out:
        write(evidence(tally, reference, args), args.out)
    sys.exit(1 if tally.wrong else 0)


if __name__ == "__main__":
    main()
