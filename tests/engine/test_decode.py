"""The sampling engine: exact log-probs, independence of slots, occupancy, shared prompts, weight changes."""

import copy
import math

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from oneloop.engine import decode_models, kv
from oneloop.engine.decode import Answer, Decoder, Job

V = 97
SMALL = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen3": lambda: Qwen3Config(**GROUPED),
    "gemma2": lambda: Gemma2Config(
        **GROUPED, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **GROUPED,
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**SMALL),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=5),
}


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny work: threads that wait for each other cost more than they give
    yield
    torch.set_num_threads(num_threads)


def tiny(family="llama", dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:  # the default initialisation answers almost uniformly, which would hide any mistake
                p.mul_(8)
    return model


def job(context, n=8, temperature=1.0, seed=0, stop=()):
    return Job(tuple(context), n, temperature, np.random.default_rng(seed).random(n), frozenset(stop))


def mixed_jobs(count, temperature=1.0, longest=10):
    """Jobs over shared and single contexts, from 1 token to longer than every window here."""
    rng = np.random.default_rng(5)
    contexts = [tuple(rng.integers(3, V, n).tolist()) for n in (1, 4, 7, 19, 40)]
    return [job(contexts[i * i % 5], 1 + i % longest, temperature, seed=i) for i in range(count)]


def reference(model, context, ids, temperature):
    """logp, raw_logp, entropy of a plain forward over the whole sequence, in float64."""
    tokens = torch.tensor([[*context, *ids]])
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(context) - 1 : -1].double()
    raw = torch.log_softmax(logits, -1)
    chosen = torch.tensor(ids)[:, None]
    logp = torch.log_softmax(logits / temperature, -1).gather(1, chosen)[:, 0]
    return logp.numpy(), raw.gather(1, chosen)[:, 0].numpy(), -(raw.exp() * raw).sum(-1).numpy()


def worst(model, jobs, answers):
    gap = 0.0
    for asked, answer in zip(jobs, answers, strict=True):
        expected = reference(model, asked.context, answer.ids, asked.temperature)
        for got, right in zip((answer.logp, answer.raw_logp, answer.entropy), expected, strict=True):
            gap = max(gap, float(np.abs(got - right).max()))
    return gap


def plain_softmax(monkeypatch):
    """Let the reference's eager softmax keep float64 (transformers computes it in float32)."""
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_numbers_equal_a_full_forward(family, temperature, monkeypatch):
    plain_softmax(monkeypatch)
    for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        model = tiny(family, dtype)
        decoder = Decoder(model, slots=7)
        assert decoder.reason == ""
        jobs = mixed_jobs(20, temperature)
        assert worst(model, jobs, decoder.run(jobs)) < bound


def test_float32_of_an_ordinary_size_is_within_1e_5():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(LlamaConfig(**GROUPED))  # default initialisation
    jobs = mixed_jobs(20, 0.7)
    assert worst(model, jobs, Decoder(model, slots=7).run(jobs)) < 1e-5


@pytest.mark.parametrize("fault", ["position", "own mask", "prefix mask", "leak"])
def test_planted_faults_are_seen_by_the_probe_and_by_the_reference(fault, monkeypatch):
    model = tiny("llama", torch.float64)
    jobs = mixed_jobs(20)
    decoder = Decoder(model, slots=7)
    biases, plan = kv.Decode.biases, kv._plan_calls
    if fault == "position":
        monkeypatch.setattr(kv.Decode, "positions", property(lambda self: (self.prefix + self.own)[:, None] + 1))
        monkeypatch.setattr(kv.Decode, "biases", lambda self, window, dtype: biases(self, None, dtype))
    elif fault == "own mask":  # a row reads one position too many

        def open_all(self, window, dtype):
            prefix, own, gone = biases(self, window, dtype)
            return prefix, torch.zeros_like(own), gone

        monkeypatch.setattr(kv.Decode, "biases", open_all)
    elif fault == "prefix mask":

        def open_all(self, window, dtype):
            prefix, own, gone = biases(self, window, dtype)
            return [torch.zeros_like(p) for p in prefix], own, gone

        monkeypatch.setattr(kv.Decode, "biases", open_all)
    else:  # two rows swap their prompts

        def swapped(contexts, device):
            calls, order = plan(contexts, device)
            return calls, [*order[1:], order[0]]

        monkeypatch.setattr(kv, "_plan_calls", swapped)
    assert worst(model, jobs, decoder.run(jobs)) > 1e-3
    assert "differ" in Decoder(model).reason


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family):
    model = tiny(family)
    jobs = [job(j.context, 12, 0.0) for j in mixed_jobs(5)]
    for asked, answer in zip(jobs, Decoder(model, slots=3).run(jobs), strict=True):
        expected = model.generate(
            torch.tensor([asked.context]), attention_mask=torch.ones(1, len(asked.context)), max_new_tokens=12,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert answer.ids == tuple(expected[0, len(asked.context) :].tolist())
        assert answer.logp.tolist() == [0.0] * 12  # a point mass
        assert (answer.raw_logp < 0).all()


def test_a_job_does_not_depend_on_its_slot_or_its_batch():
    model = tiny()
    alone = job([5, 6, 7], 20, seed=9)
    crowd = mixed_jobs(30)
    (by_itself,) = Decoder(model, slots=4).run([alone])
    for slots, place in ((4, 0), (4, 30), (31, 17)):
        among = Decoder(model, slots=slots).run([*crowd[:place], alone, *crowd[place:]])[place]
        assert among.ids == by_itself.ids
        np.testing.assert_allclose(among.logp, by_itself.logp, atol=1e-4)


def test_the_same_submissions_give_the_same_bits():
    model, jobs = tiny(), mixed_jobs(30)
    first, second = (Decoder(model, slots=6).run(jobs) for _ in range(2))
    decoder = Decoder(model, slots=6)
    decoder.run(mixed_jobs(11, 0.5))  # buffers grown by other work
    for third in (second, decoder.run(jobs)):
        for a, b in zip(first, third, strict=True):
            assert (a.ids, a.logp.tolist(), a.entropy.tolist()) == (b.ids, b.logp.tolist(), b.entropy.tolist())


def test_slots_are_full_while_jobs_wait():
    model, rng = tiny(), np.random.default_rng(0)
    lengths = rng.integers(1, 41, 80)
    jobs = [job([3, 4 + i // 8], int(n), seed=i) for i, n in enumerate(lengths)]
    decoder = Decoder(model, slots=8)
    for asked in jobs:
        decoder.submit(asked)
    while decoder.num_waiting:
        decoder.step()
    assert decoder.counters.least_busy_while_waiting >= 0.9 * 8
    assert decoder.counters.busy_slot_steps >= 0.9 * decoder.counters.offered_slot_steps
    while decoder.num_busy:
        decoder.step()
    counters = decoder.counters
    assert counters.decoded_tokens == counters.busy_slot_steps == lengths.sum()
    assert counters.offered_slot_steps == 8 * counters.steps
    assert counters.steps < lengths.sum() / 8 + 40  # a batch that waits for its longest would take about 400


def test_finished_slots_cost_nothing(monkeypatch):
    model, widths = tiny(), []
    decoder = Decoder(model, slots=8)
    hook = model.get_input_embeddings().register_forward_hook(lambda m, i, o: widths.append(i[0].numel()))
    decoder.run([job([3], n, seed=n) for n in (1, 2, 3, 6)])
    hook.remove()
    assert widths == [1, 3, 2, 1, 1, 1]  # the prompt once for four jobs, then only who is still speaking


def test_a_context_is_prefilled_and_stored_once():
    model = tiny()
    context = tuple(range(3, 67))
    shared = Decoder(model)
    shared.run([job(context, 2, seed=i) for i in range(64)])
    apart = Decoder(model)
    apart.run([job((i, *context[1:]), 2, seed=i) for i in range(64)])
    assert shared.counters.prefilled_tokens == 64
    assert apart.counters.prefilled_tokens == 64 * 64
    prompt_bytes = 64 * 3 * 2 * 16 * 4  # tokens, layers, keys and values, K * D, float32
    own_bytes = 64 * decode_models.FIRST_OWN_LENGTH * 3 * 2 * 16 * 4
    assert shared.counters.peak_cache_bytes == prompt_bytes + own_bytes
    assert 64 * prompt_bytes + own_bytes <= apart.counters.peak_cache_bytes <= 1.5 * 64 * prompt_bytes + own_bytes


def test_contexts_are_freed_by_their_last_reader():
    decoder = Decoder(tiny(), slots=4)
    decoder.run(mixed_jobs(40))
    assert decoder._rows.prefixes.num_bytes == 0
    assert decoder._rows.prefixes.stores == {}
    before = decoder._rows.num_bytes
    for _ in range(5):
        decoder.run(mixed_jobs(40))
    assert decoder._rows.num_bytes == before


def test_prefill_in_small_packs_changes_nothing():
    model, jobs = tiny(dtype=torch.float64), mixed_jobs(20)
    for a, b in zip(Decoder(model).run(jobs), Decoder(model, prefill_tokens=5).run(jobs), strict=True):
        assert a.ids == b.ids
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-10)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.3).step(),
        lambda model: model.load_state_dict(tiny(seed=1).state_dict()),
        lambda model: setattr(model.model.norm, "weight", torch.nn.Parameter(model.model.norm.weight * -2)),
    ],
    ids=["optimiser", "load", "replaced"],
)
def test_no_cache_outlives_a_weight_change(change):
    model = tiny()
    asked = job(range(3, 20), 12, seed=4)
    decoder = Decoder(model)
    before = decoder.run([asked])[0]
    decoder.submit(job(range(3, 20), 12, seed=4))
    decoder.submit(job(range(3, 20), 40, seed=4))
    decoder.step()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    change(model)
    with pytest.raises(RuntimeError, match="weights changed while 2 jobs"):
        decoder.step()
    (_, cut), (_, _) = decoder.abort()
    assert cut.finish == "abort"
    assert cut.ids == before.ids[:1]
    after, fresh = decoder.run([asked])[0], Decoder(model).run([asked])[0]
    assert after.ids == fresh.ids
    assert after.logp.tolist() == fresh.logp.tolist()
    assert after.logp.tolist() != before.logp.tolist()


def test_without_the_weights_token_an_old_prefix_would_be_used(monkeypatch):
    model = tiny()
    decoder = Decoder(model)
    asked = job(range(3, 20), 12, seed=4)
    decoder._rows.prefixes.read(asked.context)  # a reader that never leaves keeps the context cached
    decoder.run([asked])
    with torch.no_grad():
        for p in model.parameters():
            p.data.mul_(1.5)  # leaves no trace: the documented exception
    right = Decoder(model).run([asked])[0]
    assert decoder.run([asked])[0].logp.tolist() != right.logp.tolist()
    decoder.forget()
    assert decoder.run([asked])[0].logp.tolist() == right.logp.tolist()


def test_end_tokens():
    model = tiny()
    free = Decoder(model).run([job([5, 6], 30, seed=3)])[0]
    assert free.finish == "length"
    assert len(free.ids) == 30
    second, fifth = free.ids[1], free.ids[4]
    first_place = min(free.ids.index(second), free.ids.index(fifth))
    stopped = Decoder(model).run([job([5, 6], 30, seed=3, stop=(second, fifth, 96 if 96 not in free.ids else second))])[0]
    assert stopped.finish == "stop"
    assert stopped.ids == free.ids[: first_place + 1]
    assert len(stopped.logp) == len(stopped.ids)
    np.testing.assert_allclose(stopped.logp, free.logp[: first_place + 1], atol=1e-5)
    last = Decoder(model).run([job([5, 6], 2, seed=3, stop=(second,))])[0]
    assert last.finish == "stop"  # a sampled end at the limit is an end, not a truncation


def test_one_token_and_nothing_at_all():
    decoder = Decoder(tiny())
    assert decoder.step() == []
    assert decoder.run([]) == []
    (answer,) = decoder.run([job([5], 1)])
    assert (len(answer.ids), answer.finish) == (1, "length")
    assert isinstance(answer, Answer)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: job(range(3, 90), 200), "need 286 positions, the model has 256: shorten the context or lower"),
        (lambda: job([], 3), "context is empty"),
        (lambda: job([V], 3), "outside"),
        (lambda: job([3], 0), "max_tokens = 0"),
        (lambda: job([3], 2, temperature=-1.0), "temperature"),
        (lambda: Job((3,), 2, 1.0, np.array([0.5]), frozenset()), "uniforms must be float64"),
        (lambda: Job((3,), 1, 1.0, np.array([1.0]), frozenset()), "uniforms must lie"),
    ],
)
def test_a_bad_job_is_refused_at_submit_and_costs_the_others_nothing(bad, message):
    decoder = Decoder(tiny())
    good = decoder.submit(job([5, 6], 2))
    with pytest.raises(ValueError, match=message):
        decoder.submit(bad())
    assert decoder.step() == []
    ((handle, answer),) = decoder.step()
    assert (handle, len(answer.ids)) == (good, 2)


def test_the_longest_possible_job_fits():
    (answer,) = Decoder(tiny()).run([job(range(3, 90), 256 - 87 + 1)])
    assert len(answer.ids) == 170


def test_the_model_is_left_as_it_was():
    model = tiny().train()
    model.model.layers[1].eval()
    flags = [module.training for module in model.modules()]
    name = model.config._attn_implementation
    state = copy.deepcopy(model.state_dict())
    decoder = Decoder(model)
    decoder.run(mixed_jobs(5))
    assert [module.training for module in model.modules()] == flags
    assert model.config._attn_implementation == name
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert all("forward" not in module.__dict__ for module in model.modules())
    model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()  # gradients still flow


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (transformers.BloomConfig(vocab_size=V, hidden_size=32, n_layer=2, n_head=4), "forward"),
        (
            transformers.Mamba2Config(
                vocab_size=V, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1
            ),
            "state of their own",
        ),
        (
            transformers.GptOssConfig(
                **GROUPED,
                num_local_experts=2,
                num_experts_per_tok=1,
                sliding_window=8,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            ),
            "s_aux",
        ),
        (LlamaConfig(**GROUPED, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "batch"),
    ],
    ids=["bloom", "mamba2", "attention sinks", "dynamic rope"],
)
def test_other_designs_take_the_plain_path_and_say_so(config, why):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    decoder = Decoder(model, slots=3)
    assert why in decoder.reason
    assert "\n" not in decoder.reason
    jobs = mixed_jobs(8)
    answers = decoder.run(jobs)
    assert worst(model, jobs, answers) < 1e-4
    assert decoder.counters.prefilled_tokens < sum(len(j.context) for j in jobs)  # contexts are still shared


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for a renamed flag
def test_an_adapter_is_sampled_with():
    peft = pytest.importorskip("peft")
    base = tiny()
    plain = Decoder(base).run(mixed_jobs(6))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    decoder = Decoder(model, slots=4)
    assert decoder.reason == ""
    answers = decoder.run(mixed_jobs(6))
    assert worst(model, mixed_jobs(6), answers) < 1e-4
    assert answers[5].logp.tolist() != plain[5].logp.tolist()


def test_a_window_told_by_masks_only_is_refused():
    config = MistralConfig(**GROUPED, sliding_window=5)
    assert "masks only" in decode_models._window_refusal(config, {None})
    assert decode_models._window_refusal(config, {5}) == ""
    assert decode_models._window_refusal(LlamaConfig(**GROUPED), {None}) == ""


def test_attention_refuses_what_it_does_not_implement():
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="s_aux"):
        kv.attention(torch.nn.Identity(), q, q, q, None, s_aux=torch.zeros(2))
    with pytest.raises(NotImplementedError, match="does not hand"):
        kv.attention(torch.nn.Identity(), q, q, q, None)


def test_broken_weights_are_an_error_not_an_answer():
    model = tiny()
    decoder = Decoder(model)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = math.nan
    decoder.submit(job([5], 3))
    with pytest.raises(FloatingPointError, match="NaN"):
        decoder.step()


def test_prefix_calls_cover_every_slot_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        prefixes = kv.Prefixes()
        readers = []
        for i in range(rng.integers(1, 12)):
            length, count = int(rng.integers(1, 200)), int(rng.choice([1, 1, 2, 8, 40]))
            readers += [prefixes.read((i, *([0] * (length - 1)))) for _ in range(count)]
        rng.shuffle(readers)
        calls, order = kv._plan_calls(readers, torch.device("cpu"))
        takes, owners = [], []
        for call in calls:
            size = len(call.take) // (call.end - call.start)
            takes += call.take.tolist()
            owners += [c for c in call.store.contexts[call.start : call.end] for _ in range(size)]
        assert all(takes[place] == slot for slot, place in enumerate(order))
        assert all(owners[place] is readers[slot] for slot, place in enumerate(order))
        assert len(calls) <= 24


def test_ladder_wastes_little():
    for length in range(1, 3000):
        assert length <= kv.ladder(length) <= max(16, 1.5 * length)
    assert len({kv.ladder(n) for n in range(1, 4097)}) < 20


def test_packed_bf16_weights_give_the_same_answers():
    config = LlamaConfig(**GROUPED | {"hidden_size": 64, "attention_bias": True})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    jobs = mixed_jobs(12)
    packed, plain = (Decoder(model, slots=5, pack_weights=on).run(jobs) for on in (True, False))
    for a, b in zip(packed, plain, strict=True):
        np.testing.assert_allclose(a.raw_logp[:1], b.raw_logp[:1], atol=0.05)
    decoder = Decoder(model, slots=5)
    decoder.run(jobs)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.2)
    for a, b in zip(decoder.run(jobs), Decoder(model, slots=5).run(jobs), strict=True):
        assert a.logp.tolist() == b.logp.tolist()  # packed copies are of the new weights
