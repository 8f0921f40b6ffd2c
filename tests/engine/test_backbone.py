"""The packed forward equals separate sequences: log-probs and the gradient of every parameter, to 1e-12 in fp64.

transformers computes some things in fp32 whatever the model's dtype: every norm, the softmax of eager attention, rotary
angles. `pure_fp64` turns each such upcast of an fp64 tensor off, on both sides of a comparison alike.
"""

import dataclasses
import functools
import random

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
import transformers as tf

from oneloop.engine import attention, padded
from oneloop.engine.attention import NAME, PLAN, Group, Plan, packing, tree_attention
from oneloop.engine.backbone import Backbone, decoder, hidden_states, probe
from oneloop.engine.tree import Tree

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SLIDING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 10000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT_NEOX = {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}

PACKED = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON)),
    "llama-tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON | {"tie_word_embeddings": True})),
    "llama3-rope": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON, rope_parameters=LLAMA3)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**COMMON)),
    "qwen2-yarn": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**COMMON, rope_parameters=YARN)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**COMMON, head_dim=16)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**COMMON, head_dim=8)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **COMMON,
            **SLIDING,
            head_dim=8,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            attn_implementation="eager",
        )
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**COMMON, **SLIDING, head_dim=8, query_pre_attn_scalar=8)),
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**GPT_NEOX)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**COMMON, sliding_window=6)),
}


def draw(rng, n):
    return [rng.randrange(VOCAB) for _ in range(n)]


def chat():
    """Turn 2 extends turn 1; repeated, nested and lone sequences; a second prompt; a prompt without its own row."""
    rng = random.Random(0)
    prompt, other = draw(rng, 11), draw(rng, 5)
    answers = [draw(rng, n) for n in (9, 4, 1)]
    second = prompt + answers[0] + draw(rng, 6)
    sequences = [prompt + a for a in answers] + [second + draw(rng, n) for n in (3, 8)]
    return [*sequences, sequences[1], *(other + draw(rng, n) for n in (2, 12, 7)), draw(rng, 23), draw(rng, 1)]


def resummarised():
    """An agent's turns: each context is the system text and a new summary, so only the system text is shared."""
    rng = random.Random(1)
    system = draw(rng, 8)
    contexts = [system + draw(rng, n) for n in (3, 9, 6)]
    return [context + draw(rng, n) for context in contexts for n in (5, 11)]


LAYOUTS = {"chat": chat, "resummarised": resummarised}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch):
    """Constants under which a few dozen tokens make causal chains, several blocks a segment, and padded groups."""
    for name, value in {
        "CHAIN_TOKENS": 10,
        "MAX_QUERIES": 12,
        "CUT_EVERY": 5,
        "QUERY_OVERHEAD": 3,
        "MIN_ENTRIES": 60,
    }.items():
        monkeypatch.setattr(attention, name, value)


@pytest.fixture
def pure_fp64(monkeypatch):
    to, to_float, softmax = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax

    def is_upcast(x, args, kwargs):
        return x.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())

    monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: x if is_upcast(x, a, k) else to(x, *a, **k))
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))
    monkeypatch.setattr(
        torch.nn.functional,
        "softmax",
        lambda x, dim=None, dtype=None: softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype),
    )


def build(make, dtype=torch.float64):
    """A model whose attention is far from uniform and whose norms are far from one."""
    torch.manual_seed(0)
    model = make().double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 0.3)
            elif "A_log" not in name and "dt_bias" not in name:
                p.add_(0.2 * torch.randn_like(p))
    return model._apply(lambda x: x.type(dtype) if x.is_floating_point() else x)  # `to` may be patched


def checkpointing(model):
    """Every decoder layer recomputed in the backward pass, whatever transformers calls the switch in this version."""
    model.train()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    inner._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=func)


def log_probs(model, hidden, targets):
    logits = model.get_output_embeddings()(hidden)
    cap = getattr(model.config, "final_logit_softcapping", None)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def picks(sequences, count=40):
    """Random (sequence, position) pairs with a coefficient each; position 0 has no log-prob."""
    rng = random.Random(2)
    long = [s for s in range(len(sequences)) if len(sequences[s]) > 1]
    pairs = [(s, rng.randrange(1, len(sequences[s]))) for s in rng.choices(long, k=count)]
    return pairs, torch.tensor([rng.gauss(0, 1) for _ in pairs], dtype=torch.float64)


def gradients(model, logp, coefficients):
    model.zero_grad()
    (logp * coefficients.to(logp.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def naive(model, sequences, apart=False):
    """Every sequence in full, as other trainers do: one right-padded batch through the model, or one at a time."""
    pairs, coefficients = picks(sequences)
    length = max(map(len, sequences))
    ids = torch.tensor([[*s, *[0] * (length - len(s))] for s in sequences])
    real = torch.arange(length) < torch.tensor([[len(s)] for s in sequences])
    if apart:
        rows = [model(input_ids=torch.tensor([s]), use_cache=False).logits[0] for s in sequences]
        logits = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    else:
        position = torch.arange(length).expand(len(sequences), -1)
        logits = model(input_ids=ids, attention_mask=real.long(), position_ids=position, use_cache=False).logits
    logp = torch.stack([logits[s, p - 1].log_softmax(-1)[ids[s, p]] for s, p in pairs])
    return logp.detach(), gradients(model, logp, coefficients)


def ours(model, sequences, hidden, tree):
    pairs, coefficients = picks(sequences)
    rows = tree.node_of([s for s, _ in pairs], [p - 1 for _, p in pairs])
    logp = log_probs(model, hidden[rows], torch.tensor([sequences[s][p] for s, p in pairs]))
    return logp.detach(), gradients(model, logp, coefficients)


def packed(model, sequences, tree=None):
    model.set_attn_implementation(NAME)
    tree = tree or Tree.of(sequences)
    return ours(model, sequences, hidden_states(model, tree), tree)


def difference(a, b):
    """Largest difference of log-probs, and of any parameter's gradient, each relative to its largest value.

    A gradient below a thousandth of the largest counts as that: some are zero in exact arithmetic (a router that picks
    one expert).
    """
    assert a[1].keys() == b[1].keys()
    logp = float((a[0] - b[0]).abs().max() / b[0].abs().max())
    floor = 1e-3 * max(float(g.abs().max()) for g in b[1].values())
    grads = [float((a[1][n] - b[1][n]).abs().max()) / max(float(b[1][n].abs().max()), floor) for n in b[1]]
    return max(logp, *grads)


# ------------------------------------------------------------------ the proof


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", PACKED)
def test_packed_equals_padded_training(family, layout, small_blocks, pure_fp64):
    sequences, model = LAYOUTS[layout](), build(PACKED[family])
    assert Tree.of(sequences).num_tokens < 0.8 * sum(map(len, sequences))
    reference = naive(model, sequences)
    assert len(reference[1]) == sum(1 for _ in model.parameters())
    assert difference(packed(model, sequences), reference) < 1e-12


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_packed_equals_padded_training_with_default_blocks(family, pure_fp64):
    rng = random.Random(3)
    prompt = draw(rng, 140)
    sequences = [prompt + draw(rng, n) for n in (40, 90, 7)] + [draw(rng, 30)]
    model = build(PACKED[family])
    reference = naive(model, sequences)
    assert difference(packed(model, sequences), reference) < 1e-12


def test_a_response_that_sees_anothers_last_token_is_found(pure_fp64, monkeypatch):
    sequences, model = chat(), build(PACKED["llama"])
    tree = Tree.of(sequences)
    # the last token of sequence 1 is read by the last of sequence 0: both answer the same prompt
    key, query = sorted([int(tree.path(0)[19]), int(tree.path(1)[-1])])
    allowed, seen = Group.allowed, []

    def leaky(self, *args):
        mask = allowed(self, *args)
        hit = (self.query_BQ[:, :, None] == query) & (self.key_BK[:, None, :] == key)
        seen.append(int(hit.sum()))
        return mask | hit

    reference = naive(model, sequences)
    monkeypatch.setattr(Group, "allowed", leaky)
    assert difference(packed(model, sequences), reference) > 1e-6
    assert sum(seen) == 1


def test_one_position_shifted_is_found(pure_fp64):
    sequences, model = chat(), build(PACKED["llama"])
    tree = Tree.of(sequences)
    position = tree.position_T.clone()
    position[tree.path(0)[15:20]] += 1
    reference = naive(model, sequences)
    assert difference(packed(model, sequences, dataclasses.replace(tree, position_T=position)), reference) > 1e-6


def test_one_row_off_is_found(pure_fp64):
    sequences, model = chat(), build(PACKED["llama"])
    tree = Tree.of(sequences)
    reference = naive(model, sequences)
    off = dataclasses.replace(tree, node_flat=np.roll(tree.node_flat, 1))
    model.set_attn_implementation(NAME)
    assert difference(ours(model, sequences, hidden_states(model, tree), off), reference) > 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt-neox"])
def test_gradient_checkpointing_changes_nothing(family, small_blocks, pure_fp64):
    sequences, model = chat(), build(PACKED[family])
    plain = packed(model, sequences)
    checkpointing(model)
    assert difference(packed(model, sequences), plain) < 1e-13


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls names that transformers deprecates
def test_lora_adapters_with_checkpointing(small_blocks, pure_fp64):
    peft = pytest.importorskip("peft")
    sequences = chat()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build(PACKED["qwen3"]), config).double()
    reference = naive(model, sequences)
    assert reference[1]
    assert all("lora" in name for name in reference[1])
    assert difference(packed(model, sequences), reference) < 1e-12
    checkpointing(model)
    assert difference(packed(model, sequences), reference) < 1e-12


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_prompt_learning_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="use LoRA"):
        decoder(peft.get_peft_model(build(PACKED["llama"]), config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rounding_is_no_worse_than_that_of_padded_training(family, dtype, small_blocks, pure_fp64):
    sequences = chat()
    exact = naive(build(PACKED[family]), sequences)

    def error(result):
        pairs = [(result[0], exact[0]), *((result[1][n], exact[1][n]) for n in exact[1])]
        assert all(x.dtype == dtype for x, _ in pairs)
        return [float((x.double() - y).norm() / y.norm()) for x, y in pairs]

    usual, tree = (
        error(naive(build(PACKED[family], dtype), sequences)),
        error(packed(build(PACKED[family], dtype), sequences)),
    )
    assert all(0 < x <= 2 * y for x, y in zip(tree, usual, strict=True))


def test_padded_queries_make_no_nan(small_blocks):
    sequences = chat()
    tree = Tree.of(sequences)
    groups = Plan(tree, torch.device("cpu")).layout(None).groups
    assert any(bool((g.num_query_B < g.query_BQ.shape[1]).any()) and not g.causal for g in groups)
    model = build(PACKED["llama"], torch.float32)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        _, grads = packed(model, sequences)
    assert all(bool(g.isfinite().all()) for g in grads.values())


# ------------------------------------------------------------------ the attention interface


@pytest.mark.parametrize("family", PACKED)
def test_probe_passes_and_leaves_the_model_as_it_was(family):
    model = build(PACKED[family], torch.float32).train()
    before = model.config._attn_implementation
    assert probe(model, vocab=VOCAB, generator=torch.Generator().manual_seed(0)) is None
    assert model.config._attn_implementation == before
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_finds_a_leak_and_a_wrong_position(dtype, monkeypatch):
    model, allowed, of = build(PACKED["llama"], dtype), Group.allowed, Tree.of

    def outcome():
        return probe(model, vocab=VOCAB, generator=torch.Generator().manual_seed(0))

    assert outcome() is None
    with monkeypatch.context() as patch:
        patch.setattr(Group, "allowed", lambda self, *args: allowed(self, *args) | (self.key_BK == 25)[:, None, :])
        assert "reach other responses" in outcome()
    shifted = lambda sequences: dataclasses.replace(t := of(sequences), position_T=t.position_T * 2)  # noqa: E731
    monkeypatch.setattr(Tree, "of", staticmethod(shifted))
    assert "differ by" in outcome()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_a_switched_model_still_takes_ordinary_batches(family, pure_fp64):
    sequences, model = chat(), build(PACKED[family]).eval()
    prompt = torch.tensor([sequences[0]])
    reference, greedy = (
        naive(model, sequences),
        model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None),
    )
    assert Backbone(model).packed
    assert model.config._attn_implementation == NAME
    assert difference(naive(model, sequences), reference) < 1e-12
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None), greedy)


def call(plan, **options):
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    return tree_attention(torch.nn.Identity(), q, k, k, options.pop("attention_mask", None), **{PLAN: plan}, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s_aux": torch.zeros(4)}, "s_aux is not implemented"),
        ({"position_bias": torch.zeros(1)}, "position_bias is not implemented"),
        ({"surprise": 1}, "surprise is not implemented"),
        ({"is_causal": False}, "bidirectional"),
        ({"dropout": 0.1}, "set the model's attention_dropout to 0"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "a mask of its own"),
    ],
)
def test_options_it_does_not_implement_are_refused(options, message):
    plan = Plan(Tree.of([[1, 2, 3, 4, 5]]), torch.device("cpu"))
    assert call(plan, position_ids=torch.zeros(1), use_cache=False, surprise=None)[0].shape == (1, 5, 4, 8)
    with pytest.raises(ValueError, match=message):
        call(plan, **options)


def test_a_layer_that_drops_the_plan_is_an_error():
    with (
        packing(Plan(Tree.of([[1, 2, 3, 4, 5]]), torch.device("cpu"))),
        pytest.raises(ValueError, match="cannot run packed"),
    ):
        call(None)


def test_dropout_in_training_is_refused():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON, attention_dropout=0.1)).train()
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="attention dropout"):
        hidden_states(model, Tree.of(chat()))


# ------------------------------------------------------------------ models that take the padded path


HYBRID = {"layer_types": ["conv", "full_attention", "conv"]}
MAMBA = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2}
SMALL = {"vocab_size": VOCAB, "hidden_size": 32}
QWEN3_NEXT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
}
GPT_OSS = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "attn_implementation": "eager"}
LLAMA4 = {
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "head_dim": 8,
    "attention_chunk_size": 400,
    "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
}
PADDED = {
    "mamba2": lambda: tf.Mamba2ForCausalLM(tf.Mamba2Config(**SMALL, **MAMBA, num_hidden_layers=2)),
    "lfm2": lambda: tf.Lfm2ForCausalLM(tf.Lfm2Config(**COMMON, **HYBRID)),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(**SMALL, n_layer=2, n_head=4)),
    "falcon": lambda: tf.FalconForCausalLM(tf.FalconConfig(**SMALL, num_hidden_layers=2, num_attention_heads=4, alibi=False)),
    "gpt-oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**COMMON, **GPT_OSS, sliding_window=6)),
    "qwen3-next": lambda: tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**COMMON, **QWEN3_NEXT)),
    "llama4": lambda: tf.Llama4ForCausalLM(tf.Llama4TextConfig(**COMMON, **LLAMA4)),
}
REASONS = {
    "mamba2": "does not use the attention interface",
    "lfm2": "reach other responses",
    "bloom": "does not use transformers' attention interface",
    "falcon": "does not use transformers' attention interface",
    "gpt-oss": "s_aux",
    "qwen3-next": "reach other responses",
    "llama4": "local to",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", PADDED)
def test_models_that_cannot_run_packed_say_so_and_are_right_padded(family):
    sequences, model = chat(), build(PADDED[family], torch.float32)
    before = model.config._attn_implementation
    backbone = Backbone(model)
    assert not backbone.packed
    assert REASONS[family] in backbone.reason
    assert "\n" not in backbone.reason
    assert model.config._attn_implementation == before
    reference = naive(model, sequences, apart=True)
    hidden, tree = backbone(sequences)
    assert hidden.shape[0] == tree.num_tokens
    assert difference(ours(model, sequences, hidden, tree), reference) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_path_equals_the_packed_one(layout, pure_fp64):
    sequences, model = LAYOUTS[layout](), build(PACKED["llama"])
    tree = Tree.of(sequences)
    fallback = ours(model, sequences, padded.hidden_states(decoder(model), tree), tree)
    assert difference(packed(model, sequences), fallback) < 1e-12


def test_padded_path_runs_no_sequence_twice():
    sequences = chat()
    tree = Tree.of(sequences)
    kept = [tuple(sequences[s]) for s in padded.leaves(tree)]
    assert len(set(kept)) == len(kept)
    every = set(map(tuple, sequences))
    assert set(kept) == {s for s in every if not any(o != s and o[: len(s)] == s for o in every)}
