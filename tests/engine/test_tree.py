"""The tree holds every prefix once, its plan lets exactly the ancestors through, and little is computed in vain."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneloop.engine import attention
from oneloop.engine.attention import Plan
from oneloop.engine.tree import Tree

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@given(st.lists(tokens, min_size=1, max_size=10))
@settings(max_examples=150, deadline=None)
def test_tree_holds_every_prefix_once(sequences):
    tree = Tree.of(sequences)
    prefixes = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    assert tree.num_tokens == len(prefixes)
    assert tree.num_repeated_tokens == sum(map(len, sequences))
    for i, s in enumerate(sequences):
        path = tree.node_of([i] * len(s), range(len(s)))
        assert torch.equal(path, tree.path(i))
        assert tree.ids_T[path].tolist() == list(s)
        assert tree.position_T[path].tolist() == list(range(len(s)))
        assert tree.parent_T[path.numpy()].tolist() == [-1, *path[:-1].tolist()]
    assert tree.segment_S3[0, 0] == 0
    assert tree.segment_S3[-1, 1] == tree.num_tokens


@given(st.lists(tokens, min_size=1, max_size=10), st.sampled_from([None, 2, 5]), st.integers(2, 9))
@settings(max_examples=150, deadline=None)
def test_plan_masks_are_exactly_the_ancestors(sequences, window, cut):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CHAIN_TOKENS": 3, "MAX_QUERIES": cut, "CUT_EVERY": 2, "MIN_ENTRIES": 30}.items():
            patch.setattr(attention, name, value)
        tree = Tree.of(sequences)
        plan = Plan(tree, torch.device("cpu"))
        layout = plan.layout(window)
    seen = [set() for _ in range(tree.num_tokens)]
    row, output = 0, {int(t): i for i, t in enumerate(layout.output_T)}
    for group in layout.groups:
        allowed = group.allowed(plan.end_T, plan.position_T, window)
        if group.causal:
            allowed = torch.ones(group.query_BQ.shape[1], group.key_BK.shape[1], dtype=torch.bool).tril().expand_as(allowed)
        for b in range(len(allowed)):
            for q in range(allowed.shape[1]):
                if row in output:
                    assert int(group.query_BQ[b, q]) == output[row]
                    keys = group.key_BK[b][allowed[b, q]].tolist()
                    assert len(keys) == len(set(keys))
                    seen[output[row]] |= set(keys)
                row += 1
    for i in range(len(sequences)):
        path = tree.path(i).tolist()
        for p, t in enumerate(path):
            assert seen[t] == set(path[max(0, p - window + 1) if window else 0 : p + 1])


@pytest.mark.parametrize(
    ("prompt", "count", "response", "groups", "window", "bound"),
    [
        (1024, 16, 64, 1, None, 1.2),
        (1024, 64, 512, 1, None, 1.3),
        (60, 8, 24, 16, None, 2.1),
        (1024, 16, 64, 1, 128, 4.0),
        (0, 8, 700, 1, None, 1.01),
        (8, 4, 3000, 1, 512, 1.6),
    ],
)
def test_little_is_computed_in_vain(prompt, count, response, groups, window, bound):
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(groups):
        shared = rng.integers(0, 1000, prompt).tolist()
        sequences += [shared + rng.integers(0, 1000, response).tolist() for _ in range(count)]
    plan = Plan(Tree.of(sequences), torch.device("cpu"))
    cost = plan.cost(window)
    assert cost.tokens <= groups * (prompt + count * response) < 1.01 * cost.tokens + 50
    assert cost.repeated_tokens == groups * count * (prompt + response)
    assert cost.needed <= cost.entries < bound * cost.needed
    assert len(plan.layout(window).groups) <= 14


@pytest.mark.parametrize(
    ("sequences", "message"),
    [([], "at least one"), ([[1], []], "drop the empty"), ([[-1]], "token ids"), ([[2**31]], "token ids")],
)
def test_what_is_no_tree_is_refused(sequences, message):
    with pytest.raises(ValueError, match=message):
        Tree.of(sequences)


@pytest.mark.parametrize(("sequence", "position"), [(0, 2), (1, -1), (2, 0), (-1, 0)])
def test_lookups_outside_a_sequence_are_refused(sequence, position):
    with pytest.raises(IndexError):
        Tree.of([[1, 2], [1, 3]]).node_of([sequence], [position])
