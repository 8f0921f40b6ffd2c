"""GRPO (Shao et al., 2402.03300): group-normalised credit, clipped ratio, mean over tokens within a rollout, then over rollouts.

Differs from the paper in: no KL term by default (as in TRL 1.16, beta 0); add a Divergence term to a frozen reference for one.
"""

from dataclasses import replace

from oneloop.credit.group_normalised import GroupNormalised
from oneloop.objective.policy import Policy
from oneloop.recipe import learner
from oneloop.recipes.reinforce import recipe as reinforce
from oneloop.stages import By, Term

recipe = replace(
    reinforce,
    name="grpo",
    base="reinforce",
    about="Group-normalised credit and a clipped ratio",
    assign=(GroupNormalised(),),
    learners={"policy": learner(Term(Policy(), by=By("rollout")))},
)
