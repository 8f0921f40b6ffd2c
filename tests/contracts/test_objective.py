"""The contract of stage 7 on every loss found: finite differences, numpy as torch, nothing for tokens nobody reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from array_api_compat import array_namespace

from oneloop.batch import cut, pack, write
from oneloop.data import LIVE_LOGP, Need
from oneloop.estimate.backprop import Backprop
from oneloop.find import find
from oneloop.optimiser.adamw import AdamW
from oneloop.stages import By, Learner, Loss, Term
from oneloop.terms import Sum
from tests.build import as_torch, filled, groups, row
from tests.contracts.common import every, plain, rng

ALL = every("objective")
TOKENS = By("token")
BYS = [By("token"), By("rollout"), By("group"), By("fixed", length=7), By("rollout", "all")]


def batch_for(loss, constant=False):
    """Rows of unequal lengths in three groups, one of them an error, with every column the loss reads."""
    scores = ([1, 1, 1], [1, "broke"], [1, 1]) if constant else ([1, 0, 0.5], [1, "broke"], [0, 2])
    batch = filled(groups(*scores), loss.needs - {"credit"})
    credit_N = np.zeros(len(batch.ids_N)) if constant else rng(3).normal(size=len(batch.ids_N)).round(2)
    return write(batch, {"credit": credit_N})


def live_for(loss, batch, seed=0):
    """Values for live columns, off every kink, NaN where the policy stream does not ask."""
    out = {}
    for i, need in enumerate(sorted((n for n in loss.needs if isinstance(n, Need) and n.is_live), key=repr)):
        x_N = -0.5 + 0.4 * rng(11, i, seed).normal(size=len(batch.ids_N))
        out[need] = np.where(batch.streams["policy"] > 0, x_N, np.nan)
    return out


def total(loss, batch, by=TOKENS):
    """The loss as a learner's only term."""
    learner = Learner("policy", (Term(loss, by=by),), Backprop(), AdamW())
    return Sum(learner, batch, {"policy.0": loss.init()}, "policy")


def value(objective, part, live):
    return float(objective(part, live)[0])


def gradient(objective, part, live):
    leaves = {n: torch.tensor(v, requires_grad=True) for n, v in live.items()}
    out, _ = objective(as_torch(part), leaves)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.backward()
    return {n: np.zeros(len(v)) if v.grad is None else v.grad.numpy() for n, v in leaves.items()}


def check_gradient(loss, by=TOKENS):
    """d total / d live by fp64 finite differences, and exactly 0 where nobody reads."""
    batch = batch_for(loss)
    objective, live = total(loss, batch, by), live_for(loss, batch)
    read_N = objective.on(objective.batch)
    assert read_N.any()
    assert not read_N.all()
    for need, slope_N in gradient(objective, objective.batch, live).items():
        for t in np.flatnonzero(read_N):
            h = np.zeros(len(read_N))
            h[t] = 1e-6
            up, down = (value(objective, objective.batch, {**live, need: live[need] + s * h}) for s in (1, -1))
            assert slope_N[t] == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-8)
        assert (slope_N[~read_N] == 0).all()
        assert np.abs(slope_N[read_N]).max() > 1e-3


@pytest.mark.parametrize("by", BYS, ids=str)
@pytest.mark.parametrize(("stage", "name"), ALL)
def test_gradient_is_the_finite_difference(stage, name, by):
    check_gradient(find(stage, name)(), by)


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_numpy_and_torch_agree_and_inputs_stay(stage, name):
    loss = find(stage, name)()
    batch = batch_for(loss)
    live = {n: np.nan_to_num(v, nan=-0.3) for n, v in live_for(loss, batch).items()}
    before = plain(batch), plain(live)
    ours, metrics = loss(batch, live, loss.init())
    theirs, same = loss(as_torch(batch), {n: torch.tensor(v) for n, v in live.items()}, loss.init())
    assert (plain(batch), plain(live)) == before
    assert len(ours) == (len(batch.ids_N) if loss.axis == "token" else len(batch.rows))
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), rtol=1e-12, atol=1e-14)
    assert metrics.keys() == same.keys()
    for key, (s, n) in metrics.items():
        assert same[key] == pytest.approx((s, n), rel=1e-12, abs=1e-14, nan_ok=True)


@pytest.mark.parametrize("by", BYS, ids=str)
@pytest.mark.parametrize(("stage", "name"), ALL)
def test_parts_add_up_to_the_whole(stage, name, by):
    """1 x 7 and any other cut give the same gradient: denominators are the whole batch's."""
    loss = find(stage, name)()
    batch = batch_for(loss)
    objective, live = total(loss, batch, by), live_for(loss, batch)
    if loss.couples == "batch":
        pytest.skip("nothing may be cut")
    whole = gradient(objective, objective.batch, live)
    unit_R = np.unique(batch.group_R, return_inverse=True)[1] if loss.couples == "group" else np.arange(len(batch.rows))
    deal = rng(6).integers(0, 3, unit_R.max() + 1)[unit_R]
    metrics_whole = objective(objective.batch, live)[1]
    summed, counted = 0.0, dict.fromkeys(metrics_whole, (0.0, 0.0))
    for d in np.unique(deal):
        rows = np.flatnonzero(deal == d)
        token = np.concatenate([np.flatnonzero(batch.row_N == r) for r in rows])
        part, seen = cut(objective.batch, rows.tolist()), {n: v[token] for n, v in live.items()}
        for need, slope in gradient(objective, part, seen).items():
            np.testing.assert_allclose(slope, whole[need][token], rtol=1e-12, atol=1e-15)
        more, metrics = objective(part, seen)
        summed += float(more)
        for k, (s, n) in metrics.items():
            counted[k] = (counted[k][0] + s, counted[k][1] + n)
    assert summed == pytest.approx(value(objective, objective.batch, live), rel=1e-12)
    for k, pair in metrics_whole.items():
        assert counted[k] == pytest.approx(pair, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_the_order_of_rows_changes_nothing(stage, name):
    loss = find(stage, name)()
    batch = batch_for(loss)
    live = live_for(loss, batch)
    order = rng(8).permutation(len(batch.rows)).tolist()
    token = np.concatenate([np.flatnonzero(batch.row_N == r) for r in order])
    moved = total(loss, cut(batch, order), By("rollout"))
    straight = total(loss, batch, By("rollout"))
    a = gradient(straight, straight.batch, live)
    b = gradient(moved, moved.batch, {n: v[token] for n, v in live.items()})
    for need in a:
        np.testing.assert_allclose(b[need], a[need][token], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_constant_rewards_give_a_finite_loss(stage, name):
    loss = find(stage, name)()
    batch = batch_for(loss, constant=True)
    objective, live = total(loss, batch), live_for(loss, batch)
    assert np.isfinite(value(objective, objective.batch, live))
    assert all(np.isfinite(g).all() for g in gradient(objective, objective.batch, live).values())


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_an_error_row_changes_no_loss(stage, name):
    """Excluded, never 0: the same batch without its failed row has the same loss and gradient."""
    loss = find(stage, name)()
    batch = batch_for(loss)
    good = [r for r, row_ in enumerate(batch.rows) if not row_.score.error]
    token = np.isin(batch.row_N, good)
    live = live_for(loss, batch)
    without = total(loss, cut(batch, good), By("rollout"))
    objective = total(loss, batch, By("rollout"))
    seen = {n: v[token] for n, v in live.items()}
    assert value(without, without.batch, seen) == pytest.approx(value(objective, objective.batch, live), rel=1e-12)
    for need, slope in gradient(without, without.batch, seen).items():
        np.testing.assert_allclose(slope, gradient(objective, objective.batch, live)[need][token], rtol=1e-12)


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_a_silent_token_has_no_gradient(stage, name):
    """What `silent` promises: where that column is 0 the token may be left unread."""
    loss = find(stage, name)()
    if not loss.silent:
        pytest.skip("every token of its stream is read")
    batch = batch_for(loss)
    half = replace(batch, columns={**batch.columns, loss.silent: batch.columns[loss.silent] * (batch.ids_N % 2)})
    live = {n: torch.tensor(np.nan_to_num(v, nan=-0.3), requires_grad=True) for n, v in live_for(loss, half).items()}
    loss(as_torch(half), live, loss.init())[0].sum().backward()
    for v in live.values():
        assert (v.grad.numpy()[half.columns[loss.silent] == 0] == 0).all()


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_functionals_of_logits_are_pure_values(stage, name):
    """Equal ones are one column; numpy and torch agree; a shift of all logits changes nothing."""
    for need in (n for n in find(stage, name)().needs if isinstance(n, Need) and callable(n.what)):
        assert hash(need) == hash(next(n for n in find(stage, name)().needs if n == need))
        logits = [rng(1, i).normal(size=(4, 9)) for i in range(len(need.of))]
        also = [rng(2, i).normal(size=4) for i in range(len(need.also))]
        ids = np.array([0, 3, 8, 1])
        ours = need.what(*logits, ids, *also)
        theirs = need.what(*map(torch.tensor, logits), torch.tensor(ids), *map(torch.tensor, also))
        assert ours.shape[0] == 4
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-12)
        np.testing.assert_allclose(need.what(*(x + 5 for x in logits), ids, *also), ours, rtol=1e-9, atol=1e-12)


def test_a_batch_without_anything_to_learn_has_no_loss():
    batch = write(pack([row("a", "g", "broke"), row("b", "g", "broke")], 0), {"credit": np.zeros(4)})
    for stage, name in ALL:
        objective = total(find(stage, name)(), filled(batch, find(stage, name)().needs))
        assert not objective.on(objective.batch).any()
        assert objective(objective.batch, {})[0] == 0.0


@dataclass(frozen=True)
class Faulty(Loss):
    """A negative log-likelihood with one planted fault."""

    fault: str = ""
    needs = frozenset({LIVE_LOGP})

    def __call__(self, batch, live, state):
        x_N = live[LIVE_LOGP]
        xp = array_namespace(x_N)
        if self.fault == "cut off" and hasattr(x_N, "detach"):
            x_N = x_N.detach() * 1.0 + 0.0 * x_N
        if self.fault == "neighbour":
            x_N = xp.roll(x_N, 1) if hasattr(xp, "roll") else x_N
        if self.fault == "mean":
            return -x_N / len(x_N), {}
        return -x_N, {}


def test_planted_faults_are_seen(monkeypatch):
    check_gradient(Faulty())
    with pytest.raises(AssertionError):
        check_gradient(Faulty("cut off"))
    monkeypatch.setitem(globals(), "find", lambda stage, name: lambda: Faulty(name))
    test_parts_add_up_to_the_whole("objective", "", By())
    for fault in ("mean", "neighbour"):
        with pytest.raises(AssertionError):
            test_parts_add_up_to_the_whole("objective", fault, By())
