"""No requests."""

import numpy as np
import pytest

from oneloop.batch import pack
from oneloop.prompts.nothing import Nothing


def test_it_asks_for_nothing_and_keeps_its_state():
    assert Nothing()(3, None, np.random.default_rng(0)) == ([], None)


def test_a_step_with_neither_requests_nor_joined_rows_says_so():
    with pytest.raises(ValueError, match="at least one row"):
        pack([], 0)
