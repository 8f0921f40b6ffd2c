"""A sampler and an environment that need no model."""

from __future__ import annotations

import numpy as np

from oneloop.data import Span, Turn


class Said:
    """Answers floor(10 u) for every uniform, and keeps what it was asked; the call `fails_at` raises."""

    def __init__(self, version=0, fails_at=None):
        self.version, self.fails_at = version, fails_at
        self.contexts, self.uniforms, self.responses = [], [], []

    async def __call__(self, context, request, uniforms, *, response=()):
        if len(self.contexts) == self.fails_at:
            self.fails_at = None
            self.contexts.append(context)
            raise RuntimeError("the sampler broke")
        self.contexts.append(context)
        self.uniforms.append(np.asarray(uniforms))
        self.responses.append(response)
        n = len(uniforms)
        logp = np.log(np.asarray(uniforms) + 1e-9)
        recorded = {"logp": logp, "raw_logp": logp, "entropy": -logp}
        ids = tuple(int(10 * u) for u in uniforms)
        return Turn(context, ids, (Span(0, n, self.version, "d", request.temperature),), recorded, "length")


class Counting:
    """Replies with tokens 50, 51 so many times."""

    def __init__(self, replies):
        self.replies = replies

    async def reply(self, prompt, turns):
        return (50, 51) if len(turns) <= self.replies else None
