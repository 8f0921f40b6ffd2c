"""The loop: one step from top to bottom, each stage one named call. Read this first.

Prompts are chosen (1), the policy answers them in an environment (2, 3), something scores the answers (4), rows nobody sampled
join (5), scores become credit and streams (6), each learner's terms become a loss (7), the loss a direction (8), the direction
new weights (9), and the new weights go back to where the answers are sampled (10).

Synchronous is lag 0. With lag k the rollouts of a step are sampled by the weights of k steps before, so that collection may run
ahead of the updates; every token says which version sampled it. All state is the run's (state.py), all randomness is drawn from
streams named by (seed, step, stage, item): that is why a run can be stopped anywhere and go on bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oneloop.batch import cut, pack, with_views, write
from oneloop.collect import Collected, collect
from oneloop.data import Batch, Need, Rollout
from oneloop.metrics import Meter, group_count, summary
from oneloop.ops import weight
from oneloop.stages import Engine, Environment, Follow, Learner
from oneloop.state import State, rng
from oneloop.terms import Sum


@dataclass
class Run:
    """A recipe at work: its mechanisms opened, the engine, the state, and where rollouts are logged before they are learnt from."""

    recipe: Any
    mechanisms: Mapping[str, Any]
    engine: Engine
    environment: Environment
    state: State
    log: Any


async def step(run: Run) -> dict[str, float]:
    """One step. Consumes run.state, leaves the state of the next step in it, and returns the step's metrics."""
    now, recipe, s = run.state.step, run.recipe, run.state.mechanisms
    meter, batch, fresh = Meter(), None, Collected()
    before = dict(s)  # a refill assigns anew from the state the step began with
    while batch is None or (await_more(recipe, batch) and fresh.rounds < recipe.max_rounds):
        batch, fresh = await assemble(run, fresh, before)
    meter.add("collect", summary(fresh, batch))
    meter.add("time", {"collect": (fresh.seconds, 1.0)})
    objectives = prepare(run, batch)
    for name, objective in objectives.items():  # 7, 8, 9
        for update in range(recipe.learners[name].epochs):
            learn(run, name, objective, update, meter)
    for name, model in recipe.models.items():
        if model.follow:
            follow(run, name, *model.follow)
    for name, mechanism in run.mechanisms.items():
        s[name] = mechanism.observe(batch, meter.means(), s.get(name))
    run.state.step = now + 1
    run.state.digests = dict(run.engine.publish(now + 1))  # 10
    return meter.means()


async def assemble(run: Run, fresh: Collected, before: Mapping[str, Any]) -> tuple[Batch, Collected]:
    """Stages 1 to 6 once: ask for rollouts, join, pack, assign. `fresh` holds what earlier rounds of this step collected."""
    now, s, m = run.state.step, run.state.mechanisms, run.mechanisms
    requests, s["prompts"] = m["prompts"](now, s["prompts"], rng(run, "prompts", fresh.rounds))  # 1
    fresh, old = await collect(run, requests, fresh), len(fresh.rows)  # 2, 3, 4
    early(run, fresh.rows[old:])
    rows: list[Rollout] = list(fresh.rows)
    for name in (n for n in m if n.startswith("join.")):  # 5
        joined, s[name] = m[name](fresh.rows, before[name], rng(run, name))
        rows += joined
    batch = pack(rows, now)
    for name in (n for n in m if n.startswith("assign.")):  # 6
        batch = attach(run, batch, m[name].needs)
        written, s[name] = m[name](batch, before[name], rng(run, name))
        batch = write(batch, written)
    return batch, fresh


def early(run: Run, rows: Sequence[Rollout]) -> None:
    """Lets estimates that stream work on rollouts as they come, before their group's credit is known."""
    for name, learner in run.recipe.learners.items() if rows else ():
        estimate, s = run.mechanisms[f"estimate.{name}"], run.state.mechanisms
        s[f"estimate.{name}"] = estimate.early(run.engine, learner.model, pack(rows, run.state.step), s[f"estimate.{name}"])


def await_more(recipe: Any, batch: Batch) -> bool:
    """Whether the step still lacks groups with weight in the policy stream."""
    return group_count(batch, weight(batch, "policy") > 0) < recipe.enough


def attach(run: Run, batch: Batch, needs: Any, on: Any = None) -> Batch:
    """The batch with the columns of these needs at the step's start, on the rows still alive."""
    batch = with_views(batch, needs, {n.removeprefix("view."): m for n, m in run.mechanisms.items() if n[:5] == "view."})
    asked = [n for n in needs if isinstance(n, Need) and not n.is_live]
    return replace(batch, columns={**batch.columns, **run.engine.columns(batch, asked, on)}) if asked else batch


def prepare(run: Run, batch: Batch) -> dict[str, list[Sum]]:
    """Every learner's objective on this step's batch, one for each minibatch, with its start columns: before any weight moves."""
    out: dict[str, list[Sum]] = {}
    for name, learner in run.recipe.learners.items():
        if run.state.step % learner.every:
            continue
        out[name] = []
        for part in minibatches(run, name, learner, batch):
            objective = Sum(learner, part, run.state.mechanisms, name)
            objective.batch = attach(run, objective.batch, objective.needs, objective.on(objective.batch))
            out[name].append(objective)
    run.engine.keep_start([n for parts in out.values() for o in parts for n in o.live])
    return out


def minibatches(run: Run, name: str, learner: Learner, batch: Batch) -> list[Batch]:
    """The batch, or its groups dealt at random into `minibatches` parts."""
    if learner.minibatches == 1:
        return [batch]
    groups = np.unique(batch.group_R)
    deal = rng(run, "minibatches", name).permutation(len(groups)) % learner.minibatches
    part_R = deal[np.searchsorted(groups, batch.group_R)]
    return [cut(batch, np.flatnonzero(part_R == i).tolist()) for i in range(learner.minibatches) if (part_R == i).any()]


def learn(run: Run, name: str, objectives: list[Sum], epoch: int, meter: Meter) -> None:
    """One epoch of a learner's updates: a direction (8), then a move (9)."""
    learner, s, engine = run.recipe.learners[name], run.state.mechanisms, run.engine
    estimate, optimiser = run.mechanisms[f"estimate.{name}"], run.mechanisms[f"optimiser.{name}"]
    for i, objective in enumerate(objectives):
        draws = rng(run, "estimate", name, epoch, i)
        kept = s[f"estimate.{name}"]
        direction, m, s[f"estimate.{name}"] = estimate(engine, learner.model, objective.batch, objective, kept, draws)
        weights, measure = engine.weights(learner.model), engine.measure(learner.model, objective.batch)
        weights, s[f"optimiser.{name}"], moved = optimiser(weights, direction, s[f"optimiser.{name}"], measure)
        engine.install(learner.model, weights)
        meter.add(name, m, first=not (epoch or i))
        meter.add(name, moved)


def follow(run: Run, name: str, leader: str, rule: Follow) -> None:
    """A model that trails another takes its new weights."""
    run.engine.install(name, rule(run.engine.weights(name), run.engine.weights(leader), run.state.step))
