"""A run opened in this process: recipe checked, folder held, engine loaded, mechanisms opened; then trained, saved, gone on with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from oneloop.data import Prompt
from oneloop.evaluation.accuracy import Measured, measure
from oneloop.find import UnknownName
from oneloop.loop import Run, step
from oneloop.recipe import Recipe, RecipeError, diff, override, plain
from oneloop.recipes import fingerprint, load_recipe, whole_name
from oneloop.stages import Resources
from oneloop.state import State, write_file
from oneloop.tracking import alarms
from oneloop.tracking.run_directory import RunDirectory, RunError, damaged, surroundings

T = TypeVar("T")
Report = Callable[[int, Mapping[str, float]], None]


@dataclass
class Session:
    """Everything a training process holds. `close` lets go of it.

    is_reporting: whether the run is to end with a before/after table and a picture.
    later: metrics, by step, that an interrupted life measured and this one measures again. notes: what a reader should know.
    clock, began, spent, save_cost: seconds; when training began, how long it has saved since, what one save takes.
    """

    recipe: Recipe
    folder: RunDirectory
    run: Run
    sandbox: Any
    test: Sequence[Prompt]
    later: dict[int, dict[str, Any]] = field(default_factory=dict)
    history: list[Mapping[str, float]] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    is_reporting: bool = False
    clock: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)
    spent: float = 0.0
    save_cost: float | None = None
    stopped_by: int = 0

    @property
    def engine(self) -> Any:
        """The run's, and what the loop need not know of it: digests, networks, the sampling service."""
        return self.run.engine

    def close(self) -> None:
        """Sandbox and folder."""
        self.sandbox.close()
        self.folder.close()


class Interrupted(KeyboardInterrupt):
    """Stopped at once by a signal, whose number it carries."""

    def __init__(self, signum: int) -> None:
        """signum: SIGINT or SIGTERM."""
        super().__init__(signum)
        self.signum = signum


def start(name: str, changes: Sequence[str], out: Path, *, report: bool = False) -> Session:
    """A new run of a recipe with changes. Everything that can be refused is refused before weights load, and leaves no trace.

    report: whether it measures the held-out problems before and after, and ends with a table and a picture.
    """
    recipe = checked(name, changes)
    folder = RunDirectory(out)
    session = None
    try:
        folder.refuse_second()
        asked = {
            "recipe": whole_name(name),
            "file": fingerprint(name),
            "changes": list(changes),
            "seed": recipe.seed,
            "report": report,
            "differs": [{"path": p, "from": a, "to": b} for p, a, b in diff(load_recipe(name), recipe)],
            "resolved": plain(recipe),
        }
        session = _open(recipe, folder, None)
        folder.begin({**asked, "digests": dict(session.engine.digests)})
        session.is_reporting = report
    except BaseException:
        if session is not None:
            session.sandbox.close()
        folder.abandon()
        raise
    return session


def resume(out: Path) -> Session:
    """A run gone on with: its newest checkpoint, then its log. Raises RunError where recipe or start weights have changed.

    At lag 0 it comes out bit for bit as if it had not been stopped, on the same machine and versions. At lag > 0 the weights
    before the checkpoint's are gone: rollouts that are not in the log and would have been sampled by those are sampled by the
    checkpoint's (State.first_version).
    """
    if not (out / "run.json").exists():
        raise RunError(f"{out} holds no run to resume: it has no run.json")
    folder = RunDirectory(out, is_new=False)
    session = None
    try:
        asked = folder.asked()
        recipe = _same_recipe(asked)
        found = folder.newest()
        folder.log.check(found[0].step if found else 0)
        try:
            session = _open(recipe, folder, found)
        except Exception as error:
            if type(error).__name__ != "SafetensorError" or found is None:
                raise
            raise damaged(found[1].parent, error) from None
        if found is None and dict(session.engine.digests) != asked["digests"]:
            raise RunError(f"the start weights of {out} have changed: the model it began with is needed to go on")
        session.later = folder.rewind(session.run.state.step)
        session.history = list(folder.measured())
        session.notes, session.is_reporting = _other_versions(asked), bool(asked.get("report"))
    except BaseException:
        if session is not None:
            session.sandbox.close()
        folder.close()
        raise
    return session


def _same_recipe(asked: Mapping[str, Any]) -> Recipe:
    """The recipe that run.json asks for. Raises RunError where it is another one today."""
    name = asked["recipe"]
    recipe = checked(name, asked["changes"])
    now, then = json.loads(json.dumps(plain(recipe))), asked["resolved"]
    other = "put it back as it was, or start a new run"
    if changed := diff(then, now):
        path, old, new = changed[0]
        raise RunError(f"recipe {name} is not what this run began with: {path} was {old}, is {new}: {other}")
    if fingerprint(name) != asked.get("file"):
        raise RunError(f"recipe file {name} is not what this run began with (its sha256 differs): {other}")
    return recipe


def _other_versions(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each package that is not the version the run began with."""
    now = surroundings()
    then = {"oneloop": asked.get("oneloop"), **asked.get("packages", {})}
    new = {"oneloop": now["oneloop"], **now["packages"]}
    found = [f"{p} {v} (began with {then[p]})" for p, v in new.items() if p in then and then[p] != v]
    return (f"not bit for bit what it would have been: {', '.join(found)}",) if found else ()


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
        resources = Resources(prompts, items, engine.encode, engine.text, engine.tokenizer.eos_token_id or 0, sandbox.call)
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
    session.began = session.clock()
    bounds = alarms.bounds_of(network.dtype for network in session.engine.networks.values())
    while run.state.step < recipe.steps and not session.stopped_by:
        now, begin, sampled = run.state.step, time.perf_counter(), session.engine.service.sampled_tokens
        metrics = await step(run)
        seconds = time.perf_counter() - begin
        metrics |= {"time/step": seconds, "time/tokens_per_second": (session.engine.service.sampled_tokens - sampled) / seconds}
        if (every := recipe.evaluate.every) and run.state.step % every == 0:
            metrics |= await _validate(session)
        metrics |= alarms.check(metrics, session.history, bounds)
        session.history.append(metrics)
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
    """Whether one more save keeps saving within the recipe's save_share of all time since training began.

    What a save costs is measured on the last one, and guessed before the first; a guess that was too low is paid back.
    """
    cost = session.save_cost if session.save_cost is not None else guess_cost(session)
    return (session.clock() - session.began) * session.recipe.save_share >= session.spent + cost


def guess_cost(session: Session) -> float:
    """Seconds to write masters, moments and weights at 200 MB/s, and half of one for the small files and flushing."""
    numbers = sum(w.numel() for net in session.engine.networks.values() for w in net.masters.values())
    return 0.5 + numbers * 14 / 200e6


def save(session: Session) -> Path:
    """A checkpoint of the next step."""
    begin = session.clock()
    path = session.folder.save(session.run.state, session.run.engine)
    session.save_cost = session.clock() - begin
    session.spent += session.save_cost
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
    """`train` under signals. Ctrl-C or SIGTERM finishes the step and saves, a second one stops at once; nothing logged is lost."""

    def stop(signum: int, _: object) -> None:
        if session.stopped_by:
            raise Interrupted(signum)
        session.stopped_by = signum
        said = f"\nfinishing step {session.run.state.step}, then saving; Ctrl-C again stops at once\n"
        os.write(2, said.encode())  # print may be at work when the signal comes

    with on_signals(stop):
        return to_end(train, session, report)


def to_end(work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """asyncio.run, which an Interrupted leaves without words about the tasks it went through."""

    def say(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Interrupted | asyncio.CancelledError):
            loop.default_exception_handler(context)

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(say)
        return await work(*arguments)

    return asyncio.run(main())


def interrupt(signum: int, _: object) -> None:
    """A signal handler that stops at once."""
    raise Interrupted(signum)


@contextmanager
def on_signals(handler: Callable[[int, Any], None] = interrupt) -> Iterator[None]:
    """SIGINT and SIGTERM call `handler` here; before and after, what they called before."""
    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, old in before.items():
            signal.signal(s, old)


def measured(session: Session, name: str) -> Measured:
    """The measurement kept with the run as `name`; where there is none yet, one by the weights as they stand."""
    path = session.folder.folder / f"{name}.json"
    if path.exists():
        body = json.loads(path.read_text())
        return Measured(**{k: tuple(v) for k, v in body.items() if k != "summary"})
    found = to_end(evaluate, session)
    write_file(path, json.dumps(found.plain(), indent=1).encode())
    return found
