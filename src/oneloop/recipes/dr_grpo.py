"""Dr. GRPO (Liu et al., 2503.20783): GRPO without the division by std and without the division by a rollout's own length."""

from dataclasses import replace

from oneloop.credit.group_mean import GroupMean
from oneloop.objective.policy import Policy
from oneloop.recipe import learner
from oneloop.recipes.grpo import recipe as grpo
from oneloop.stages import By, Term

recipe = replace(
    grpo,
    name="dr_grpo",
    base="grpo",
    about="GRPO without std and without per-rollout length division",
    assign=(GroupMean(),),
    learners={"policy": learner(Term(Policy(), by=By("fixed", length=256)))},  # the prompts' max_tokens
)
