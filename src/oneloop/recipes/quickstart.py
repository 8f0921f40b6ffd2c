"""The quickstart: SmolLM2-135M-Instruct learns sums and differences of two numbers on a laptop's CPU. All numbers are ours."""

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
    prompts=Epochs(prompts=24, max_tokens=16),
    learners={"policy": learner(Term(Policy(high=0.28), by=By("fixed", length=16)), lr=1.5e-5, decay=250)},
    evaluate=Evaluate(max_tokens=32),
    steps=115,
    slots=192,
)
