"""Fixtures of the promises: exact fp64, and nothing that waits for a second thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def pure_fp64(monkeypatch):
    """What is fp64 stays fp64: transformers' norms compute in fp32 whatever the model's dtype, and round what we compare."""
    to, to_float = torch.Tensor.to, torch.Tensor.float

    def stay(x, *args, **kwargs):
        if x.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values()):
            return x
        return to(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", stay)
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))
    plain = torch.nn.functional.softmax  # eager attention asks for fp32

    def softmax(x, dim=None, dtype=None):
        return plain(x, dim=dim, dtype=torch.float64 if x.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
