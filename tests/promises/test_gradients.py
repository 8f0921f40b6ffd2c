"""Gradients do not depend on padding, micro-batch layout or packing order; they are those of the plain computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from oneloop.batch import cut, pack
from oneloop.data import Batch, Prompt, Rollout, Score, Span, Turn
from oneloop.engine import passes
from oneloop.engine.core import TorchEngine
from oneloop.lab.tiny import tiny_model
from oneloop.loop import prepare
from oneloop.objective.divergence import Divergence
from oneloop.objective.nll import Nll
from oneloop.objective.policy import Policy
from oneloop.objective.regress import Regress
from oneloop.recipe import learner
from oneloop.stages import By, Model, Term
from oneloop.state import State
from oneloop.terms import Sum
from oneloop.views.hint import Hint
from tests.promises.losses import Balance, Contrast, TailClip

WORDS = [f"w{i}" for i in range(20)]
HINT = (9, 10, 11)
BY_ROLLOUT, BY_GROUP = By("rollout"), By("group")
ARMS = {
    "joined": (
        Term(Policy(), by=BY_ROLLOUT),
        Term(Nll(), on="demonstration", weight=0.3),
        Term(Divergence("reference"), weight=0.1, by=BY_GROUP),
        Term(Divergence("reference", "hinted", "forward"), weight=0.2, by=By("token", "all")),
    ),
    "critic": (Term(Regress(clip=0.3), on="response"), Term(Regress(clip=0.3), on="observation", weight=0.5)),
    "rollout": (Term(Balance(), by=BY_ROLLOUT),),
    "group": (Term(Contrast(view="hinted"), by=BY_GROUP), Term(Policy(), by=By("fixed", length=7))),
    "batch": (Term(TailClip()),),
}


def rows_of(seed: int) -> list[Rollout]:
    """Three groups of unequal sizes and lengths, two turns in some rows, one failed row, two demonstrations."""
    draw = np.random.default_rng(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(i) for i in draw.integers(4, 24, n))

    def turn(context: tuple[int, ...], n: int, heat: float, observed: int = 0) -> Turn:
        logp = draw.normal(-3.2, 0.4, n)
        return Turn(context, ids(n), (Span(0, n, 0, "d", heat),), {"logp": logp}, observed=observed)

    out = []
    for g, count in enumerate((4, 3, 2)):
        prompt = Prompt(f"p{g}", ids(3 + 4 * g), "echo", {"hint_ids": HINT[: g + 1]})
        for i in range(count):
            turns = [turn(prompt.ids, int(draw.integers(1, 9)), (1.0, 0.5, 2.0)[g])]
            if (i + g) % 3 == 1:
                reply = ids(2)
                turns.append(turn(turns[0].context + turns[0].response + reply, 4, 1.0, observed=2))
            score = Score(error="broke") if (g, i) == (0, 3) else Score(float(draw.normal()))
            out.append(Rollout(f"{g}/{i}", prompt, tuple(turns), f"g{g}", score=score))
    for i in range(2):
        prompt = Prompt(f"d{i}", ids(4), "echo")
        out.append(Rollout(f"demo{i}", prompt, (Turn(prompt.ids, ids(3 + i)),), f"demo{i}", "demonstration", score=Score(1.0)))
    return out


def columns_of(rows: list[Rollout]) -> Batch:
    """Credit and return are functions of the row and the token, so that they follow it in any order."""
    batch = pack(rows, 0)
    place = np.array([len(r.id) + sum(map(ord, r.id)) for r in rows])[batch.row_N] + 3 * batch.turn_N + batch.cut_N
    credit = np.where(place % 5 == 0, 0.0, np.sin(place))
    return replace(batch, columns={**batch.columns, "credit": credit, "return": np.cos(place)})


@dataclass
class Bench:
    """An engine in fp64 over small models, and how to ask it for a gradient."""

    engine: TorchEngine
    recipe: SimpleNamespace
    paths: dict[str, str]

    def run(self) -> SimpleNamespace:
        mechanisms, views = {}, {"view.hinted": Hint()}
        state = State(mechanisms={f"{n}.{i}": None for n in ARMS for i in range(9)})
        return SimpleNamespace(recipe=self.recipe, state=state, mechanisms={**mechanisms, **views}, engine=self.engine)

    def objective(self, arm: str, rows: list[Rollout]) -> Sum:
        return prepare(self.run(), columns_of(rows))[arm][0]

    def pull(self, arm: str, rows: list[Rollout], budget: int = 10**6):
        self.engine.token_budget = budget
        objective = self.objective(arm, rows)
        gradient, metrics = self.engine.pull(self.recipe.learners[arm].model, objective.batch, objective)
        return {n: g.clone() for n, g in gradient.items()}, metrics


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    paths = {n: str(tiny_model(root / n, WORDS, width=16, seed=s)) for n, s in (("policy", 0), ("reference", 1))}
    models = {
        "policy": Model(paths["policy"], dtype="float64"),
        "reference": Model(paths["reference"], dtype="float64"),
        "critic": Model("policy", heads=("value",), blocks=1, dtype="float64"),
    }
    learners = {n: learner(*terms, model="critic" if n == "critic" else "policy") for n, terms in ARMS.items()}
    engine = TorchEngine(models, learners)
    draw = torch.Generator().manual_seed(5)
    for network in engine.networks.values():  # away from the start, so that ratios, divergences and values are not 0
        own = {n: p.detach() for n, p in network.module.named_parameters()}
        own |= {n: p.detach() for n, p in network.parameters.items()}
        moved = {n: p + 0.15 * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype) for n, p in own.items()}
        for n, p in network.heads.named_parameters():
            moved[f"heads.{n}"] = p.detach() + 0.5 * torch.randn(p.shape, generator=draw).to(p.dtype)
        with torch.no_grad():
            for n, p in [*network.module.named_parameters(), *((f"heads.{n}", p) for n, p in network.heads.named_parameters())]:
                p.copy_(moved[n])
    yield Bench(engine, SimpleNamespace(learners=learners), paths)
    torch.set_num_threads(before)


def gap(a: dict, b: dict) -> float:
    """The largest difference, in units of the largest entry of b."""
    assert set(a) == set(b)
    size = max(float(x.abs().max()) for x in b.values())
    return max(float((a[n] - b[n]).abs().max()) for n in b) / size


def one_row_a_part(monkeypatch) -> None:
    monkeypatch.setattr(passes, "parts", lambda batch, on, budget: [[int(r)] for r in np.unique(batch.row_N[on])])


def same_metrics(a, b) -> None:
    assert set(a) == set(b)
    for name in b:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("arm", ARMS)
def test_no_cut_changes_gradient_or_metrics(bench, arm, pure_fp64, monkeypatch):
    rows = rows_of(0)
    whole, metrics = bench.pull(arm, rows)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    for budget in (40, 1):
        cut_up, m = bench.pull(arm, rows, budget)
        assert gap(cut_up, whole) < 1e-9
        same_metrics(m, metrics)
    one_row_a_part(monkeypatch)
    cut_up, m = bench.pull(arm, rows)
    assert gap(cut_up, whole) < 1e-9
    same_metrics(m, metrics)


@pytest.mark.parametrize("arm", ARMS)
def test_no_order_of_rows_changes_the_gradient(bench, arm, pure_fp64):
    rows = rows_of(0)
    whole, metrics = bench.pull(arm, rows)
    for seed in (1, 2):
        order = np.random.default_rng(seed).permutation(len(rows))
        permuted, m = bench.pull(arm, [rows[i] for i in order], (10**6, 50)[seed % 2])
        assert gap(permuted, whole) < 1e-9
        same_metrics(m, metrics)


@pytest.mark.parametrize("arm", ARMS)
def test_padding_changes_nothing(bench, arm, pure_fp64, monkeypatch):
    rows = rows_of(0)
    whole, metrics = bench.pull(arm, rows)
    for network in bench.engine.networks.values():
        assert network.backbone.packed
        monkeypatch.setattr(network.backbone, "packed", False)
    padded, m = bench.pull(arm, rows)
    assert gap(padded, whole) < 1e-9
    same_metrics(m, metrics)


@pytest.mark.parametrize("arm", ["group", "batch"])
def test_control_a_coupled_loss_cut_in_one_pass_is_wrong(bench, arm, pure_fp64, monkeypatch):
    rows = rows_of(0)
    whole, metrics = bench.pull(arm, rows)
    monkeypatch.setattr(passes, "is_one_pass", lambda *_: True)
    assert gap(bench.pull(arm, rows)[0], whole) < 1e-9  # one part: nothing is cut
    one_row_a_part(monkeypatch)
    wrong, m = bench.pull(arm, rows)
    assert gap(wrong, whole) > 1e-2
    with pytest.raises(AssertionError):
        same_metrics(m, metrics)


def test_control_denominators_counted_in_each_cut_are_wrong(bench, pure_fp64):
    """The mean of the micro-batches' means, what peers did: neither gradient nor metrics are those of the batch."""
    rows = rows_of(0)
    whole, metrics = bench.pull("joined", rows)
    batch, term = columns_of(rows), bench.recipe.learners["joined"]
    homes = [np.flatnonzero(batch.group_R == g) for g in dict.fromkeys(batch.group_R)]
    total, loss = {}, 0.0
    for home in homes:
        part = cut(batch, home)
        run = bench.run()
        run.recipe = SimpleNamespace(learners={"joined": term})
        objective = prepare(run, part)["joined"][0]
        gradient, m = bench.engine.pull("policy", objective.batch, objective)
        total = {n: total.get(n, 0) + g / len(homes) for n, g in gradient.items()}
        loss += m["loss"][0] / len(homes)
    assert gap(total, whole) > 1e-2
    assert abs(loss - metrics["loss"][0]) > 1e-3


# ---------------------------------------------------------------------------- against finite differences


@pytest.mark.parametrize("arm", ARMS)
def test_gradient_is_the_slope_of_the_loss(bench, arm, pure_fp64):
    rows, model = rows_of(0), bench.recipe.learners[arm].model
    network = bench.engine.networks[model]
    objective = bench.objective(arm, rows)
    gradient, _ = bench.engine.pull(model, objective.batch, objective)
    saved = {n: w.clone() for n, w in network.masters.items()}
    draw, losses = torch.Generator().manual_seed(1), []
    u = {n: torch.randn(w.shape, generator=draw, dtype=torch.float64) for n, w in saved.items()}
    for step in (1e-6, -1e-6):
        network.install({n: w + step * u[n] for n, w in saved.items()})
        losses.append(bench.engine.pull(model, objective.batch, objective)[1]["loss"][0])
    network.install(saved)
    slope = sum(float((gradient[n] * u[n]).sum()) for n in u)
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=2e-5)
    flipped = {n: -g for n, g in gradient.items()}  # the control: a wrong sign is seen
    assert (losses[0] - losses[1]) / 2e-6 != pytest.approx(sum(float((flipped[n] * u[n]).sum()) for n in u), rel=0.5)


# ---------------------------------------------------------------------------- against the plain computation


class Plainly:
    """Each sequence alone through the transformers class, autograd, loops over tokens: nothing of the engine's."""

    def __init__(self, bench: Bench) -> None:
        self.models = {}
        for name in ("policy", "reference", "critic"):
            source = bench.paths["reference" if name == "reference" else "policy"]
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="eager").eval()
            if name == "critic":
                model.model.layers = model.model.layers[:1]
            with torch.no_grad():
                own = dict(bench.engine.networks[name].module.named_parameters())
                for n, p in model.named_parameters():
                    p.copy_(own[n])
            self.models[name] = model
        head = bench.engine.networks["critic"].heads["value"]
        self.head = torch.nn.Linear(16, 1).double()
        with torch.no_grad():
            self.head.weight.copy_(head.weight)
            self.head.bias.copy_(head.bias)

    def hidden(self, name: str, ids) -> torch.Tensor:
        return self.models[name].model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    def logits(self, name: str, batch: Batch, k: int, hint: bool = False) -> torch.Tensor:
        """Logits that predict token k, at the temperature it was sampled with."""
        row = batch.rows[batch.row_N[k]]
        turn = row.turns[batch.turn_N[k]]
        before = (turn.context + turn.response)[: batch.cut_N[k]]
        if hint:
            before = tuple(row.prompt.meta.get("hint_ids", ())) + before
        return self.models[name].lm_head(self.hidden(name, before)[-1]) / float(batch.columns["temperature"][k])

    def logp(self, batch: Batch, k: int) -> torch.Tensor:
        return self.logits("policy", batch, k).log_softmax(-1)[int(batch.ids_N[k])]

    def value(self, batch: Batch, k: int) -> torch.Tensor:
        row = batch.rows[batch.row_N[k]]
        turn = row.turns[batch.turn_N[k]]
        return self.head(self.hidden("critic", (turn.context + turn.response)[: batch.cut_N[k]])[-1])[0]

    def kl(self, batch: Batch, k: int, hint: bool = False, forward: bool = False) -> torch.Tensor:
        p = self.logits("policy", batch, k).log_softmax(-1)
        with torch.no_grad():
            q = self.logits("reference", batch, k, hint).log_softmax(-1)
        return (q.exp() * (q - p)).sum() if forward else (p.exp() * (p - q)).sum()

    def gradient(self, arm: str, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        model = self.models["critic" if arm == "critic" else "policy"]
        named = dict(model.named_parameters())
        if arm == "critic":
            named |= {f"heads.value.{n}": p for n, p in self.head.named_parameters()}
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def tokens_where(batch: Batch, good: Callable[[int], bool]) -> dict[int, list[int]]:
    """Row -> its tokens that fit."""
    out: dict[int, list[int]] = {}
    for k in range(len(batch.ids_N)):
        if good(k):
            out.setdefault(int(batch.row_N[k]), []).append(k)
    return out


def clipped(w: torch.Tensor, a: float, bound) -> torch.Tensor:
    return -torch.minimum(w * a, torch.clamp(w, 1 - bound, 1 + bound) * a)


def mean(values) -> torch.Tensor:
    return torch.stack(list(values)).mean()


def naive(plainly: Plainly, arm: str, batch: Batch) -> torch.Tensor:
    """The arm's loss, written out."""
    origin = [batch.rows[r].origin for r in batch.row_N]
    failed = [bool(batch.rows[r].score.error) for r in batch.row_N]
    is_response = batch.cut_N >= np.array(
        [len(batch.rows[r].turns[t].context) for r, t in zip(batch.row_N, batch.turn_N, strict=True)]
    )
    ours = tokens_where(batch, lambda k: origin[k] == "policy" and not failed[k] and is_response[k])
    demos = tokens_where(batch, lambda k: origin[k] == "demonstration" and is_response[k])
    credit, old = batch.columns["credit"], batch.columns["sampled.logp"]
    groups: dict[str, list[int]] = {}
    for r, ks in ours.items():
        groups.setdefault(batch.rows[r].group, []).extend(ks)
    flat = [k for ks in ours.values() for k in ks]

    def ratio_loss(k: int, bound=0.2) -> torch.Tensor:
        return clipped((plainly.logp(batch, k) - old[k]).exp(), credit[k], bound)

    if arm == "joined":
        policy = mean(mean(ratio_loss(k) for k in ks) for ks in ours.values())
        nll = mean(-plainly.logp(batch, k) for ks in demos.values() for k in ks)
        kl = mean(mean(plainly.kl(batch, k) for k in ks) for ks in groups.values())
        everyone = len(flat) + sum(map(len, demos.values()))
        hinted = torch.stack([plainly.kl(batch, k, hint=True, forward=True) for k in flat]).sum() / everyone
        return policy + 0.3 * nll + 0.1 * kl + 0.2 * hinted
    if arm == "critic":
        good = ~np.array(failed)
        squares = [
            mean((plainly.value(batch, k) - batch.columns["return"][k]) ** 2 for k in np.flatnonzero(on & good))
            for on in (is_response, ~is_response)
        ]
        return squares[0] + 0.5 * squares[1]
    if arm == "rollout":
        gaps = {r: torch.stack([plainly.logp(batch, k) - old[k] for k in ks]).sum() for r, ks in ours.items()}
        return mean((gaps[r] - float(np.mean(credit[ks]))) ** 2 for r, ks in ours.items())
    if arm == "group":
        values = []
        for ks in groups.values():
            energy = torch.stack([torch.exp(-plainly.kl(batch, k, hint=True) / 4) for k in ks])
            rare = torch.tensor(old[ks] <= np.quantile(old[ks], 0.3))
            values.append(torch.log(energy.sum() / energy[rare].sum()))
        return mean(values) + torch.stack([ratio_loss(k) for k in flat]).sum() / (7 * len(ours))
    gaps = torch.stack([plainly.logp(batch, k) - old[k] for k in flat])
    a = torch.tensor(credit[flat])
    edge = torch.quantile(gaps.abs()[a != 0], 0.7)
    bound = torch.where(gaps.abs() <= edge, 0.2, 0.2 / (1 + (gaps.abs() / edge - 1) ** 2))
    return mean(clipped(g.exp(), float(x), b) for g, x, b in zip(gaps, a, bound, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_gradient_is_that_of_the_plain_computation(bench, arm, pure_fp64):
    rows = rows_of(0)
    gradient, metrics = bench.pull(arm, rows, 60)
    plainly = Plainly(bench)
    loss = naive(plainly, arm, columns_of(rows))
    assert metrics["loss"][0] == pytest.approx(float(loss.detach()), rel=1e-9)
    assert gap(gradient, plainly.gradient(arm, loss)) < 1e-9


def test_control_a_trainer_without_the_temperature_is_found_out(bench, pure_fp64, monkeypatch):
    rows = rows_of(0)
    plainly = Plainly(bench)
    loss = naive(plainly, "rollout", columns_of(rows))
    expected = plainly.gradient("rollout", loss)
    assert gap(bench.pull("rollout", rows)[0], expected) < 1e-9
    monkeypatch.setattr(passes.Reading, "shaped", lambda self, raw, heat: self.network.shape_logits(raw))
    assert gap(bench.pull("rollout", rows)[0], expected) > 1e-2


def test_one_huge_log_ratio_does_not_explode_the_gradient(bench, pure_fp64):
    """Known elsewhere as a hundredfold gradient norm; here exp of the ratio is bounded and a clipped token has no slope."""
    rows = rows_of(0)
    usual, _ = bench.pull("joined", rows)
    turn = rows[0].turns[0]
    logp = turn.recorded["logp"].copy()
    logp[0] -= 20.0
    wild = [replace(rows[0], turns=(replace(turn, recorded={"logp": logp}), *rows[0].turns[1:])), *rows[1:]]
    batch = columns_of(wild)
    credit = np.where(np.arange(len(batch.ids_N)) == 0, 1.0, batch.columns["credit"])
    run = bench.run()
    objective = prepare(run, replace(batch, columns={**batch.columns, "credit": credit}))["joined"][0]
    gradient, _ = bench.engine.pull("policy", objective.batch, objective)
    size = max(float(g.abs().max()) for g in usual.values())
    assert max(float(g.abs().max()) for g in gradient.values()) < 3 * size
