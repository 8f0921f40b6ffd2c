"""A recipe: a paper as a Python value, holding what differs from the recipe it starts from.

`diff` shows that, `check` refuses a recipe before any weight is loaded, `override` changes it by dotted path.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from oneloop.data import Need
from oneloop.environments.arithmetic import Arithmetic
from oneloop.estimate.backprop import Backprop
from oneloop.find import nearest
from oneloop.objective.policy import Policy
from oneloop.optimiser.adamw import AdamW
from oneloop.prompts.epochs import Epochs
from oneloop.rewards.verified import Verified
from oneloop.rollout.plain import Plain
from oneloop.stages import (
    Assign,
    Environment,
    Join,
    Learner,
    Mechanism,
    Model,
    Prompts,
    Reward,
    Rolling,
    Term,
    View,
    setting,
)

SAMPLED = frozenset({"score", "version", "temperature", "sampled.logp", "sampled.raw_logp", "sampled.entropy"})


class RecipeError(ValueError):
    """A recipe that cannot run: one line a problem, each naming its fix."""


@dataclass(frozen=True)
class Evaluate:
    """Measuring during training: greedy answers on the task's test split. every 0 = only before and after."""

    every: int = setting(0, low=0, high=10**9, unit="steps")
    problems: int = setting(256, low=1, high=10**7)
    max_tokens: int = setting(256, low=1, high=10**7, unit="tokens")
    __post_init__ = Mechanism.__post_init__


@dataclass(frozen=True)
class Recipe:
    """name, base: its own and that of the recipe it starts from. The stages, in the order of the loop. The budget. The machine.

    enough: groups with weight in the policy stream that a step wants (0: whatever comes); max_rounds: how often it asks.
    lag: steps that collection may run ahead. max_errors: the share of failed rollouts that stops the run. slots: rollouts
    sampled at once. token_budget: packed tokens of a training micro-batch. save_share: time spent saving, of all time.
    """

    name: str
    base: str = ""
    about: str = ""
    environment: Environment = Arithmetic()
    prompts: Prompts = Epochs()
    rolling: Rolling = Plain()
    reward: Reward = Verified()
    join: tuple[Join, ...] = ()
    views: Mapping[str, View] = field(default_factory=dict)
    assign: tuple[Assign, ...] = ()
    models: Mapping[str, Model] = field(default_factory=lambda: {"policy": Model("smollm2-135m")})
    learners: Mapping[str, Learner] = field(default_factory=dict)
    steps: int = setting(100, low=0, high=10**9, unit="steps")
    seed: int = setting(0, low=0, high=2**40)
    lag: int = setting(0, low=0, high=1000, unit="steps")
    enough: int = setting(0, low=0, high=10**6, unit="groups")
    max_rounds: int = setting(4, low=1, high=1000, unit="rounds")
    max_errors: float = setting(0.5, low=0.0, high=1.0, unit="of a step's rollouts")
    evaluate: Evaluate = Evaluate()
    slots: int = setting(64, low=1, high=10**5, unit="rollouts")
    token_budget: int = setting(4096, low=1, high=10**8, unit="tokens")
    save_share: float = setting(0.04, low=0.0, high=1.0, unit="of the time")
    __post_init__ = Mechanism.__post_init__

    def mechanisms(self) -> dict[str, Mechanism]:
        """Every mechanism by its name in the run's state, in the order of the loop."""
        out: dict[str, Any] = {"prompts": self.prompts, "rolling": self.rolling, "environment": self.environment}
        out |= {"reward": self.reward} | {f"join.{i}": m for i, m in enumerate(self.join)}
        out |= {f"view.{n}": m for n, m in self.views.items()} | {f"assign.{i}": m for i, m in enumerate(self.assign)}
        for name, learner in self.learners.items():
            out |= {f"{name}.{i}": t.loss for i, t in enumerate(learner.objective)}
            out |= {f"estimate.{name}": learner.estimate, f"optimiser.{name}": learner.optimiser}
        return out

    def check(self) -> None:
        """Raises RecipeError with every problem that can be seen before weights load."""
        problems = [*_unmet(self), *_models(self), *_sizes(self)]
        if problems:
            raise RecipeError("\n".join(f"recipe {self.name}: {p}" for p in problems))


def learner(*terms: Term, lr: float = 1e-6, decay: int = 0, model: str = "policy", **more: Any) -> Learner:
    """A learner by backprop and AdamW."""
    return Learner(model, terms or (Term(Policy()),), Backprop(), AdamW(lr=lr, decay=decay), **more)


def _unmet(r: Recipe) -> list[str]:
    """Columns and views that somebody reads and nobody writes."""
    out, written = [], set(SAMPLED) | {f"kept.{k}" for k in ("credit",) if r.join}
    readers: list[tuple[str, Mechanism]] = [(f"assign.{i}", m) for i, m in enumerate(r.assign)]
    for name, lrn in r.learners.items():
        readers += [(f"learners.{name}.objective.{i}", t.loss) for i, t in enumerate(lrn.objective)]
    for where, m in readers:
        who = f"{type(m).__name__} ({where})"
        for need in sorted(m.needs, key=str):
            if isinstance(need, str) and need not in written:
                out.append(
                    f"{who} reads column {need!r}, which nothing before it writes: there are {', '.join(sorted(written))}"
                )
            elif isinstance(need, Need):
                out += _sources(r, who, need, written)
        written |= set(m.writes)
    return out


def _sources(r: Recipe, who: str, need: Need, written: set[str]) -> list[str]:
    out = []
    for source in need.of:
        if "{task}" not in source.model and source.model not in r.models:
            out.append(f"{who}: {nearest(source.model, r.models, 'model')}")
        if source.view != "own" and source.view not in r.views:
            out.append(f"{who}: {nearest(source.view, {'own', *r.views}, 'view')}")
    if isinstance(need.what, str):
        head = need.what.removeprefix("value.")
        model = r.models.get(need.of[0].model)
        if head != need.what and model and head not in model.heads:
            out.append(f"{who} reads head {head!r} of {need.of[0].model}: give the model heads=({head!r},)")
        elif head == need.what and need.what not in ("logp", "entropy"):
            out.append(f"{who} asks for {need.what!r}: the engine reads logp, entropy, value.<head> and functions of logits")
    out += [f"{who} hands column {c!r} into the chunk, which nothing writes" for c in need.also if c not in written]
    return out


def _models(r: Recipe) -> list[str]:
    """Learners and followers of models that are not there; live needs that read another learner's model."""
    out = []
    for name, lrn in r.learners.items():
        if lrn.model not in r.models:
            out.append(f"learner {name}: {nearest(lrn.model, r.models, 'model')}")
        for i, term in enumerate(lrn.objective):
            live = [n for n in term.loss.needs if isinstance(n, Need) and n.is_live]
            wrong = [n for n in live if any(s.at == "live" and s.model != lrn.model for s in n.of)]
            out += [f"term {i} of learner {name} reads {n.of[0].model} live but trains {lrn.model}" for n in wrong]
    for name, model in r.models.items():
        if model.follow and model.follow[0] not in r.models:
            out.append(f"model {name} follows: {nearest(model.follow[0], r.models, 'model')}")
    return out


def _sizes(r: Recipe) -> list[str]:
    """Numbers that cannot work together."""
    out, groups = [], getattr(r.prompts, "prompts", None)
    for name, lrn in r.learners.items():
        for what in ("every", "epochs", "minibatches"):
            if getattr(lrn, what) < 1:
                out.append(f"learner {name}: {what} = {getattr(lrn, what)}: at least 1")
        if groups and lrn.minibatches > groups:
            out.append(f"learner {name}: {lrn.minibatches} minibatches of {groups} groups a step: at most {groups}")
    most = groups * r.max_rounds if groups else None
    if most is not None and r.enough > most:
        out.append(f"enough = {r.enough} groups, but {r.max_rounds} rounds of {groups} prompts give at most {most}")
    return out


def override(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe after changes like "learners.policy.optimiser.lr=2e-5". Raises RecipeError with the nearest valid name."""
    for change in changes:
        path, sign, text = change.partition("=")
        if not sign:
            raise RecipeError(f"{change!r} is no change: write a dotted path, =, and a value, such as steps=50")
        try:
            recipe = _set(recipe, path.strip().split("."), _value(text.strip()), path)
        except (ValueError, TypeError) as error:
            raise RecipeError(str(error)) from None
    return recipe


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "inf": float("inf")}.get(text.lower(), text)


def _set(node: Any, path: Sequence[str], value: Any, whole: str) -> Any:
    """A copy of a nest of dataclasses, mappings and tuples with one place changed."""
    head, rest = path[0], path[1:]
    if is_dataclass(node) and not isinstance(node, type):
        known = [f.name for f in fields(node) if f.repr]
        if head not in known:
            raise nearest(head, known, f"field of {type(node).__name__}")
        old = getattr(node, head)
        return replace(node, **{head: _set(old, rest, value, whole) if rest else _cast(value, old, whole)})
    if isinstance(node, Mapping):
        if head not in node:
            raise nearest(head, node, f"entry of {whole.rsplit('.', len(rest) + 1)[0]}")
        return {**node, head: _set(node[head], rest, value, whole) if rest else _cast(value, node[head], whole)}
    if isinstance(node, tuple):
        if not head.isdigit() or int(head) >= len(node):
            raise ValueError(f"{whole}: {head!r} is no place in a tuple of {len(node)}: 0 to {len(node) - 1}")
        new = _set(node[int(head)], rest, value, whole) if rest else _cast(value, node[int(head)], whole)
        return (*node[: int(head)], new, *node[int(head) + 1 :])
    raise ValueError(f"{whole}: {type(node).__name__} has no field {head!r}")


def _cast(value: Any, old: Any, whole: str) -> Any:
    """The value in the old one's type; an int may stand for a float. Raises ValueError otherwise."""
    if isinstance(old, bool) != isinstance(value, bool) and isinstance(old, bool | int | float):
        raise ValueError(f"{whole} = {value!r}: {type(old).__name__} is wanted, such as {old!r}")
    if isinstance(old, float) and isinstance(value, int):
        return float(value)
    if isinstance(old, str | int | float | tuple) and not isinstance(value, type(old)):
        raise ValueError(f"{whole} = {value!r}: {type(old).__name__} is wanted, such as {old!r}")
    if is_dataclass(old):
        raise ValueError(f"{whole} is a {type(old).__name__}: change one of its fields, {whole}.<field>=value")
    return value


def plain(node: Any) -> Any:
    """A recipe as JSON values, for run.json and for diffs; a mechanism's class stands under "is"."""
    if is_dataclass(node) and not isinstance(node, type):
        body = {f.name: plain(getattr(node, f.name)) for f in fields(node) if f.repr}
        return {"is": f"{type(node).__module__}:{type(node).__qualname__}", **body}
    if isinstance(node, Mapping):
        return {str(k): plain(v) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [plain(v) for v in node]
    if callable(node):
        return f"{getattr(node, '__module__', '')}:{getattr(node, '__qualname__', repr(node))}"
    return node if node is None or isinstance(node, bool | int | float | str) else repr(node)


def diff(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted path, old, new) of every difference between two recipes or their plain forms."""
    old, new = (plain(x) if is_dataclass(x) else x for x in (old, new))
    if isinstance(old, dict) and isinstance(new, dict) and old.get("is") == new.get("is"):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in diff(old.get(k), new.get(k), f"{path}.{k}".lstrip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in diff(a, b, f"{path}.{i}")]
    return [] if old == new else [(path, old, new)]
