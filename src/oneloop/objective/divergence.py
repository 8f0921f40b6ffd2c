"""Full-vocabulary KL between the live policy and another model or view, computed inside the engine's chunked pass.

reverse: KL(pi || teacher) = sum_v pi (log pi - log teacher), mode-seeking; forward: KL(teacher || pi), mode-covering. Both are
differentiated with respect to pi alone. Evidence grade: FULL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from array_api_compat import array_namespace

from oneloop.data import LIVE, Array, Batch, Need, Source, State
from oneloop.ops import log_softmax
from oneloop.stages import Loss, Metrics, setting


@dataclass(frozen=True)
class _Kl:
    """The vocabulary functional: a frozen value, so that equal ones are one column."""

    way: str

    def __call__(self, policy_CV: Array, teacher_CV: Array, ids_C: Array) -> Array:
        xp = array_namespace(policy_CV)
        p_CV, q_CV = log_softmax(policy_CV), log_softmax(teacher_CV)
        if self.way == "reverse":
            return xp.sum(xp.exp(p_CV) * (p_CV - q_CV), axis=-1)
        return xp.sum(xp.exp(q_CV) * (q_CV - p_CV), axis=-1)


@dataclass(frozen=True)
class Divergence(Loss):
    """KL to `teacher` as it reads `view`; a penalty to the starting weights is teacher="reference"."""

    teacher: str = setting("reference")
    view: str = setting("own")
    way: str = setting("reverse", one_of=("reverse", "forward"))

    @property
    def live(self) -> Need:
        """The divergence's column."""
        return Need(_Kl(self.way), (LIVE, Source(self.teacher, self.view)))

    @property
    def needs(self) -> frozenset[Need | str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One two-source column."""
        return frozenset({self.live})

    def __call__(self, batch: Batch, live: Mapping[Need, Array], state: State) -> tuple[Array, Metrics]:
        """Values (N), nats."""
        return live[self.live], {}
