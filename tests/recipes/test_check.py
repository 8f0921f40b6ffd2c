"""What a recipe is refused for before any weight is loaded: each with one line that names what would be right."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from oneloop.credit.group_mean import GroupMean
from oneloop.data import Need, Source
from oneloop.objective.divergence import Divergence
from oneloop.objective.nll import Nll
from oneloop.objective.policy import Policy
from oneloop.objective.regress import Regress
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import RecipeError, learner, override
from oneloop.recipes import load_recipe
from oneloop.stages import Assign, Model, Term
from oneloop.views.hint import Hint

GRPO = load_recipe("grpo")
TWO = {"policy": Model("smollm2-135m"), "critic": Model("policy", heads=("value",))}


def refused(recipe):
    with pytest.raises(RecipeError) as error:
        recipe.check()
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"recipe {recipe.name}: ") for line in lines)
    return lines


def with_terms(*terms, models=GRPO.models, **fields):
    return replace(GRPO, models=models, learners={"policy": learner(*terms)}, **fields)


@dataclass(frozen=True)
class Reads(Assign):
    """Reads what it is told to."""

    what: tuple = ()

    @property
    def needs(self):
        return frozenset(self.what)


def test_a_column_nobody_writes():
    (line,) = refused(replace(GRPO, assign=()))
    assert "Policy (learners.policy.objective.0) reads column 'credit', which nothing before it writes" in line
    assert "there are sampled.entropy, sampled.logp" in line
    (line,) = refused(replace(GRPO, assign=(Reads(("credit",)), GroupMean())))
    assert "Reads (assign.0) reads column 'credit'" in line, "the order of the chain counts"
    replace(GRPO, assign=(GroupMean(), Reads(("credit",)))).check()


def test_a_misspelt_credit_column():
    (line,) = refused(with_terms(Term(Policy(credit="credits"))))
    assert "'credits'" in line
    assert "credit," in line


@pytest.mark.parametrize("where", ["loss", "assign"])
def test_an_unknown_model(where):
    recipe = with_terms(Term(Policy()), Term(Divergence("polisy"), weight=0.1))
    if where == "assign":
        recipe = replace(GRPO, assign=(GroupMean(), Reads((Need("logp", (Source("polisy"),)),))))
    (line,) = refused(recipe)
    assert "no model is called 'polisy': did you mean 'policy'?" in line


def test_an_unknown_model_of_a_learner_and_of_a_follower():
    line = refused(replace(GRPO, learners={"policy": learner(Term(Nll()), model="policies")}))[0]
    assert "did you mean 'policy'?" in line
    models = {**GRPO.models, "average": Model("policy", follow=("polcy", None))}
    (line,) = refused(replace(GRPO, models=models))
    assert "model average follows: no model is called 'polcy': did you mean 'policy'?" in line


def test_an_unknown_view():
    recipe = with_terms(Term(Policy()), Term(Divergence("policy", view="hnt")))
    (line,) = refused(replace(recipe, views={"hint": Hint()}))
    assert "no view is called 'hnt': did you mean 'hint'?" in line
    replace(with_terms(Term(Policy()), Term(Divergence("policy", view="hint"))), views={"hint": Hint()}).check()


def test_a_missing_head():
    terms = {"policy": learner(), "critic": learner(Term(Regress(head="risk"), on="response"), model="critic")}
    (line,) = [n for n in refused(replace(GRPO, models=TWO, learners=terms)) if "head" in n]
    assert "Regress (learners.critic.objective.0) reads head 'risk' of critic: give the model heads=('risk',)" in line


def test_a_live_need_on_another_learners_model():
    lines = refused(with_terms(Term(Policy()), Term(Regress(target="credit")), models=TWO))
    assert lines == ["recipe grpo: term 1 of learner policy reads critic live but trains policy"]


def test_a_column_the_engine_does_not_have():
    (line,) = refused(replace(GRPO, assign=(GroupMean(), Reads((Need("logits"),)))))
    assert "asks for 'logits': the engine reads logp, entropy, value.<head> and functions of logits" in line


def test_a_chunk_column_nobody_writes():
    (line,) = refused(replace(GRPO, assign=(GroupMean(), Reads((Need("logp", also=("rank",)),)))))
    assert "hands column 'rank' into the chunk" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["learners.policy.minibatches=32"], "32 minibatches of 16 groups a step: at most 16"),
        (["learners.policy.minibatches=0"], "minibatches = 0: at least 1"),
        (["learners.policy.epochs=0"], "epochs = 0: at least 1"),
        (["learners.policy.every=0"], "every = 0: at least 1"),
        (["enough=65"], "enough = 65 groups, but 4 rounds of 16 prompts give at most 64"),
    ],
)
def test_sizes_that_cannot_work_together(changes, words):
    (line,) = refused(override(GRPO, changes))
    assert words in line


@pytest.mark.parametrize("change", ["learners.policy.minibatches=16", "enough=64", "learners.policy.epochs=3"])
def test_sizes_that_can(change):
    override(GRPO, [change]).check()


def test_every_problem_at_once():
    recipe = override(replace(GRPO, assign=()), ["learners.policy.minibatches=99", "enough=1000"])
    assert len(refused(recipe)) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("stepz=5", "no field of Recipe is called 'stepz': did you mean 'steps'?"),
        ("learners.polcy.optimiser.lr=1e-5", "did you mean 'policy'?"),
        ("learners.policy.optimizer.lr=1e-5", "no field of Learner is called 'optimizer': did you mean 'optimiser'?"),
        ("prompts.prompt=3", "no field of Epochs is called 'prompt': did you mean 'prompts'?"),
        ("assign.1.eps=1", "'1' is no place in a tuple of 1: 0 to 0"),
        ("assign.first.eps=1", "'first' is no place in a tuple of 1"),
        ("steps=ten", "steps = 'ten': int is wanted, such as 100"),
        ("steps=2.5", "steps = 2.5: int is wanted"),
        ("steps=True", "steps = True: int is wanted"),
        ("steps=-1", "Recipe.steps = -1: between 0 and 1e+09"),
        ("steps", "'steps' is no change: write a dotted path, =, and a value"),
        ("prompts=5", "change one of its fields, prompts.<field>=value"),
        ("assign.0.eps=5", "GroupNormalised.eps = 5.0: between 1e-08 and 1"),
        ("environment.extract=last", "one of 'verbatim', 'last_number', 'tag', 'boxed'"),
        ("learners.policy.objective.0.by.unit=tokens", "By.unit = 'tokens': one of 'token', 'rollout', 'group', 'fixed'"),
        ("evaluate.problems=0", "Evaluate.problems = 0: between 1 and 1e+07"),
        ("environment.min_terms=3", "Arithmetic.min_terms = 3: at most max_terms = 2"),
    ],
)
def test_overrides_are_refused_in_one_line(change, words):
    with pytest.raises(RecipeError) as error:
        override(GRPO, [change])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("learners.policy.optimiser.lr=2e-5", lambda r: r.learners["policy"].optimiser.lr == 2e-5),
        ("learners.policy.objective.0.loss.high=0.28", lambda r: r.learners["policy"].objective[0].loss.high == 0.28),
        ("models.policy.source=some/where", lambda r: r.models["policy"].source == "some/where"),
        ("assign.0.eps=1", lambda r: r.assign[0].eps == 1.0 and isinstance(r.assign[0].eps, float)),
        ("learners.policy.objective.0.loss.high=inf", lambda r: r.learners["policy"].objective[0].loss.high == float("inf")),
        ("environment.partial=true", lambda r: r.environment.partial is True),
    ],
)
def test_overrides_by_dotted_path(change, read):
    changed = override(GRPO, [change])
    assert read(changed)
    assert not read(GRPO), "the recipe itself stays"
    assert isinstance(changed.prompts, Epochs)
    changed.check()
