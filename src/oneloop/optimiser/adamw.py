"""AdamW (1711.05101) by torch's fused implementation, on fp32 master weights, after clipping the gradient's global norm.

A gradient that is not finite moves nothing and is counted. Evidence grade: CODE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oneloop.data import State
from oneloop.stages import Metrics, Optimiser, setting


@dataclass(frozen=True)
class AdamW(Optimiser):
    """warmup: updates over which lr rises linearly from lr / warmup. decay: the update at which it has fallen linearly to 0.

    decay 0 keeps lr; max_norm 0 does not clip.
    """

    lr: float = setting(1e-6, low=0.0, high=10.0)
    beta1: float = setting(0.9, low=0.0, high=1.0, source="torch")
    beta2: float = setting(0.999, low=0.0, high=1.0, source="torch")
    eps: float = setting(1e-8, low=0.0, high=1.0, source="torch")
    weight_decay: float = setting(0.0, low=0.0, high=1.0)
    max_norm: float = setting(1.0, low=0.0, high=1e9, source="TRL 1.16")
    warmup: int = setting(0, low=0, high=10**9, unit="updates")
    decay: int = setting(0, low=0, high=10**9, unit="updates")

    def init(self) -> State:
        """No update yet; moments are made at the first."""
        return {"updates": 0, "m": {}, "v": {}}

    def __call__(
        self, weights: Any, direction: Any, state: State, measure: Callable[[Any], float]
    ) -> tuple[Any, State, Metrics]:
        """Changes weights and moments in place. grad_norm is before clipping."""
        import torch
        from torch.optim.adamw import adamw

        names = [n for n in weights if n in direction]
        grads = [direction[n] for n in names]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads])) if grads else None
        if norm is None or not torch.isfinite(norm):
            return weights, state, {"skipped": (1.0, 1.0)}
        if self.max_norm > 0 and norm > self.max_norm:
            for g in grads:
                g.mul_(float(self.max_norm / norm))
        for n in names:
            for moment in (state["m"], state["v"]):
                if n not in moment:
                    moment[n] = torch.zeros_like(weights[n])
        updates = state["updates"]
        lr = self.rate(updates)
        adamw(
            [weights[n] for n in names],
            grads,
            [state["m"][n] for n in names],
            [state["v"][n] for n in names],
            [],
            [torch.tensor(float(updates)) for _ in names],
            fused=True,
            foreach=False,
            capturable=False,
            differentiable=False,
            grad_scale=None,
            found_inf=None,
            has_complex=False,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )
        metrics = {"grad_norm": (float(norm), 1.0), "lr": (lr, 1.0), "skipped": (0.0, 1.0)}
        return weights, {**state, "updates": updates + 1}, metrics

    def rate(self, updates: int) -> float:
        """The learning rate after so many updates."""
        rise = min(1.0, (updates + 1) / max(1, self.warmup))
        return self.lr * rise * (max(0.0, 1 - updates / self.decay) if self.decay else 1.0)
