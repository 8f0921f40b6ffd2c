"""Tiny models that learn in seconds: a random Llama with a word-level tokenizer, written as a standard model directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

DIGITS = tuple("0123456789")
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} >{% endif %}"  # words and one sign
)


def tiny_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer that knows these words, split at spaces; <pad>, <end> and > come first."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(dict.fromkeys(["<pad>", "<end>", ">", "<unk>", *words]))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    out = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
    out.chat_template = TEMPLATE
    return out


def tiny_model(
    folder: Path, words: Sequence[str], *, width: int = 64, layers: int = 2, seed: int = 0, dtype: str = "float32"
) -> Path:
    """Writes model and tokenizer into `folder`; random weights from `seed`. Returns the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(words)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
