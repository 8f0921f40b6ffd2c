"""Supervised fine-tuning on the task's demonstrations: rows nobody sampled, one negative log-likelihood term."""

from dataclasses import replace

from oneloop.join.demonstrations import Demonstrations
from oneloop.objective.nll import Nll
from oneloop.prompts.nothing import Nothing
from oneloop.recipe import learner
from oneloop.recipes.reinforce import recipe as reinforce
from oneloop.stages import Term

recipe = replace(
    reinforce,
    name="sft",
    base="reinforce",
    about="Negative log-likelihood of demonstrations",
    prompts=Nothing(),
    join=(Demonstrations(),),
    assign=(),
    learners={"policy": learner(Term(Nll(), on="demonstration"), lr=1e-5)},
)
