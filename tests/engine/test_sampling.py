"""Inverse-CDF sampling: frequencies, edges, and that no token of probability zero is ever drawn."""

import numpy as np
import pytest
import torch

from oneloop.engine.sampling import CHUNK, Sampler

LARGEST = 1 - 2**-53


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny work: threads that wait for each other cost more than they give
    yield
    torch.set_num_threads(num_threads)


def draw(logits, uniforms, temperature=1.0):
    uniforms = np.asarray(uniforms, dtype=np.float64)
    rows = torch.as_tensor(logits).expand(len(uniforms), -1)
    return Sampler()(rows, np.full(len(uniforms), temperature), uniforms)


def chi_square(ids, probabilities):
    expected = probabilities * len(ids)
    counts = np.bincount(ids, minlength=len(probabilities))
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    size, num = 300, 40_000  # more than one chunk, the last one partial
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.5
    uniforms = np.random.default_rng(1).random(num)
    probabilities = torch.softmax(logits.double() / temperature, -1).numpy()
    bound = size - 1 + 4 * np.sqrt(2 * (size - 1))  # four standard deviations of chi-square
    ids = draw(logits, uniforms, temperature).ids
    assert chi_square(ids, probabilities) < bound
    # wrong samplers must not pass: a wrong temperature, an index off by one, a chunk boundary missed
    assert chi_square(draw(logits, uniforms, temperature * 1.5).ids, probabilities) > bound
    assert chi_square((ids + 1) % size, probabilities) > bound
    assert chi_square(np.where(ids // CHUNK == 1, ids - 1, ids), probabilities) > bound


def test_it_is_the_inverse_of_the_cumulative_distribution():
    logits = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    uniforms = np.sort(np.random.default_rng(0).random(5000))
    cumulative = torch.softmax(logits, -1).cumsum(-1).numpy()
    ids = draw(logits, uniforms).ids
    assert (ids == np.searchsorted(cumulative, uniforms, side="right")).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 5000])
def test_edges_never_leave_the_support(size, dtype):
    generator = torch.Generator().manual_seed(size)
    for scale in (0.0, 1.0, 30.0):
        logits = (torch.randn(size, generator=generator) * scale).to(dtype)
        closed = torch.rand(size, generator=generator) < 0.7
        closed[int(torch.randint(size, (1,), generator=generator))] = False
        logits[closed] = -torch.inf
        near = [0.0, LARGEST, 2**-60, 0.5, *np.random.default_rng(size).random(300)]
        for temperature in (1.0, 0.3):
            drawn = draw(logits, near, temperature)
            assert (drawn.ids >= 0).all()
            assert (drawn.ids < size).all()
            assert not closed[torch.as_tensor(drawn.ids)].any()
            assert np.isfinite(drawn.logp).all()


def test_the_first_and_the_last_token_of_the_support():
    logits = torch.full((700,), -torch.inf)
    logits[[3, 300, 301, 650]] = 0.0
    assert draw(logits, [0.0, 0.25, 0.5, 0.75, LARGEST]).ids.tolist() == [3, 300, 301, 650, 650]


def test_tiny_weights_after_a_dominant_one():
    logits = torch.full((600,), -95.0)  # exp(-95) is a denormal float32; the chunk sums cannot see them
    logits[100] = 0.0
    assert draw(logits, [0.3, LARGEST]).ids[0] == 100
    assert 0 <= draw(logits, [LARGEST]).ids[0] < 600


def test_numbers_equal_a_direct_computation():
    logits = torch.randn(9, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    temperature = np.array([1.0, 0.5, 2.0, 0.0, 1.0, 0.0, 0.7, 1.0, 1.3])
    uniforms = np.random.default_rng(0).random(9)
    raw = torch.log_softmax(logits, -1)
    for given, bound in ((logits, 1e-12), (logits.float(), 1e-5)):
        drawn = Sampler()(given, temperature, uniforms)
        chosen = torch.as_tensor(drawn.ids)[:, None]
        np.testing.assert_allclose(drawn.raw_logp, raw.gather(1, chosen)[:, 0], atol=bound)
        np.testing.assert_allclose(drawn.entropy, -(raw.exp() * raw).sum(-1), atol=bound)
        for row, t in enumerate(temperature):
            if t == 0:
                assert drawn.ids[row] == int(logits[row].argmax())
                assert drawn.logp[row] == 0
            else:
                expected = torch.log_softmax(logits[row] / t, -1)[drawn.ids[row]]
                np.testing.assert_allclose(drawn.logp[row], expected, atol=bound)


def test_a_row_does_not_depend_on_the_others_and_inputs_are_kept():
    logits = torch.randn(40, 70_000, generator=torch.Generator().manual_seed(0))  # several blocks of rows
    before, uniforms = logits.clone(), np.random.default_rng(0).random(40)
    sampler = Sampler()
    together = sampler(logits, np.linspace(0, 2, 40), uniforms)
    sampler(logits[:, :300], np.ones(40), uniforms)  # another vocabulary leaves nothing behind
    for row in (0, 7, 39):
        alone = sampler(logits[row : row + 1], np.linspace(0, 2, 40)[row : row + 1], uniforms[row : row + 1])
        assert alone.ids[0] == together.ids[row]
        np.testing.assert_allclose(alone.logp[0], together.logp[row], atol=1e-5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_refused(bad):
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    with pytest.raises(FloatingPointError, match="logits"):
        Sampler()(logits, np.ones(3), np.zeros(3))
    with pytest.raises(FloatingPointError, match="logits"):
        draw(torch.full((10,), -torch.inf), [0.5])
