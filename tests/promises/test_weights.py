"""Every rollout names the weights that made it, and no cache outlives a weight change."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import xxhash

from oneloop.data import Need, Noise, Request
from oneloop.engine import decode, decode_models, service
from oneloop.engine.packed_linear import is_useful
from oneloop.loop import attach
from oneloop.objective.policy import Policy
from oneloop.prompts.epochs import Epochs
from oneloop.recipe import learner
from oneloop.stages import By, Model, Term
from tests.promises.runs import Parity, batch_of, family, steps


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return family(tmp_path_factory.mktemp("family") / "llama")


@pytest.fixture
def start(toy, opened, model):
    def make(dtype="float32", heads=(), **more):
        fields = {
            "models": {"policy": Model(model, dtype=dtype, heads=heads)},
            "prompts": Epochs(prompts=4, rollouts=4, max_tokens=5),
            "reward": Parity(),
            "learners": {"policy": learner(Term(Policy(), by=By("rollout")), lr=3e-2)},
        }
        return opened(toy(**{**fields, **more}))

    return make


def spans(batch):
    return [s for r in batch.rows for t in r.turns for s in t.spans]


def hash_by_hand(network) -> str:
    """Names, dtypes, shapes and bytes of all weights, by numpy and xxhash alone."""
    h = xxhash.xxh3_128()
    own = dict(network.module.named_parameters()) | {f"heads.{n}": p for n, p in network.heads.named_parameters()}
    for name in sorted(own):
        x = own[name].detach()
        h.update(f"{name}{x.dtype}{tuple(x.shape)}".encode())
        h.update(x.numpy().tobytes())
    return h.hexdigest()


def test_every_token_names_version_and_digest_and_they_change_with_every_update(start):
    session, digests = start(), []
    for step in range(3):
        batch = batch_of(session)
        assert all(s.start == 0 and s.stop == len(t.response) for r in batch.rows for t in r.turns for s in t.spans)
        assert {s.version for s in spans(batch)} == {step}
        (digest,) = {s.digest for s in spans(batch)}
        assert digest == hash_by_hand(session.run.engine.networks["policy"]) == session.run.state.digests["policy"]
        digests.append(digest)
        steps(session)
    assert len(set(digests)) == 3


def test_one_bit_of_one_weight_is_another_digest(start):
    network = start(heads=("value",)).run.engine.networks["policy"]
    seen = {network.digest()}
    for weight in (network.parameters["model.norm.weight"], network.heads["value"].bias):
        flat = weight.detach().reshape(-1)
        flat[0] = np.nextafter(np.float32(flat[0].item()), np.float32(9)).item()
        seen.add(network.digest())
        assert hash_by_hand(network) in seen
    assert len(seen) == 3


@pytest.mark.parametrize("heads", [(), ("value",)], ids=["plain", "with a head"])
def test_a_lagging_sampler_names_the_version_it_serves(start, heads):
    session, published = start(lag=2, heads=heads), {}
    for step in range(4):
        published[step] = session.run.state.digests["policy"]
        batch = batch_of(session)
        assert {(s.version, s.digest) for s in spans(batch)} == {(max(0, step - 2), published[max(0, step - 2)])}
        steps(session)
    with pytest.raises(ValueError, match="version 0 of policy is no longer kept"):
        session.run.engine.shadow_of(service.Weights("policy", 0))


def test_perturbed_weights_have_a_digest_of_their_own(start):
    engine = start().run.engine
    plain = engine.digests["policy"]
    module, digest = engine.shadow_of(service.Weights("policy", 0, Noise(3, 0.1)))
    again = engine.shadow_of(service.Weights("policy", 0, Noise(3, 0.1)))[1]
    other = engine.shadow_of(service.Weights("policy", 0, Noise(4, 0.1)))[1]
    assert digest == again
    assert len({plain, digest, other}) == 3
    assert module is not engine.networks["policy"].module


# ---------------------------------------------------------------------------- caches


def worst(session, n=2) -> float:
    """The largest difference of sampler and trainer after n updates (nats)."""
    for _ in range(n):
        batch_of(session)  # fills whatever is kept
        steps(session)
    batch = batch_of(session)
    now = attach(session.run, batch, [Need("logp")]).columns[Need("logp")]
    return float(np.abs(now - batch.columns["sampled.logp"])[batch.masks["sampled"]].max())


def keep_everything(monkeypatch) -> None:
    """Prompts' keys stay when nobody waits for them: the most that could outlive an update."""
    real = decode_models.SharedRows.vacate
    monkeypatch.setattr(decode_models.SharedRows, "vacate", lambda rows, row, *, is_wanted: real(rows, row, is_wanted=True))


def never_forget(monkeypatch) -> None:
    """The planted fault: the decoder takes note of the new weights and keeps what it computed from the old ones."""
    monkeypatch.setattr(decode.Decoder, "forget", lambda d: setattr(d, "_token", decode_models.weights_token(d._model)))


SAME_PROMPTS = {"prompts": Epochs(prompts=8, rollouts=2, max_tokens=5)}  # the echo task has eight: all come every step


def test_no_keys_outlive_an_update(start, monkeypatch):
    keep_everything(monkeypatch)
    assert worst(start(**SAME_PROMPTS)) < 1e-4


def test_control_keys_that_outlive_an_update_are_found_out(start, monkeypatch):
    keep_everything(monkeypatch)
    never_forget(monkeypatch)
    assert worst(start(**SAME_PROMPTS)) > 1e-2


def test_the_decoder_notices_by_itself_too(start, monkeypatch):
    """Two locks: the pool's digest and the decoder's own look at the weights. Either alone is enough."""
    keep_everything(monkeypatch)
    session = start(**SAME_PROMPTS)
    monkeypatch.setattr(service.DecoderPool, "__call__", blind(service.DecoderPool.__call__))
    assert worst(session) < 1e-4


def blind(real):
    """A pool that takes every weights for those it knows."""

    def call(pool, weights):
        decoder, _ = pool.live.get(weights.model, (None, ""))
        if decoder is not None:
            pool.live[weights.model] = (decoder, pool.engine.digests[weights.model])
        return real(pool, weights)

    return call


def test_packed_weights_do_not_outlive_an_update_in_bf16(start, monkeypatch):
    session = start("bfloat16")
    if not is_useful(session.run.engine.networks["policy"].module):
        pytest.skip("this machine packs no bf16 weights")
    assert worst(session) < 0.25
    never_forget(monkeypatch)
    assert worst(start("bfloat16")) > 0.5


def test_a_lagging_samplers_cache_is_its_own(start, monkeypatch):
    keep_everything(monkeypatch)
    session = start(lag=1, **SAME_PROMPTS)
    steps(session, 2)
    request = Request("q", session.run.mechanisms["prompts"].pool[0], temperature=1.0)
    uniforms = np.full(4, 0.5)

    async def ask(version):
        return await session.run.engine.sampler("policy", version)(request.prompt.ids, request, uniforms)

    async def both():
        return [await ask(v) for v in (1, 2, 1)]

    old, new, again = asyncio.run(both())
    assert old.response == again.response
    np.testing.assert_array_equal(old.recorded["logp"], again.recorded["logp"])
    assert old.recorded["logp"][0] != new.recorded["logp"][0]
