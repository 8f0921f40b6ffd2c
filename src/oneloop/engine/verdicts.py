"""Where scorers run: in the sandbox; without one, only those that merely read text, in this process.

A scorer that executes what a model wrote is refused where there is no sandbox; it is never run bare.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from oneloop.engine.sandbox import Outcome, Sandbox, SandboxUnavailable, available

READS_TEXT = frozenset({"oneloop.environments.arithmetic:score", "oneloop.environments.echo:score"})  # reviewed: no eval


class Verdicts:
    """`call(target, *arguments)` -> Outcome."""

    def __init__(self, targets: Iterable[str] = (), *, workers: int = 1) -> None:
        """Raises SandboxUnavailable where a target needs one and the machine has none."""
        self.is_boxed, self.reason = bool((found := available()).how), found.reason
        bare = [t for t in targets if t not in READS_TEXT]
        if not self.is_boxed and bare:
            raise SandboxUnavailable(f"{bare[0]} needs a sandbox: {self.reason}")
        self.sandbox = Sandbox(workers=workers) if self.is_boxed else None

    async def call(self, target: str, *arguments: Any) -> Outcome:
        """A scorer's reply, or its error."""
        if self.sandbox is not None:
            return await self.sandbox.call(target, *arguments)
        if target not in READS_TEXT:
            return Outcome(error=f"{target} needs a sandbox: {self.reason}", kind="raised")
        module, _, name = target.partition(":")
        try:
            return Outcome("value", getattr(importlib.import_module(module), name)(*arguments))
        except Exception as error:
            return Outcome(error=f"{type(error).__name__}: {error}", kind="raised")

    def close(self) -> None:
        """Ends the workers."""
        if self.sandbox is not None:
            self.sandbox.close()
