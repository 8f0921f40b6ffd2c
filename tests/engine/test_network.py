"""Networks: masters, names, heads, truncation."""

from __future__ import annotations

import pytest
import torch

from oneloop.engine.hub import ModelError
from oneloop.engine.network import Network, load_module, matches
from oneloop.stages import Model

CPU = torch.device("cpu")


def network(tiny, dtype=torch.float32, trains=("*",), **spec):
    model = Model(str(tiny), **spec)
    return Network("policy", model, load_module(model, dtype, CPU), trains=trains)


def test_an_unknown_name_is_refused(tiny):
    net = network(tiny)
    name = next(iter(net.masters))
    net.install({name: net.masters[name] + 1})
    with pytest.raises(ModelError, match=r"has no parameter model\.renamed"):
        net.install({"model.renamed": torch.zeros(1)})


def test_masters_and_module_move_together(tiny):
    net = network(tiny, torch.bfloat16)
    name, own = next(iter(net.parameters.items()))
    new = net.masters[name] + 2**-12
    net.install({name: new})
    assert torch.equal(net.masters[name], new)
    assert torch.equal(own.detach(), new.bfloat16())


def test_a_tied_head_is_one_master(tiny):
    names = set(network(tiny).masters)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_trains_is_a_pattern(tiny):
    assert set(network(tiny, trains=("*norm*",)).masters) == {n for n in network(tiny).masters if "norm" in n}
    assert "model.norm.weight" not in network(tiny, trains=("!*norm*",)).masters
    assert matches("a.router.b", "*router*")
    assert not matches("a.router.b", "!*router*")
    with pytest.raises(ModelError, match="no parameter matches nothing: it would train nothing"):
        network(tiny, trains=("nothing",))


def test_first_blocks_and_heads(tiny):
    net = network(tiny, blocks=1, heads=("value",))
    assert len(net.module.model.layers) == 1
    assert {"heads.value.weight", "heads.value.bias"} <= set(net.masters)
    with pytest.raises(ModelError, match="blocks = 9: the model has 2"):
        network(tiny, blocks=9)


def test_there_is_no_padding_id(tiny):
    assert network(tiny).module.get_input_embeddings().padding_idx is None


def test_a_head_that_does_more_is_refused(tiny):
    net = network(tiny)
    net.check_head()
    net.module.lm_head.register_forward_hook(lambda module, args, out: out + torch.arange(out.shape[-1]))
    with pytest.raises(ModelError, match="head does more than a linear map"):
        net.check_head()


@pytest.mark.parametrize("is_on", [False, True])
def test_checkpointing_recomputes_each_layer_and_changes_no_gradient(tiny, is_on):
    def gradients(net):
        calls = []
        net.module.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        hidden, _ = net.backbone([[1, 2, 3, 4], [1, 2, 5]])
        (hidden * torch.arange(hidden.numel()).reshape(hidden.shape)).sum().backward()
        return len(calls), {n: p.grad.clone() for n, p in net.parameters.items() if p.grad is not None}

    num_calls, found = gradients(network(tiny, checkpoint=is_on))
    _, plain = gradients(network(tiny))
    assert num_calls == 1 + is_on
    assert found.keys() == plain.keys()
    assert all(torch.allclose(found[n], plain[n], rtol=1e-5) for n in plain)
