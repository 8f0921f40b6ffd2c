"""A divergence has a gradient, of the right sign: with no reward at all, one step brings the policy nearer its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from oneloop.data import Need, Rollout, Score, Source
from oneloop.loop import attach
from oneloop.objective.divergence import Divergence
from oneloop.objective.policy import Policy
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import learner
from oneloop.stages import By, Model, Reward, Term
from tests.promises.runs import batch_of, family, steps


@dataclass(frozen=True)
class Zero(Reward):
    async def __call__(self, group: Sequence[Rollout], state) -> list[Score]:
        return [Score(0.0)] * len(group)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return [family(root / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture
def change(toy, opened, models):
    """The KL to the reference on a fixed batch, before and after one step by these terms (nats a token)."""

    def make(*terms, way="reverse", learns="policy"):
        session = opened(
            toy(
                reward=Zero(),
                prompts=Epochs(prompts=8, rollouts=4, max_tokens=5),
                models={n: Model(m, dtype="float32") for n, m in zip(("policy", "reference"), models, strict=True)},
                learners={"policy": learner(*terms, lr=1e-3)},
            )
        )
        batch = batch_of(session)
        need = Need(Divergence(way=way).live.what, (Source(), Source("reference")), on="sampled")

        def kl():
            clean = {k: v for k, v in batch.columns.items() if not isinstance(k, Need)}
            return float(np.nanmean(attach(session.run, replace(batch, columns=clean), [need]).columns[need]))

        before = kl()
        digest = session.run.state.digests["policy"]
        steps(session)
        return before, kl(), digest != session.run.state.digests["policy"]

    return make


@pytest.mark.parametrize("way", ["reverse", "forward"])
def test_one_step_without_reward_lowers_the_kl(change, way):
    before, after, _ = change(Term(Policy()), Term(Divergence(way=way), weight=0.1, by=By("rollout")), way=way)
    assert before > 0.5
    assert after < before - 1e-3


@pytest.mark.parametrize("way", ["reverse", "forward"])
def test_control_the_wrong_sign_raises_it(change, way):
    before, after, _ = change(Term(Policy()), Term(Divergence(way=way), weight=-0.1, by=By("rollout")), way=way)
    assert after > before + 1e-3


def test_control_without_the_term_nothing_moves(change):
    before, after, has_moved = change(Term(Policy()))
    assert after == before
    assert not has_moved
