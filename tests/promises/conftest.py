"""Fixtures of the promises: exact fp64, and nothing that waits for a second thread."""

from __future__ import annotations

import pytest
import torch

from tests.engine import test_tree

pure_fp64 = test_tree.pure_fp64


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
