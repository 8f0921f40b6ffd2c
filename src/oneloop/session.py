"""A run opened in this process: recipe checked, folder held, engine loaded, mechanisms opened; then trained, saved, gone on with."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneloop.data import Prompt
from oneloop.evaluation.accuracy import Measured, measure
from oneloop.find import UnknownName
from oneloop.loop import Run, step
from oneloop.recipe import Recipe, RecipeError, diff, override, plain
from oneloop.recipes import load_recipe
from oneloop.stages import Resources
from oneloop.state import State, write_file
from oneloop.tracking.run_directory import RunDirectory, RunError

Report = Callable[[int, Mapping[str, float]], None]


@dataclass
class Session:
    """Everything a training process holds. `close` lets go of it."""

    recipe: Recipe
    folder: RunDirectory
    run: Run
    sandbox: Any
    test: Sequence[Prompt]
    later: dict[int, dict[str, Any]] = field(default_factory=dict)
    saved_at: float = field(default_factory=time.monotonic)
    save_cost: float | None = None
    is_stopping: bool = False

    def close(self) -> None:
        """Sandbox and folder."""
        self.sandbox.close()
        self.folder.close()


def start(name: str, changes: Sequence[str], out: Path) -> Session:
    """A new run of a recipe with changes. Everything that can be refused is refused before weights load."""
    recipe = checked(name, changes)
    folder = RunDirectory(out)
    try:
        base = load_recipe(name)
        asked = {
            "recipe": name,
            "changes": list(changes),
            "seed": recipe.seed,
            "differs": [{"path": p, "from": a, "to": b} for p, a, b in diff(base, recipe)],
            "resolved": plain(recipe),
        }
        if (folder.folder / "run.json").exists():
            folder.begin(asked)  # refuses
        session = _open(recipe, folder, None)
        folder.begin({**asked, "digests": dict(session.run.engine.digests)})
    except BaseException:
        folder.close()
        raise
    return session


def resume(out: Path) -> Session:
    """A run gone on with: its newest checkpoint, then its log. Raises RunError where recipe or start weights have changed."""
    if not (out / "run.json").exists():
        raise RunError(f"{out} holds no run to resume: it has no run.json")
    folder = RunDirectory(out)
    try:
        asked = folder.asked()
        recipe = checked(asked["recipe"], asked["changes"])
        now, then = json.loads(json.dumps(plain(recipe))), asked["resolved"]
        if changed := diff(then, now):
            path, old, new = changed[0]
            raise RunError(f"recipe {asked['recipe']} is not what this run began with: {path} was {old}, is {new}")
        found = folder.newest()
        session = _open(recipe, folder, found)
        if found is None and dict(session.run.engine.digests) != asked["digests"]:
            raise RunError(f"the start weights of {out} have changed: the model it began with is needed to go on")
        session.later = folder.rewind(session.run.state.step)
    except BaseException:
        folder.close()
        raise
    return session


def checked(name: str, changes: Sequence[str]) -> Recipe:
    """The recipe called `name` after changes, refused with every problem at once. Raises RecipeError."""
    try:
        recipe = override(load_recipe(name), changes)
    except UnknownName as error:
        raise RecipeError(str(error)) from None
    recipe.check()
    return recipe


def _open(recipe: Recipe, folder: RunDirectory, found: tuple[State, Path] | None) -> Session:
    from oneloop.engine.core import TorchEngine
    from oneloop.engine.verdicts import Verdicts

    items = recipe.environment.items("train")
    sandbox = Verdicts({i.meta["scorer"] for i in items[:1] if "scorer" in i.meta})
    try:
        engine = TorchEngine(
            recipe.models,
            recipe.learners,
            slots=recipe.slots,
            token_budget=recipe.token_budget,
            lag=recipe.lag,
            source=found[1] if found else None,
        )
        task = type(recipe.environment).__name__.lower()
        prompts = [engine.prompt(i, task) for i in items]
        test = [engine.prompt(i, task) for i in recipe.environment.items("test")[: recipe.evaluate.problems]]
        resources = Resources(
            prompts, items, engine.encode, engine.text, engine.tokenizer.eos_token_id or 0, sandbox.call
        )
        mechanisms = {n: m.open(resources) for n, m in recipe.mechanisms().items()}
    except BaseException:
        sandbox.close()
        raise
    state = found[0] if found else State(mechanisms={n: m.init() for n, m in mechanisms.items()})
    state.first_version = state.step
    state.digests = dict(engine.publish(state.step))
    run = Run(recipe, mechanisms, engine, mechanisms["environment"], state, folder.log)
    return Session(recipe, folder, run, sandbox, test)


async def evaluate(session: Session) -> Measured:
    """Greedy answers on the held-out problems by the weights as they stand."""
    run, settings = session.run, session.recipe.evaluate
    sampler = run.engine.sampler("policy", run.state.step)
    return await measure(session.test, sampler, run.mechanisms["reward"], max_tokens=settings.max_tokens)


async def train(session: Session, report: Report = lambda step, metrics: None) -> bool:
    """Steps until the recipe's end; True if it got there, False if asked to stop. Saved either way."""
    run, recipe, folder = session.run, session.recipe, session.folder
    while run.state.step < recipe.steps and not session.is_stopping:
        now, begin, sampled = run.state.step, time.perf_counter(), run.engine.service.sampled_tokens
        metrics = await step(run)
        seconds = time.perf_counter() - begin
        metrics |= {"time/step": seconds, "time/tokens_per_second": (run.engine.service.sampled_tokens - sampled) / seconds}
        if every := recipe.evaluate.every:
            if run.state.step % every == 0:
                metrics |= await _validate(session)
        folder.measure(now, metrics)
        report(now, metrics)
        _differs(session.later.pop(now, None), metrics, now, report)
        if is_due(session):
            save(session)
    save(session)
    return run.state.step >= recipe.steps


async def _validate(session: Session) -> dict[str, float]:
    summary = (await evaluate(session)).summary()
    return {f"test/{k}": summary[k]["value"] for k in ("accuracy", "format", "truncated")}


def is_due(session: Session) -> bool:
    """Whether saving now keeps its share of the time within the recipe's save_share; its cost is measured, first guessed."""
    cost = session.save_cost if session.save_cost is not None else guess_cost(session)
    return (time.monotonic() - session.saved_at) * session.recipe.save_share >= cost


def guess_cost(session: Session) -> float:
    """Seconds to write masters, moments and weights at 200 MB/s, before the first save has been timed."""
    numbers = sum(w.numel() for net in session.run.engine.networks.values() for w in net.masters.values())
    return numbers * 14 / 200e6


def save(session: Session) -> Path:
    """A checkpoint of the next step."""
    begin = time.monotonic()
    path = session.folder.save(session.run.state, session.run.engine)
    session.saved_at = time.monotonic()
    session.save_cost = session.saved_at - begin
    return path


def _differs(old: Mapping[str, Any] | None, new: Mapping[str, float], now: int, report: Report) -> None:
    """Says so where a step learnt again from the log came out otherwise than before the interruption."""
    if old is None:
        return
    keys = [k for k in old if k != "step" and not k.startswith("time/")]
    wrong = [k for k in keys if new.get(k) != old[k]]
    if wrong:
        report(now, {"alarm/replay_differs": float(len(wrong))})


def run_to_end(session: Session, report: Report) -> bool:
    """`train` with Ctrl-C: the first finishes the step and saves, the second stops at once; nothing logged is lost."""

    def stop(*_: object) -> None:
        if session.is_stopping:
            raise KeyboardInterrupt
        session.is_stopping = True
        print(f"\nfinishing step {session.run.state.step}, then saving; Ctrl-C again stops at once", flush=True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        return asyncio.run(train(session, report))
    finally:
        signal.signal(signal.SIGINT, before)


def record(session: Session, name: str, measured: Measured) -> dict[str, Any]:
    """A measurement kept with the run, with every answer; returns its summary."""
    body = measured.plain()
    write_file(session.folder.folder / f"{name}.json", json.dumps(body, indent=1).encode())
    return body["summary"]
