"""fp32 master weights under bf16: small updates are learnt, where bf16 weights trained directly round them away."""

from __future__ import annotations

import pytest
import torch

from oneloop.loop import prepare
from oneloop.prompts.epochs import Epochs
from oneloop.stages import Model
from tests.promises.runs import Parity, batch_of, family, steps

LR = 2e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return family(tmp_path_factory.mktemp("family") / "llama")


@pytest.fixture
def start(toy, opened, model):
    def make(name="sft", dtype="bfloat16", **more):
        recipe = toy(name, f"learners.policy.optimiser.lr={LR}", models={"policy": Model(model, dtype=dtype)}, **more)
        return opened(recipe)

    return make


def in_bf16(session):
    """The planted fault: what the optimiser moves is the bf16 weights themselves."""
    network = session.run.engine.networks["policy"]
    network.masters = {n: p.detach() for n, p in network.parameters.items()}
    return session


def learnt(session, n):
    """How much the loss on the step's own rows fell, and the share of matrix entries that moved."""
    network = session.run.engine.networks["policy"]
    matrices = {k: p for k, p in network.parameters.items() if "layers" in k and p.ndim == 2}
    first = {k: p.detach().clone() for k, p in matrices.items()}
    objective = prepare(session.run, batch_of(session))["policy"][0]
    before = session.run.engine.pull("policy", objective.batch, objective)[1]["loss"][0]
    steps(session, n)
    after = session.run.engine.pull("policy", objective.batch, objective)[1]["loss"][0]
    moved = sum(int((matrices[k] != first[k]).sum()) for k in first) / sum(p.numel() for p in first.values())
    return before - after, moved


@pytest.mark.slow
def test_small_updates_are_learnt_and_the_control_in_bf16_hardly_moves(start):
    full = learnt(start(dtype="float32"), 60)
    kept = learnt(start(), 60)
    lost = learnt(in_bf16(start()), 60)
    assert kept[0] > 0.7 * full[0] > 0
    assert lost[0] < 0.3 * kept[0]
    assert lost[1] < 0.2 * kept[1]


def test_masters_are_fp32_and_the_module_is_their_rounding(start):
    session = start("grpo", reward=Parity(), prompts=Epochs(prompts=4, rollouts=4, max_tokens=4))
    steps(session, 2)
    network = session.run.engine.networks["policy"]
    assert network.dtype == torch.bfloat16
    assert all(w.dtype == torch.float32 for w in network.masters.values())
    assert all(torch.equal(network.parameters[n], w.bfloat16()) for n, w in network.masters.items())
    assert any(not torch.equal(w, w.bfloat16().float()) for w in network.masters.values())
    moments = session.run.state.mechanisms["optimiser.policy"]
    assert all(m.dtype == torch.float32 for m in [*moments["m"].values(), *moments["v"].values()])


def test_the_default_keeps_masters(start):
    """A model whose dtype is not said computes in what the machine multiplies, and still moves in fp32."""
    network = start(dtype="auto").run.engine.networks["policy"]
    assert all(w.dtype == torch.float32 for w in network.masters.values())
