"""What the nouns and verbs must be able to say: one small mechanism for each shape that published methods need.

These are written before the nouns are fixed. If a change of data.py or stages.py makes one of them longer, the change is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from oneloop.data import LIVE, Array, Batch, Ids, Map, Need, Noise, Prompt, Request, Rollout, Source, State, Turn
from oneloop.ops import log_softmax, peers, rows_sum
from oneloop.prompts.epochs import Epochs
from oneloop.stages import Assign, Join, Prompts, Resources, Rng, View

# 1 next-observation loss on observation tokens (TAPO): no mechanism at all, a term: Term(Nll(), on="observation")


@dataclass(frozen=True)
class Shown(View):
    """2 The same response under another context: the answer put before the prompt (a privileged teacher)."""

    answers: tuple[tuple[str, Ids], ...] = ()

    def __call__(self, rollout: Rollout, batch: Batch) -> tuple[Ids, ...]:
        return tuple(dict(self.answers)[rollout.prompt.id] + t.context for t in rollout.turns)


@dataclass(frozen=True)
class FromStored(Prompts):
    """3 Rollouts from stored prefixes: spans stripped, so the prefix is given and nobody learns from it (AC2)."""

    stored: tuple[tuple[Prompt, Turn], ...] = ()

    def __call__(self, step: int, state: State, rng: Rng) -> tuple[list[Request], State]:
        half = [(p, replace(t, spans=(), recorded={}, finish="open")) for p, t in self.stored]
        return [Request(f"{i}.{step}", p, 4, prefix=(t,), max_tokens=4) for i, (p, t) in enumerate(half)], state


@dataclass(frozen=True)
class Interrupted(FromStored):
    """4 An interrupted rollout resumed under newer weights: spans kept, learnt from at their own version (MiMo)."""

    def __call__(self, step: int, state: State, rng: Rng) -> tuple[list[Request], State]:
        half = [(p, replace(t, finish="open")) for p, t in self.stored]
        return [Request(f"{i}.{step}", p, 4, prefix=(t,), max_tokens=4) for i, (p, t) in enumerate(half)], state


@dataclass(frozen=True)
class Population(Epochs):
    """5 Weight noise: antithetic pairs of perturbed weights answer every prompt (evolution strategies)."""

    pairs: int = 2
    scale: float = 0.05

    def __call__(self, step: int, state: State, rng: Rng) -> tuple[list[Request], State]:
        asked, state = super().__call__(step, state, rng)
        noises = [Noise(1000 * step + n, s * self.scale) for n in range(self.pairs) for s in (1, -1)]
        return [replace(q, id=f"{q.id}.{i}", noise=n, count=2) for i, n in enumerate(noises) for q in asked], state


@dataclass(frozen=True)
class Gold(Join):
    """6 A gold answer scored after a trace: the response's own tokens become the context, the answer is given (RLCPR)."""

    answers: tuple[tuple[str, Ids], ...] = ()

    def __call__(self, fresh: Sequence[Rollout], state: State, rng: Rng) -> tuple[list[Rollout], State]:
        out = []
        for r in fresh:
            trace = r.turns[-1]
            turn = Turn(trace.context + trace.response, dict(self.answers)[r.prompt.id])
            out.append(Rollout(f"gold.{r.id}", r.prompt, (turn,), r.group, "gold", of=(r.id, 0)))
        return out, state


@dataclass(frozen=True)
class LikelyGold(Assign):
    """... and its likelihood as the score of the trace it follows."""

    gold = Need("logp", on="gold")
    needs = frozenset({gold})
    writes = frozenset({"score"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        after = {r.of[0]: i for i, r in enumerate(batch.rows) if r.of}
        p_R = np.exp(rows_sum(batch, batch.columns[self.gold] * batch.streams["gold"]))
        return {"score": np.array([p_R[after.get(r.id, i)] for i, r in enumerate(batch.rows)])}, state


@dataclass(frozen=True)
class Oracle(Join):
    """7 An oracle row without sampling log-probs, one a group (OraRL); the policy's term may learn from it too."""

    answers: tuple[tuple[str, Ids], ...] = ()

    def __call__(self, fresh: Sequence[Rollout], state: State, rng: Rng) -> tuple[list[Rollout], State]:
        groups = {r.group: r.prompt for r in fresh}
        turns = {g: Turn(p.ids, dict(self.answers)[p.id]) for g, p in groups.items()}
        return [Rollout(f"oracle.{g}", groups[g], (t,), g, "oracle") for g, t in turns.items()], state


@dataclass(frozen=True)
class OracleCredit(Assign):
    """... with a fixed credit, routed into the policy's stream: its tokens are ratioed to the start of the step."""

    writes = frozenset({"credit"})
    needs = frozenset({"credit"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        on_N = batch.streams["oracle"] > 0
        credit_N = np.where(on_N, 0.5, batch.columns["credit"])
        return {"credit": credit_N, "stream.policy": batch.streams["policy"] + batch.streams["oracle"]}, state


@dataclass(frozen=True)
class Returns(Assign):
    """8 A trainable head: what Regress("value", "return") learns to predict; the head's own value is read as a baseline."""

    value = Need("value.value", (Source("critic"),), on="response")
    needs = frozenset({value, "score"})
    writes = frozenset({"return", "credit"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        return_N = batch.columns["score"][batch.row_N]
        return {"return": return_N, "credit": np.nan_to_num(return_N - batch.columns[self.value])}, state


@dataclass(frozen=True)
class KlCredit(Assign):
    """9 KL as credit: minus beta times log pi(token) - log reference(token), k1, on every sampled token."""

    beta: float = 0.1
    reference = Need("logp", (Source("reference"),), on="sampled")
    needs = frozenset({reference, "sampled.logp", "credit"})
    writes = frozenset({"credit"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        k1_N = np.nan_to_num(batch.columns["sampled.logp"] - batch.columns[self.reference])
        return {"credit": batch.columns["credit"] - self.beta * k1_N}, state


@dataclass(frozen=True)
class Gap:
    """10 A vocabulary functional of two sources: sum over v of pi (log pi - log other), any pure function of logits."""

    def __call__(self, policy_CV: Array, other_CV: Array, ids_C: Array) -> Array:
        xp = array_namespace(policy_CV)
        p_CV, q_CV = log_softmax(policy_CV), log_softmax(other_CV)
        return xp.sum(xp.exp(p_CV) * (p_CV - q_CV), axis=-1)


LIVE_GAP = Need(Gap(), (LIVE, Source("reference")))
START_GAP = Need(Gap(), (Source(), Source("reference")), on="sampled")


@dataclass(frozen=True)
class GapCredit(Assign):
    """... read at the start as a column, here as credit by its group's mean."""

    needs = frozenset({START_GAP, "score"})
    writes = frozenset({"credit"})

    def __call__(self, batch: Batch, state: State, rng: Rng) -> tuple[Map, State]:
        gap_N, credit_N = np.nan_to_num(batch.columns[START_GAP]), np.zeros(len(batch.row_N))
        for g in peers(batch):
            mine = np.isin(batch.row_N, g)
            credit_N[mine] = gap_N[mine].mean() - gap_N[mine]
        return {"credit": credit_N}, state


def answers(resources: Resources) -> Any:
    """Every prompt's right answer as ids."""
    pairs = zip(resources.prompts, resources.items, strict=True)
    return tuple((p.id, (*resources.encode(i.demonstration), resources.end)) for p, i in pairs)
