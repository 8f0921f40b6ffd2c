"""GRPO in one file: reinforcement learning of a language model, to be read from top to bottom.

    python examples/grpo_one_file.py MODEL_DIRECTORY --task sums --lr 1e-5 --max-tokens 24

The loop: prompts are chosen, the model answers each of them several times, a scorer says which answers are right, the
scores become credit, the credit a loss, the loss a gradient, the gradient new weights, and the new weights answer next.

This file trades speed for plainness and imports nothing of oneloop. A test holds it equal to oneloop's recipe `grpo`:
the same seed gives the same prompts, the same tokens, the same losses. Paper: GRPO (Shao et al., 2402.03300).
"""

import argparse
import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


# 1. Randomness ----------------------------------------------------------------------------------------------
def stream(seed: int, *name: object) -> np.random.Generator:
    """A generator called by its name. One global generator would make every draw depend on all draws before it."""
    words = "\x1f".join(map(str, name)).encode()
    key = int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "big")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, key])))


# 2. The task: questions whose answers a program can check ---------------------------------------------------
@dataclass(frozen=True)
class Item:
    """One example."""

    id: str
    question: str
    answer: str


def sums(count: int) -> list[Item]:
    """Sums and differences of two numbers of one or two digits."""
    items, i = [], 0
    while len(items) < count:
        rng, name = random.Random(i), f"train-{i}"
        _, digits, i = rng.randint(2, 2), rng.randint(1, 2), i + 1
        low, high = (10, 99) if digits == 2 else (0, 9)
        a, b, sign = rng.randint(low, high), rng.randint(low, high), rng.choice("+-")
        text = f"State the final answer to the following arithmetic problem: {a} {sign} {b} ="
        # Half of all questions are kept for testing, chosen by the text itself: a question that comes twice must not
        # be trained on and tested on. A split by the generator's seed would not see that.
        if int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >= 2**31:
            items.append(Item(name, text, str(a + b if sign == "+" else a - b)))
    return items


def score_sums(text: str, answer: str) -> float:
    """1 where the last number of the response is the answer. Read as text: what a model wrote is never evaluated."""
    numbers = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", text)
    return float(bool(numbers) and Decimal(numbers[-1].replace(",", "")) == Decimal(answer))


def echo(count: int) -> list[Item]:
    """Say the word you were shown: a random tiny model learns it in seconds."""
    return [Item(f"train-{i}", f"w{i}", f"w{i}") for i in range(count)]


def score_echo(text: str, answer: str) -> float:
    """1 where the first word is the answer."""
    return float(text.split()[:1] == [answer])


TASKS = {"sums": (sums, score_sums, 2048), "echo": (echo, score_echo, 8)}


# 3. Prompts: every item once before any comes again ---------------------------------------------------------
def choose(items: list[Item], per_step: int, seed: int) -> Iterator[list[tuple[str, Item]]]:
    """The prompts of step 0, 1, 2, ...; each with a name of its own, since an item comes again in the next epoch."""
    epoch, order = 0, []
    for step in itertools.count():
        chosen = []
        while len(chosen) < per_step:
            if not order:
                order, epoch, place = list(stream(seed, step, "prompts", 0).permutation(len(items))), epoch + 1, 0
            item = items[order.pop(0)]
            chosen.append((f"{epoch}.{place}.{item.id}", item))
            place += 1
        yield chosen


# 4. Sampling: the policy answers ----------------------------------------------------------------------------
@dataclass
class Rollout:
    """One answer. Its token ids are carried from here to the loss: text tokenised again may come out as other ids."""

    prompt: list[int]
    ids: list[int]
    logp: list[float]  # of each token, by the weights that sampled it; the loss needs it as it was
    text: str = ""
    score: float = 0.0
    credit: float = 0.0


@torch.no_grad()
def sample(model: torch.nn.Module, prompt: list[int], uniform: torch.Tensor, stop: set[int]) -> list[Rollout]:
    """A group: one answer for each row of `uniform` (rollouts x tokens). They share their prompt, so nothing is padded.

    Token j of a rollout is the first whose cumulative probability exceeds its j-th uniform number (inverse CDF). So an
    answer depends on its own numbers only, and not on which answers happen to be in the batch with it.
    """
    group = [Rollout(prompt, [], []) for _ in uniform]
    new, cache = torch.tensor([prompt] * len(group)), DynamicCache(config=model.config)
    for j in range(uniform.shape[1]):
        logits = model(new, None, None, cache, use_cache=True, logits_to_keep=1).logits[:, -1]  # the cache grows in place
        logp = logits.double().log_softmax(-1)  # temperature 1: the policy as it is
        cumulative = logp.exp().cumsum(-1)
        new = torch.searchsorted(cumulative, uniform[:, j : j + 1] * cumulative[:, -1:], right=True)
        new = new.clamp(max=logp.shape[1] - 1)
        for row, token, value in zip(group, new[:, 0].tolist(), logp.gather(1, new)[:, 0].tolist(), strict=True):
            if not row.ids or row.ids[-1] not in stop:  # the end token is kept: the model has to learn to stop
                row.ids.append(token)
                row.logp.append(value)
        if all(row.ids[-1] in stop for row in group):
            break
    return group


# 5. Credit: how much better than its siblings was an answer? ------------------------------------------------
def assign_credit(group: list[Rollout], eps: float = 1e-4) -> None:
    """(score - mean) / (std + eps) over the group. The mean is a baseline: it takes out how hard the prompt is.

    Where all scores agree nothing can be learnt, and the credit is exactly 0: a rounding error of the mean must not be
    divided by eps.
    """
    scores = np.array([row.score for row in group])
    if np.ptp(scores) > 0:
        for row, value in zip(group, (scores - scores.mean()) / (scores.std(ddof=1) + eps), strict=True):
            row.credit = float(value)


# 6. The loss ------------------------------------------------------------------------------------------------
def log_probs(model: torch.nn.Module, group: list[Rollout]) -> torch.Tensor:
    """Log-probability (nats) of each response token by the weights of now, with gradient: rollouts x longest response.

    Short rows are filled up on the right. Attention looks to the left only, so no real token sees the filling.
    """
    longest = max(len(row.ids) for row in group)
    ids = torch.tensor([row.prompt + row.ids + [0] * (longest - len(row.ids)) for row in group])
    logits = model(ids, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]  # position t predicts token t + 1
    return logits.log_softmax(-1).gather(-1, ids[:, -longest:, None])[..., 0]


def group_loss(model: torch.nn.Module, group: list[Rollout], num_rollouts: int, clip: float = 0.2) -> torch.Tensor:
    """-min(w A, clip(w) A), w = p_now / p_sampler, A = credit: mean over a rollout's tokens, then over all rollouts.

    The ratio w corrects for the weights having moved since the tokens were sampled; at the first update it is 1 and
    only its gradient matters. Clipping stops pushing a token once it has moved by a fifth in the wished direction.
    Divided by the rollouts of the whole step, the groups' losses add up to the step's, however it is cut.
    """
    now = log_probs(model, group)
    lengths = torch.tensor([len(row.ids) for row in group])
    real = torch.arange(now.shape[1]) < lengths[:, None]
    sampled = torch.zeros_like(now)
    sampled[real] = torch.tensor([value for row in group for value in row.logp], dtype=now.dtype)
    credit = torch.tensor([row.credit for row in group], dtype=now.dtype)[:, None]
    log_ratio = torch.where(real, now - sampled, 0.0)
    ratio = log_ratio.clamp(-10, 10).exp()  # bounded before exp: one strange token must not carry the whole step
    per_token = -torch.minimum(ratio * credit, ratio.clamp(1 - clip, 1 + clip) * credit)
    return (per_token * real / lengths[:, None]).sum() / num_rollouts


# 7. The update ----------------------------------------------------------------------------------------------
def update(model: torch.nn.Module, optimiser: torch.optim.Optimizer, groups: list[list[Rollout]]) -> tuple[float, float]:
    """One step of AdamW on the loss of all groups, one in memory at a time: gradients add up. Returns loss and norm."""
    loss, num_rollouts = 0.0, sum(map(len, groups))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in groups:
        if any(row.credit for row in group):  # a group without credit has no gradient: spare its forward pass
            part = group_loss(model, group, num_rollouts)
            part.backward()
            loss += part.item()
    norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item()
    if norm > 1.0:  # one unlucky step must not undo many good ones
        for p in model.parameters():
            p.grad /= norm
    optimiser.step()
    return loss, norm


# 8. The loop ------------------------------------------------------------------------------------------------
def train(args: argparse.Namespace) -> Iterator[dict]:
    """Yields a record a step."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # Weights in fp32: most of RL's small updates are less than half a unit of bf16's last place, and rounding would
    # throw them away. (Who computes in bf16 keeps fp32 master weights beside it, as oneloop does.)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    # transformers gives the padding id's embedding no gradient. In many models that id is the end token's too, which
    # every chat holds: it has to learn like any other.
    model.get_input_embeddings().padding_idx = None
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    ends = model.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    make, score, size = TASKS[args.task]
    steps = choose(make(size), args.prompts, args.seed)
    for step in range(args.steps):
        groups = []
        for name, item in next(steps):
            # The chat template puts the question into the form the model was taught to answer, special tokens included.
            chat = [{"role": "user", "content": item.question}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            draws = stream(args.seed, step, "rollout", name, 0).spawn(args.rollouts)
            uniform = torch.tensor(np.array([rng.random(args.max_tokens) for rng in draws]))
            groups.append(group := sample(model, list(prompt), uniform, stop))
            for row in group:
                row.text = tokenizer.decode(row.ids, skip_special_tokens=True)
                row.score = score(row.text, item.answer)
            assign_credit(group)
        # Two epochs take two updates from the same answers: the ratio then differs from 1 and clipping begins to act.
        losses, norms = zip(*(update(model, optimiser, groups) for _ in range(args.epochs)), strict=True)
        rows = [row for group in groups for row in group]
        means = {"score": np.mean([row.score for row in rows]), "loss": np.mean(losses), "grad_norm": np.mean(norms)}
        yield {"step": step, **means, "rows": rows}


SIZES = {"steps": 20, "prompts": 16, "rollouts": 8, "max_tokens": 256, "epochs": 1, "seed": 0}


def main() -> None:
    """Reads the command line and prints a line a step."""
    parser = argparse.ArgumentParser(description="GRPO in one file")
    parser.add_argument("model", help="a model directory; `oneloop model path smollm2-135m` prints one")
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--lr", type=float, default=1e-6)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    for r in train(parser.parse_args()):
        line = "step {step:3d}  score {score:.3f}  loss {loss:+.5f}  grad norm {grad_norm:.3f}  ".format(**r)
        print(line + repr(r["rows"][0].text[-60:]), flush=True)


if __name__ == "__main__":
    main()
