"""The quickstart: SmolLM2-135M-Instruct learns sums and differences of two numbers on a laptop's CPU."""

from dataclasses import replace

from oneloop.objective.policy import Policy
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import Evaluate, learner
from oneloop.recipes.dr_grpo import recipe as dr_grpo
from oneloop.stages import By, Term

recipe = replace(
    dr_grpo,
    name="quickstart",
    base="dr_grpo",
    about="SmolLM2-135M learns two-term sums in ten minutes",
    prompts=Epochs(max_tokens=24),
    learners={"policy": learner(Term(Policy(high=0.28), by=By("fixed", length=24)), lr=1e-5)},
    evaluate=Evaluate(max_tokens=32),
    steps=60,
)
