"""A trivial environment is learnt by the first recipes; with the rewards dealt at random it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from oneloop.data import Rollout, Score
from oneloop.environments.echo import Echo, score
from oneloop.prompts.epochs import Epochs
from oneloop.stages import Reward
from oneloop.state import stream
from tests.promises.runs import steps

STEPS, ENOUGH = 60, 0.9


@dataclass(frozen=True)
class Said(Reward):
    """The echo task's own verdict without a sandbox; `is_shuffled` deals it out among all rollouts at random."""

    is_shuffled: bool = False

    async def __call__(self, group: Sequence[Rollout], state) -> list[Score]:
        (r,) = group
        text = r.turns[-1].info["text"]
        if self.is_shuffled:
            return [Score(float(stream(0, r.id).random() < 0.125))]
        return [Score(score(text, r.prompt.meta)["value"])]


def success(toy, opened, name, reward):
    """The mean success over the last five steps, whatever was rewarded."""
    recipe = toy(
        name,
        "learners.policy.optimiser.lr=1e-2",
        environment=Echo(4),
        prompts=Epochs(prompts=4, rollouts=16, max_tokens=2),
        reward=reward,
        steps=STEPS,
    )
    session = opened(replace(recipe))
    said, real = [], session.run.mechanisms["reward"]

    @dataclass(frozen=True)
    class Watched(Reward):
        async def __call__(self, group: Sequence[Rollout], state) -> list[Score]:
            said.extend(score(r.turns[-1].info["text"], r.prompt.meta)["value"] for r in group)
            return await real(group, state)

    session.run.mechanisms["reward"] = Watched()
    steps(session, STEPS)
    return sum(said[-5 * 64 :]) / (5 * 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce"])
def test_the_echo_task_is_learnt(toy, opened, name):
    assert success(toy, opened, name, Said()) > ENOUGH


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce"])
def test_control_with_shuffled_rewards_it_is_not(toy, opened, name):
    assert success(toy, opened, name, Said(is_shuffled=True)) < 0.5
