"""One token per row: inverse-CDF sampling with recorded log-probs, a few milliseconds at 64 x 49,152.

The distribution of a row is walked once, a few rows at a time so that everything stays in the processor's cache:
exponentials, sums over chunks of the vocabulary, then the caller's uniform picks a chunk and a token within it.
"""

from dataclasses import dataclass

import numpy as np
import torch

CHUNK = 256  # tokens per chunk of the two-level search: about the square root of a vocabulary
CACHE_BYTES = 2 << 20  # rows walked at once on a CPU: their numbers fit a second-level cache (ours, measured)
FLOOR = -1e4  # so far below the best a token has probability 0 in float64 too; keeps 0 * -inf out of the entropy


@dataclass(frozen=True)
class Drawn:
    """What was drawn for B rows: `ids` int64 [B] and, float64 [B] in nats, `logp`, `raw_logp`, `entropy`.

    `logp` is under the distribution that was sampled (softmax of logits / temperature; 0 for greedy, a point mass);
    `raw_logp` and `entropy` are those of the untempered softmax.
    """

    ids: np.ndarray
    logp: np.ndarray
    raw_logp: np.ndarray
    entropy: np.ndarray


class Sampler:
    """Draws tokens from logits [B, V]; keeps its buffer between calls."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def __call__(self, logits_BV: torch.Tensor, temperature_B: np.ndarray, uniform_B: np.ndarray) -> Drawn:
        """Draw one token per row: the first i with F(i) > u F(V), F the running sum of exp(logits / temperature).

        Args:
            logits_BV: any float type; computed in float32, float64 stays float64.
            temperature_B: float64 [B] >= 0; 0 takes the most likely token.
            uniform_B: float64 [B] in [0, 1).

        Raises:
            FloatingPointError: a row has NaN or +inf, or nothing but -inf.

        """
        B, V = logits_BV.shape
        dtype = torch.float64 if logits_BV.dtype == torch.float64 else torch.float32
        rows = B if logits_BV.is_cuda else max(1, CACHE_BYTES // (V * dtype.itemsize))
        host = torch.tensor(np.stack([temperature_B, uniform_B]), dtype=torch.float64).to(logits_BV.device)
        drawn = []
        for start in range(0, B, rows):
            part = slice(start, min(B, start + rows))
            is_one = bool(((temperature_B[part] == 1) | (temperature_B[part] == 0)).all())
            has_greedy = bool((temperature_B[part] == 0).any())
            drawn.append(self._rows(logits_BV[part].to(dtype), host[0, part], host[1, part], is_one, has_greedy))
        ids, logp, raw_logp, entropy = (torch.cat(column) for column in zip(*drawn, strict=True))
        numbers = torch.stack([logp, raw_logp, entropy]).cpu().numpy()
        if not np.isfinite(numbers).all():
            raise FloatingPointError("the logits are NaN or infinite: check the weights, or lower the learning rate")
        return Drawn(ids.cpu().numpy(), *numbers)

    def _rows(
        self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, is_one: bool, has_greedy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        shifted = (logits - logits.amax(-1, keepdim=True)).clamp_(min=FLOOR)
        weights, sums = self._exponentials(shifted)
        running = sums.cumsum(-1)
        log_z = running[:, -1].log()
        # a batched matmul of one row each takes 20 times as long as this and sums naively
        entropy = log_z - (weights[:, : shifted.shape[1]] * shifted).sum(-1).double() / running[:, -1]
        log_z_tempered, divisor = log_z, torch.where(temperature == 0, 1.0, temperature)
        if not is_one:
            weights, sums = self._exponentials(shifted / divisor[:, None].to(shifted.dtype))
            running = sums.cumsum(-1)
            log_z_tempered = running[:, -1].log()
        ids = _search(weights, sums, running, uniform).clamp_(max=shifted.shape[1] - 1)  # NaN lands in the padding
        if has_greedy:
            ids = torch.where(temperature == 0, shifted.argmax(-1), ids)
        chosen = shifted.gather(1, ids[:, None])[:, 0].double()
        logp = torch.where(temperature == 0, 0.0, chosen / divisor - log_z_tempered)
        return ids, logp, chosen - log_z, entropy

    def _exponentials(self, shifted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return exp(shifted) padded with zeros to whole chunks [rows, chunks * CHUNK], and its chunk sums, float64."""
        rows, V = shifted.shape
        width = -(-V // CHUNK) * CHUNK
        buffer = self._buffer
        stale = buffer is None or buffer.shape[0] < rows or buffer.shape[1] != width
        if buffer is None or stale or buffer.dtype != shifted.dtype or buffer.device != shifted.device:
            buffer = self._buffer = shifted.new_zeros(rows, width)
        buffer = buffer[:rows]
        if width != V:
            buffer[:, V:] = 0  # a vocabulary of another size may have been here
        torch.exp(shifted, out=buffer[:, :V])
        return buffer, buffer.view(rows, -1, CHUNK).sum(-1).double()


def _search(weights: torch.Tensor, sums: torch.Tensor, running: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index whose running sum of `weights` is over uniform * total, int64 [rows].

    Each level stops at its last index of positive weight, so no rounding can select a token of probability zero.
    """
    total = running[:, -1:]
    chunk = _first_over(running, uniform[:, None] * total, total)
    before = torch.where(chunk > 0, running.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    inside = weights.view(len(weights), -1, CHUNK)[torch.arange(len(weights), device=weights.device), chunk[:, 0]]
    running_inside = inside.double().cumsum(-1)
    total_inside = running_inside[:, -1:]
    # the chunk's sum was rounded in the weights' type: the rest is rescaled, not compared across two roundings
    rest = (uniform[:, None] * total - before).clamp_(min=0) / sums.gather(1, chunk) * total_inside
    return (chunk * CHUNK + _first_over(running_inside, rest, total_inside))[:, 0]


def _first_over(running: torch.Tensor, target: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    over = torch.searchsorted(running, target.contiguous(), right=True)
    last = torch.searchsorted(running, total.contiguous(), right=False)  # first to reach the total: the last of positive weight
    return torch.minimum(over, last).clamp_(max=running.shape[1] - 1)  # NaN sorts past the end
