"""Settle the CPU's vector maths before threads race for it.

MKL picks the kernel of each function (cos, exp, ...) at its first call; when several threads make that call at once,
one may run a low-accuracy kernel for its share, once. Seen here: rotary cosines of a process's first forward off by
7e-9 in fp64, in about one process of twelve; resuming bit for bit and equality to 1e-12 both fail of it. One element
runs on one thread.
Source: pytorch/pytorch#188792.
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    *(torch.cos, torch.sin, torch.tan, torch.acos, torch.asin, torch.atan, torch.tanh, torch.cosh, torch.sinh),
    *(torch.exp, torch.expm1, torch.log, torch.log1p, torch.log2, torch.log10, torch.sqrt, torch.rsqrt, torch.erf),
    *(torch.erfc, torch.erfinv, torch.lgamma, torch.sigmoid, torch.trunc),
)


def settle() -> None:
    """Call each function once on one element, in both precisions. Cheap, and harmless to repeat."""
    for dtype in (torch.float32, torch.float64):
        x = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            function(x)
