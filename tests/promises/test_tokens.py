"""Token ids are carried from the sampler to the loss: what was sampled is what is learnt, no more and no less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from oneloop.credit.group_mean import GroupMean
from oneloop.data import Ids, Need, Prompt, Request, Source, Turn
from oneloop.engine import service
from oneloop.engine.core import TorchEngine
from oneloop.environments.echo import Echo
from oneloop.lab.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from oneloop.loop import prepare
from oneloop.prompts.epochs import Epochs
from oneloop.rollout.plain import Plain
from oneloop.stages import Item, Model
from tests.promises.runs import Parity, batch_of, steps

END = 1


@pytest.fixture
def start(toy, opened):
    def make(tokens=6, heat=1.0, **more):
        fields = {"reward": Parity(), "prompts": Epochs(prompts=8, rollouts=4, max_tokens=tokens, temperature=heat)}
        return opened(toy(**{**fields, **more}))

    return make


# ---------------------------------------------------------------------------- ends


def counted(session) -> None:
    """Every sampled token is in the batch with weight 1, and nothing else is."""
    before = session.run.engine.service.sampled_tokens
    batch = batch_of(session)
    assert batch.streams["policy"].sum() == session.run.engine.service.sampled_tokens - before
    assert len(batch.ids_N) == batch.streams["policy"].sum()
    for r, row in enumerate(batch.rows):
        (turn,) = row.turns
        assert batch.ids_N[batch.row_N == r].tolist() == list(turn.response)
        assert (batch.streams["policy"][batch.row_N == r] == 1).all()
        assert np.isfinite(batch.columns["sampled.logp"][batch.row_N == r]).all()
        if turn.finish == "stop":
            assert turn.response[-1] == END
        else:
            assert END not in turn.response  # none is appended
            assert len(turn.response) == 6
    finishes = {r.turns[0].finish for r in batch.rows}
    assert finishes == {"stop", "length"}, "both kinds are there"


def test_a_sampled_end_token_is_learnt_and_none_is_appended(start):
    counted(start())


@pytest.mark.parametrize("fault", ["dropped", "appended"])
def test_control_an_end_token_dropped_or_appended_is_found_out(start, monkeypatch, fault):
    real = service.Service._turn

    def turn(self, job, answer, weights, digest):
        one = np.zeros(1)
        if fault == "dropped" and answer.finish == "stop" and len(answer.ids) > 1:
            answer = replace(
                answer, ids=answer.ids[:-1], **{n: getattr(answer, n)[:-1] for n in ("logp", "raw_logp", "entropy")}
            )
        if fault == "appended" and answer.finish == "length":
            more = {n: np.concatenate([getattr(answer, n), one]) for n in ("logp", "raw_logp", "entropy")}
            answer = replace(answer, ids=(*answer.ids, END), **more)
        return real(self, job, answer, weights, digest)

    monkeypatch.setattr(service.Service, "_turn", turn)
    with pytest.raises(AssertionError):
        counted(start())


@pytest.mark.parametrize("padded", [False, True])
def test_when_every_rollout_hits_the_limit_tokens_read_are_tokens_sampled(start, monkeypatch, padded):
    session = start(tokens=5, assign=(GroupMean(),))
    session.run.engine.service.stop = frozenset()
    monkeypatch.setattr(session.run.engine.networks["policy"].backbone, "packed", not padded)
    batch = batch_of(session)
    assert {r.turns[0].finish for r in batch.rows} == {"length"}
    assert batch.streams["policy"].sum() == 32 * 5 == len(batch.ids_N)
    batch = replace(batch, columns={**batch.columns, "credit": np.ones(len(batch.ids_N))})
    objective = prepare(session.run, batch)["policy"][0]
    _, metrics = session.run.engine.pull("policy", objective.batch, objective)
    assert metrics["read_tokens"] == (160.0, 1.0)
    assert metrics["policy.0/ratio"][1] == 160
    assert steps(session)[0]["collect/truncated"] == 1.0


# ---------------------------------------------------------------------------- temperature


def test_temperature_scales_log_probs_and_not_values(start, tiny):
    models = {"policy": Model(str(tiny), dtype="float32", heads=("value",))}
    session = start(heat=0.5, models=models)
    head = session.run.engine.networks["policy"].heads["value"]
    session.run.engine.install("policy", {"heads.value.weight": head.weight.detach() + 0.3})
    batch = batch_of(session)
    assert set(batch.columns["temperature"]) == {0.5}
    needs = [Need("value.value"), Need("logp"), Need("entropy")]
    cold = session.run.engine.columns(batch, needs)
    warm = replace(batch, columns={**batch.columns, "temperature": np.ones(len(batch.ids_N))})
    plain = session.run.engine.columns(warm, needs)
    assert np.abs(cold[needs[0]]).max() > 1e-2
    np.testing.assert_array_equal(cold[needs[0]], plain[needs[0]])
    assert np.abs(cold[needs[1]] - plain[needs[1]]).max() > 1e-2
    np.testing.assert_allclose(plain[needs[1]], sampled(batch, "raw_logp"), atol=1e-4)
    np.testing.assert_allclose(cold[needs[1]], sampled(batch, "logp"), atol=1e-4)
    np.testing.assert_allclose(plain[needs[2]], sampled(batch, "entropy"), atol=1e-4)


def sampled(batch, name):
    return batch.columns[f"sampled.{name}"]


def test_a_greedy_token_is_read_untempered_not_divided_by_zero(start):
    batch = batch_of(start(heat=0.0))
    assert set(batch.columns["temperature"]) == {0.0}
    session = start(heat=0.0)
    found = session.run.engine.columns(batch, [Need("logp")])[Need("logp")]
    np.testing.assert_allclose(found, sampled(batch, "raw_logp"), atol=1e-4)


# ---------------------------------------------------------------------------- BOS


@pytest.fixture
def opens_with_bos(tmp_path):
    """A model whose tokenizer puts <s> before every text, and whose template does so too, or which has no template."""

    def make(template):
        folder = tiny_model(tmp_path / str(len(list(tmp_path.iterdir()))), ["<s>", "w0"], width=16)
        tokenizer = tiny_tokenizer(["<s>", "w0"])
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        special = [("<s>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
        tokenizer.chat_template = template
        (folder / "chat_template.jinja").unlink()
        tokenizer.save_pretrained(folder)
        return TorchEngine({"policy": Model(str(folder), dtype="float32")}, {})

    return make


@pytest.mark.parametrize("template", ["{{ bos_token }}" + TEMPLATE, None], ids=["template", "none"])
def test_no_prompt_has_two_bos(opens_with_bos, template):
    engine = opens_with_bos(template)
    bos = engine.tokenizer.bos_token_id
    assert engine.tokenizer("w0")["input_ids"][0] == bos
    messages = ({"role": "user", "content": "w0"},)
    ids = engine.prompt(Item("i", messages), "echo").ids
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert bos not in engine.encode("w0")
    text = engine.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    assert engine.tokenizer(text)["input_ids"].count(bos) == 2  # the control: by way of text it would be there twice


# ---------------------------------------------------------------------------- ids, never text


def test_ids_that_do_not_survive_their_own_text_are_learnt_as_sampled(start):
    session = start(tokens=4)
    engine = session.run.engine
    batch = batch_of(session)
    lossy = [r for r in batch.rows if engine.encode(engine.text(r.turns[0].response)) != r.turns[0].response]
    assert lossy, "some responses hold tokens that their text loses"
    lost = 0
    for r, row in enumerate(batch.rows):
        mine = batch.ids_N[batch.row_N == r].tolist()
        assert mine == list(row.turns[0].response)
        lost += mine != list(engine.encode(engine.text(row.turns[0].response)))
    assert lost == len(lossy)  # the control: by way of text they would be others
    found = engine.columns(batch, [Need("logp")])[Need("logp")]
    np.testing.assert_allclose(found, sampled(batch, "logp"), atol=1e-4)


@dataclass(frozen=True)
class Asks(Echo):
    """Replies twice."""

    async def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Ids | None:
        return (5, 6, 2) if len(turns) < 3 else None


@dataclass(frozen=True)
class Rendered(Plain):
    """The planted fault: each turn's context is written anew from text, as chat templates do."""

    async def _play(self, turns, request: Request, sampler, environment, rng) -> None:
        await super()._play(turns, request, sampler, environment, rng)
        for k in range(1, len(turns)):
            said = tuple(t for t in turns[k - 1].response if t > 2)  # specials do not survive their text
            turns[k] = replace(turns[k], context=(*turns[k - 1].context, *said, 5, 6, 2))


def extends(batch) -> None:
    """Context of turn k + 1 = context + response + reply of turn k, and the batch holds each token once, in order."""
    for r, row in enumerate(batch.rows):
        assert len(row.turns) == 3
        for a, b in zip(row.turns, row.turns[1:], strict=False):
            assert b.context == a.context + a.response + (5, 6, 2)
            assert b.observed == 3
        whole = row.turns[-1].context + row.turns[-1].response
        assert tuple(batch.ids_N[batch.row_N == r]) == whole[len(row.prompt.ids) :]


def multi_turn(start, rolling):
    return start(tokens=3, environment=Asks(), rolling=rolling)


def test_every_turn_extends_the_one_before(start):
    session = multi_turn(start, Plain(max_turns=5))
    batch = batch_of(session)
    extends(batch)
    assert batch.masks["observation"].sum() == 32 * 6
    assert (batch.streams["policy"][batch.masks["observation"]] == 0).all()
    found = session.run.engine.columns(batch, [Need("logp", on="sampled")])[Need("logp")]
    np.testing.assert_allclose(found[batch.masks["sampled"]], sampled(batch, "logp")[batch.masks["sampled"]], atol=1e-4)


def test_control_contexts_made_from_text_are_found_out(start):
    batch = batch_of(multi_turn(start, Rendered(max_turns=5)))
    with pytest.raises(AssertionError):
        extends(batch)


def test_a_turn_costs_its_own_tokens_in_training_not_its_whole_past(start):
    """Retyping a long episode at every turn costs the square of its length; a tree holds each token once."""
    session = multi_turn(start, Plain(max_turns=5))
    batch = batch_of(session)
    row = replace(batch, rows=batch.rows)
    network, source = session.run.engine.networks["policy"], Source()
    from oneloop.engine.passes import sequences_of

    tokens = np.flatnonzero((row.row_N == 0) & row.masks["sampled"])
    sequences, *_ = sequences_of(row, source.view, tokens)
    _, tree = network.backbone(sequences)
    whole = row.rows[0].turns[-1].context + row.rows[0].turns[-1].response
    assert len(tree.ids_T) <= len(whole) < sum(map(len, sequences))
