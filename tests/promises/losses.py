"""Losses that couple a rollout, a group and the whole batch, as published methods do; small, for the promises only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from oneloop.data import LIVE, LIVE_LOGP, Array, Batch, Need, Source, State
from oneloop.objective.divergence import Divergence
from oneloop.objective.policy import Policy
from oneloop.ops import weight
from oneloop.stages import Loss, Metrics


def rows(values_N: torch.Tensor, batch: Batch) -> torch.Tensor:
    return values_N.new_zeros(len(batch.rows)).index_add(0, batch.row_N, values_N)


@dataclass(frozen=True)
class Balance(Loss):
    """A balance of flows (GFlowRL): (log pi - log pi_sampler summed over the rollout, less its credit)^2."""

    axis = "rollout"
    couples = "rollout"
    needs: ClassVar = frozenset({LIVE_LOGP, "sampled.logp", "credit"})

    def __call__(self, batch: Batch, live: Mapping[Need, Array], state: State) -> tuple[Array, Metrics]:
        on_N = weight(batch, "policy")
        gap_R = rows(on_N * (live[LIVE_LOGP] - batch.columns["sampled.logp"].nan_to_num()), batch)
        goal_R = rows(on_N * batch.columns["credit"], batch) / rows(on_N, batch).clamp(min=1)
        return (gap_R - goal_R) ** 2, {}


@dataclass(frozen=True)
class Contrast(Loss):
    """InfoNCE over the tokens of a group (CRPO): its unlikely tokens against all, by their divergence from a teacher."""

    teacher: str = "reference"
    view: str = "own"
    heat: float = 4.0
    axis = "rollout"
    couples = "group"

    @property
    def live(self) -> Need:
        what = Divergence(self.teacher, self.view).live.what
        return Need(what, (LIVE, Source(self.teacher, self.view)))

    @property
    def needs(self) -> frozenset:
        return frozenset({self.live, "sampled.logp"})

    def __call__(self, batch: Batch, live: Mapping[Need, Array], state: State) -> tuple[Array, Metrics]:
        energy_N, old_N = torch.exp(-live[self.live] / self.heat), batch.columns["sampled.logp"]
        on_N, out_R = weight(batch, "policy") > 0, energy_N.new_zeros(len(batch.rows))
        for g in sorted(set(batch.group_R)):
            mine_R = torch.as_tensor(batch.group_R == g)
            mine_N = on_N & mine_R[batch.row_N]
            if mine_N.any():
                rare_N = mine_N & (old_N <= torch.quantile(old_N[mine_N], 0.3))
                value = torch.log(energy_N[mine_N].sum() / energy_N[rare_N].sum())
                out_R = torch.where(mine_R, value, out_R)
        return out_R, {}


@dataclass(frozen=True)
class TailClip(Policy):
    """The batch's own quantile of |log-ratio| tightens the clip of what lies beyond it (SAT); differentiated through too."""

    couples = "batch"

    def __call__(self, batch: Batch, live: Mapping[Need, Array], state: State) -> tuple[Array, Metrics]:
        on_N, a_N = weight(batch, "policy") > 0, batch.columns[self.credit]
        gap_N = torch.where(on_N, live[LIVE_LOGP] - batch.columns["sampled.logp"].nan_to_num(), 0.0)
        size_N = gap_N.abs()
        edge = torch.quantile(size_N[on_N & (a_N != 0)], 0.7)
        bound_N = torch.where(size_N <= edge, 0.2, 0.2 / (1 + (size_N / edge - 1) ** 2))
        w_N = gap_N.exp()
        held_N = torch.minimum(torch.maximum(w_N, 1 - bound_N), 1 + bound_N)
        clipped_N = 1.0 * ((w_N - held_N).abs() > 0)
        keep_N = on_N & (a_N != 0)
        return torch.maximum(-w_N * a_N, -held_N * a_N), {"clipped": (float(clipped_N[keep_N].sum()), float(keep_N.sum()))}
