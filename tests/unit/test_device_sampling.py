"""The torch code for accelerators, on CPU tensors, against the host's numpy code."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from specdec.device import DeviceProbs, concatenate, on_host
from specdec.sampling import on_device
from specdec.sampling import transform as sampling
from specdec.sampling.host import sample_candidates
from specdec.sampling.transform import SamplingParams, SamplingTransform
from tests.unit.test_sampling import KINDS, LARGEST_DRAW, PARAMS, logits_of


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats CPU tensors as an accelerator's."""
    monkeypatch.setattr(sampling, "on_accelerator", lambda tensor: True)


def host(name: str, given: SamplingParams, *args):
    """Returns the host's result, also under the fixture ``there``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "on_accelerator", lambda tensor: False)
        return getattr(SamplingTransform(given), name)(*args)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("vocab", [7, 640, 777])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
def test_tokens_equal_the_hosts(kind, given, vocab):
    """For all draws, including the ends of the distribution, ties and banned tokens."""
    params = SamplingParams(**given)
    logits = logits_of(kind, vocab=vocab)
    if kind == "banned":
        logits[:, 3] = 1.0  # of 7 tokens all might be banned
    rng = np.random.default_rng(1)
    draws = [rng.random(len(logits)) for _ in range(8)]
    for uniforms in [*draws, np.zeros(len(logits)), np.full(len(logits), LARGEST_DRAW)]:
        tokens = SamplingTransform(params).sample(logits, uniforms)
        np.testing.assert_array_equal(tokens, host("sample", params, logits, uniforms))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
def test_distributions_equal_the_hosts_and_stay_there(kind, given):
    params, logits = SamplingParams(**given), logits_of(kind)
    for name in ("probs", "proposal_probs"):
        found, expected = (
            getattr(SamplingTransform(params), name)(logits),
            host(name, params, logits),
        )
        assert isinstance(found, DeviceProbs)
        assert isinstance(expected, np.ndarray)
        np.testing.assert_array_equal(on_host(found) > 0, expected > 0)
        np.testing.assert_allclose(on_host(found), expected, rtol=1e-13)
    uniforms = np.random.default_rng(0).random(len(logits))
    tokens = SamplingTransform(params).distribution(logits).sample(uniforms)
    np.testing.assert_array_equal(tokens, host("sample", params, logits, uniforms))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("kind", KINDS)
def test_best_candidates_equal_the_hosts(kind):
    """Ties are ordered as on the host, although ``topk`` does not specify their order."""
    logits, params = logits_of(kind), SamplingParams(temperature=0.6)
    for k in (1, 16, 2000):
        for mine, expected in zip(
            SamplingTransform(params).top(logits, k), host("top", params, logits, k), strict=True
        ):
            np.testing.assert_array_equal(mine, expected)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("vocab", [6, 1000, 20_000])
@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
def test_a_row_does_not_depend_on_its_batch(vocab, given):
    """Bit-identical, as on the host: a tree's answers equal token-by-token decoding."""
    logits = logits_of("plain", rows=5, vocab=vocab).float()
    logits[3] = logits[3].round()
    transform = SamplingTransform(SamplingParams(**given))
    uniforms = np.random.default_rng(0).random(5)
    together, tokens = on_host(transform.probs(logits)), transform.sample(logits, uniforms)
    for i in range(5):
        np.testing.assert_array_equal(on_host(transform.probs(logits[i : i + 1]))[0], together[i])
        assert transform.sample(logits[i : i + 1], uniforms[i : i + 1])[0] == tokens[i]


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("given", PARAMS[:4], ids=str)
def test_a_cut_beyond_the_first_entries_is_looked_for_again(given, monkeypatch):
    """In flat rows, top-p keeps more entries than are searched first."""
    params, logits = SamplingParams(**given), logits_of("flat", rows=9)
    logits[::2] = logits_of("peaked", rows=5)
    monkeypatch.setattr(on_device, "NUCLEUS", 12)
    uniforms = np.random.default_rng(3).random(9)
    tokens = SamplingTransform(params).sample(logits, uniforms)
    np.testing.assert_array_equal(tokens, host("sample", params, logits, uniforms))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_top_k_processes_selected_entries_only(kind, monkeypatch):
    """Unless more of them tie with the k-th than were selected, which is noticed."""
    params = SamplingParams(temperature=0.6, top_k=80, top_p=0.9)
    logits = logits_of(kind, vocab=4096)
    if kind == "tied":
        logits = (logits / 8).round()  # some 250 entries are at least the 80th
    shapes = []
    original = on_device._weights

    def weights(values, best, temperature):
        shapes.append(values.shape[1])
        return original(values, best, temperature)

    monkeypatch.setattr(on_device, "_weights", weights)
    uniforms = np.random.default_rng(5).random(len(logits))
    tokens = SamplingTransform(params).sample(logits, uniforms)
    np.testing.assert_array_equal(tokens, host("sample", params, logits, uniforms))
    assert max(shapes) == (160 if kind == "plain" else 4096)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_faulty_logits_are_refused(given, fault):
    """Also if only a draft's candidates are copied to the host, and no tokens."""
    logits = logits_of("plain")
    logits[5, 7] = fault
    transform, draws = SamplingTransform(SamplingParams(**given)), np.zeros(len(logits))
    for message in ("NaN or infinity", "banned every token"):
        with pytest.raises(ValueError, match=message):
            transform.sample(logits, draws)
        with pytest.raises(ValueError, match=message):
            transform.distribution(logits).sample(draws)
        probs = transform.proposal_probs(logits)
        with pytest.raises(ValueError, match=message):
            on_device.sample_candidates(probs, 2, draws[:, None].repeat(2, axis=1))
        logits[5] = -torch.inf


def _rows(rng: np.random.Generator, num: int, vocab: int) -> DeviceProbs:
    rows = rng.random((num, vocab)) * (rng.random((num, vocab)) < 0.5)
    rows[:, 4] += 0.1
    rows /= rows.sum(axis=1, keepdims=True)
    return DeviceProbs(torch.from_numpy(rows), torch.zeros(num))


@pytest.mark.parametrize("vocab", [9, 64, 200])
def test_candidates_equal_the_hosts(vocab):
    rng = np.random.default_rng(3)
    probs, uniforms = _rows(rng, 50, vocab), rng.random((50, 5))
    found = on_device.sample_candidates(probs, 5, uniforms)
    for mine, expected in zip(found, sample_candidates(on_host(probs), 5, uniforms), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_rows_become_arrays_where_they_are_used_as_such():
    probs = _rows(np.random.default_rng(0), 4, 9)
    rows = on_host(probs)
    assert probs.shape == (4, 9)
    assert len(probs[1]) == 9
    np.testing.assert_array_equal(np.stack([np.asarray(row) for row in probs]), rows)
    np.testing.assert_array_equal(on_host(probs[1:3]), rows[1:3])
    both = concatenate([probs, probs[:2]])
    assert isinstance(both, DeviceProbs)
    np.testing.assert_array_equal(on_host(both), np.concatenate([rows, rows[:2]]))
    np.testing.assert_array_equal(concatenate([probs, rows]), np.concatenate([rows, rows]))


def test_judging_keeps_the_targets_distribution():
    """Exact: accepted children and corrections, weighted by the draft's law, sum to the target.

    Over all ordered pairs of siblings that a draft of four tokens can propose, the tests' draws
    on a grid, the correction's in a permutation of one.
    """
    target = np.array([0.4, 0.3, 0.2, 0.1])
    draft = np.array([0.1, 0.2, 0.3, 0.4])
    grid = (np.arange(100) + 0.5) / 100
    law = np.zeros(4)
    for first, second in itertools.permutations(range(4), 2):
        chance = draft[first] * draft[second] / (1.0 - draft[first])
        tests = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
        num = len(tests)
        place, token = on_device.judge(
            torch.from_numpy(target).expand(num, -1),
            torch.from_numpy(draft).expand(num, -1),
            np.tile([first, second], (num, 1)),
            tests,
            np.random.default_rng(first).permutation(num) / num,
        )
        emitted = np.where(place < 2, np.array([first, second, 0])[place], token)
        law += chance * np.bincount(emitted, minlength=4) / num
    np.testing.assert_allclose(law, target, atol=0.01)  # the grid's step
