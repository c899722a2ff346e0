"""Sampling from float32 rows of a large vocabulary gives the results of float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.sampling import large_rows
from specdec.sampling.transform import SamplingParams, SamplingTransform
from tests.unit.test_sampling import LARGEST_DRAW, PARAMS

VOCAB_SIZES = (8192, 8211)  # whole blocks, and a shorter last block
ROWS = 5
KINDS = ("language", "plain", "flat", "tied", "banned", "large", "small")


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies that float64 processes in little time."""
    monkeypatch.setattr(large_rows, "MIN_VOCAB", min(VOCAB_SIZES))


def rows_of(kind: str, vocab: int = VOCAB_SIZES[1], rows: int = ROWS) -> torch.Tensor:
    """float32[rows, vocab]; a language model's rows have few probable tokens."""
    rng = np.random.default_rng(len(kind))
    normal = rng.standard_normal((rows, vocab))
    ranks = np.argsort(np.argsort(-normal, axis=1), axis=1) + 1
    language = 18.0 - rng.uniform(1.1, 3.0, (rows, 1)) * np.log(ranks) + 0.1 * normal
    values = {
        "language": language,
        "plain": 3.0 * normal,
        "flat": 0.1 * normal,
        "tied": np.round(2.0 * language) / 2.0,
        "banned": np.where(rng.random((rows, vocab)) < 0.99, -np.inf, normal),
        "large": 40.0 * language + 500.0,  # exponentials overflow
        "small": language - 300.0,  # or are all 0
    }[kind]
    return torch.from_numpy(values.astype(np.float32))


def in_float64(name: str, given: SamplingParams, logits: torch.Tensor, *args):
    return getattr(SamplingTransform(given), name)(logits.double(), *args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
def test_tokens_are_those_of_float64(kind, given):
    """For draws anywhere, at both ends, and next to edges of the CDF, nearer than float32 sees."""
    params = SamplingParams(**given)
    rng = np.random.default_rng(1)
    vocab = VOCAB_SIZES[KINDS.index(kind) % 2]
    logits = rows_of(kind, vocab)
    assert large_rows.serves(logits.numpy())
    cdf = in_float64("probs", params, logits).cumsum(axis=1)
    edges = cdf[np.arange(ROWS), rng.integers(0, vocab, ROWS)]
    near = np.clip(edges + np.array([-1e-8, 1e-8, 1e-6, -1e-6, 1e-11]), 0.0, LARGEST_DRAW)
    ends = np.array([0.0, LARGEST_DRAW, *rng.random(ROWS - 2)])
    for draws in (near, ends):
        tokens = SamplingTransform(params).sample(logits, draws)
        np.testing.assert_array_equal(tokens, in_float64("sample", params, logits, draws))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
def test_distributions_are_those_of_float64_bit_for_bit(kind, given):
    params, logits = SamplingParams(**given), rows_of(kind)
    for name in ("probs", "proposal_probs"):
        found = getattr(SamplingTransform(params), name)(logits)
        np.testing.assert_array_equal(found, in_float64(name, params, logits))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("k", [1, 16, 1000, 10_000])
def test_best_candidates_are_those_of_float64(kind, temperature, k):
    """Tokens exactly; log probabilities up to the normaliser's error in float32."""
    params, logits = SamplingParams(temperature=temperature), rows_of(kind)
    tokens, logprobs = SamplingTransform(params).top(logits, k)
    exact = (logits.double() / (temperature or 1.0)).log_softmax(dim=1).numpy()
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :k]
    real = np.isfinite(logprobs)  # banned tokens are no candidates
    np.testing.assert_array_equal(tokens[real], order[real])
    assert real.sum() == np.isfinite(np.take_along_axis(exact, order, axis=1)).sum()
    expected = np.take_along_axis(exact, order, axis=1)
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2e-5)
    assert (logprobs <= 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.37])
def test_sums_of_blocks_are_within_their_bound(kind, temperature):
    """And the bound is small: few draws are as near to an edge."""
    logits = rows_of(kind)
    parts = large_rows.block_sums(logits.numpy(), temperature)
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - parts.shift[:, None])
    edges = np.arange(0, weights.shape[1], large_rows.BLOCK)
    exact = np.add.reduceat(weights, edges, axis=1)
    worst = np.abs((parts.sums - exact).cumsum(axis=1)).max(axis=1)
    assert (worst <= parts.error * exact.sum(axis=1)).all()
    assert (parts.error < (3e-5 if kind not in ("large", "small") else 2e-3)).all()


@pytest.mark.parametrize("trusted", [False, True])
def test_a_cut_nearer_than_the_bound_is_decided_in_float64(trusted, monkeypatch):
    """``trusted`` is the control: without the bound, float32 sums decide, and wrongly."""
    logits = rows_of("language", rows=1)
    probs = in_float64("probs", SamplingParams(temperature=0.8), logits)[0]
    edges = np.sort(probs)[::-1].cumsum()[10:30]
    if trusted:
        ignore_the_bound(monkeypatch)
    wrong = 0
    for top_p in [float(edge + shift) for edge in edges for shift in (-1e-9, 1e-9)]:
        params = SamplingParams(temperature=0.8, top_p=top_p)
        found = SamplingTransform(params).probs(logits)
        wrong += bool((found != in_float64("probs", params, logits)).any())
    assert (wrong > 0) == trusted


@pytest.mark.parametrize("trusted", [False, True])
def test_a_draw_nearer_than_the_bound_is_decided_in_float64(trusted, monkeypatch):
    """As above."""
    logits = rows_of("language", rows=200)
    params = SamplingParams(temperature=1.0)
    cdf = in_float64("probs", params, logits).cumsum(axis=1)
    draws = cdf[np.arange(200), np.diff(cdf, axis=1).argmax(axis=1)] - 1e-9
    if trusted:
        ignore_the_bound(monkeypatch)
    tokens = SamplingTransform(params).sample(logits, draws)
    assert (tokens != in_float64("sample", params, logits, draws)).any() == trusted


def ignore_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions follow the float32 sums."""
    original = large_rows.block_sums

    def trusted(values, temperature):
        parts = original(values, temperature)
        return replace(parts, error=np.zeros_like(parts.error))

    monkeypatch.setattr(large_rows, "block_sums", trusted)


@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_faulty_logits_are_refused(given, fault):
    logits = rows_of("language")
    logits[3, 7] = fault
    transform = SamplingTransform(SamplingParams(**given))
    for message in ("NaN or infinity", "banned every token"):
        with pytest.raises(ValueError, match=message):
            transform.sample(logits, np.zeros(len(logits)))
        with pytest.raises(ValueError, match=message):
            transform.top(logits, 4)
        logits[3] = -torch.inf
