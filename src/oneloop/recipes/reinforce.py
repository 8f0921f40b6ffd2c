"""REINFORCE (Williams 1992): the score itself as credit, one update a step, no clipping."""

import math

from oneloop.credit.raw_score import RawScore
from oneloop.objective.policy import Policy
from oneloop.recipe import Recipe, learner
from oneloop.stages import By, Term

recipe = Recipe(
    name="reinforce",
    about="The score as credit; sum over tokens, mean over rollouts",
    assign=(RawScore(),),
    learners={"policy": learner(Term(Policy(low=1.0, high=math.inf), by=By("fixed")))},
)
