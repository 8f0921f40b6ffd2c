"""LoRA: the adapter alone trains, every update reaches the sampler, the base stays, a checkpoint brings it back."""

from __future__ import annotations

import asyncio
import copy
from itertools import pairwise

import numpy as np
import pytest
import torch

from oneloop import session as sessions
from oneloop.data import Need, Request
from oneloop.engine import service
from oneloop.engine.network import digest_of
from oneloop.loop import attach
from oneloop.objective.policy import Policy
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import learner
from oneloop.session import train
from oneloop.stages import By, Model, Term
from tests.promises.runs import Parity, batch_of, family, steps

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return family(tmp_path_factory.mktemp("family") / "llama")


@pytest.fixture
def start(toy, opened, model):
    def make(dtype="float32", **more):
        return opened(
            toy(
                models={"policy": Model(model, dtype=dtype, adapter={"r": 4})},
                prompts=Epochs(prompts=4, rollouts=4, max_tokens=5),
                reward=Parity(),
                learners={"policy": learner(Term(Policy(), by=By("rollout")), lr=3e-2)},
                **more,
            )
        )

    return make


def base(session):
    """The digest of everything that is not the adapter."""
    own = session.run.engine.networks["policy"].module.named_parameters()
    return digest_of({n: p.detach() for n, p in own if "lora_" not in n})


def said(session):
    """Log-probs that the sampler records for a fixed request and fixed draws."""
    prompt = session.run.mechanisms["prompts"].pool[0]
    run = session.run

    async def ask():
        return await run.engine.sampler("policy", run.state.step)(prompt.ids, Request("q", prompt), np.full(4, 0.3))

    return asyncio.run(ask()).recorded["logp"]


def test_only_the_adapter_trains_and_every_update_changes_the_sampler(start):
    session = start()
    network, before = session.run.engine.networks["policy"], base(session)
    assert network.parameters
    assert all("lora_" in n for n in network.parameters)
    assert all(w.dtype == torch.float32 for w in network.masters.values())
    heard, digests = [said(session)[0]], [session.run.state.digests["policy"]]
    for _ in range(3):  # consecutive updates
        steps(session)
        heard.append(said(session)[0])
        digests.append(session.run.state.digests["policy"])
    assert len(set(digests)) == 4
    assert min(abs(a - b) for a, b in pairwise(heard)) > 1e-5
    assert base(session) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sampler_has_the_adapter_that_the_trainer_has(start, dtype):
    session = start(dtype)
    steps(session, 2)
    assert gap(session) < {"float32": 1e-4, "bfloat16": 0.25}[dtype]


def gap(session):
    batch = batch_of(session)
    now = attach(session.run, batch, [Need("logp")]).columns[Need("logp")]
    return float(np.abs(now - batch.columns["sampled.logp"])[batch.masks["sampled"]].max())


def test_control_a_sampler_that_is_sent_the_base_only_is_found_out(start, monkeypatch):
    session, real = start(), service.DecoderPool.__call__
    module = copy.deepcopy(session.run.engine.networks["policy"].module)  # as it began: the adapter is 0

    def base_only(pool, weights):
        return service.Served(service.Decoder(module, slots=8), real(pool, weights).digest)

    monkeypatch.setattr(service.DecoderPool, "__call__", base_only)
    assert gap(session) < 1e-4
    first = said(session)[0]
    steps(session, 2)
    assert said(session)[0] == first  # it looks like staleness
    assert gap(session) > 0.05


def test_a_checkpoint_brings_the_adapter_back(start):
    session = start(steps=2)
    asyncio.run(train(session))
    heard, digest, out = said(session), session.run.state.digests["policy"], session.folder.folder
    assert (out / "checkpoints" / "000002" / "models" / "policy" / "adapter_model.safetensors").exists()
    session.close()
    again = sessions.resume(out)
    try:
        assert again.run.state.digests["policy"] == digest
        np.testing.assert_array_equal(said(again), heard)
    finally:
        again.close()


def test_an_adapter_begins_the_same_at_every_start(start):
    """Its first weights are drawn: two starts, or a resume without a checkpoint, must not differ."""
    digests = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        digests.add(start().run.state.digests["policy"])
    assert len(digests) == 1
