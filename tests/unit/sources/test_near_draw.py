"""Candidates near the target's draw: their scores, and that the output stays the target's own."""

import numpy as np
import pytest
import torch

from specdec.api import Decoder
from specdec.pairs.random import build_random
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources.model_source import FAR_SHARE, near_draw

pytestmark = pytest.mark.slow

FILTERED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9)
PLAIN = SamplingParams(temperature=1.0)
ROWS, VOCAB = 40, 30


def _logits(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)


def _expected(probs: np.ndarray, draw: float, spread: float) -> np.ndarray:
    """Scores of one row: the density integrated numerically, token by token."""
    places = (np.arange(200_000) + 0.5) / 200_000
    density = np.exp(-np.abs(places - draw) / spread)
    mass = np.concatenate([[0.0], density.cumsum()]) / density.sum()
    edges = np.concatenate([[0.0], probs.cumsum()])
    near = np.diff(np.interp(edges, np.linspace(0.0, 1.0, len(mass)), mass))
    return (1.0 - FAR_SHARE) * near + FAR_SHARE * probs


@pytest.mark.parametrize("params", [FILTERED, PLAIN], ids=["filtered", "plain"])
@pytest.mark.parametrize("spread", [0.02, 5.0])
@pytest.mark.parametrize("k", [4, VOCAB])
def test_scores_are_the_probability_that_the_moved_interval_contains_the_draw(
    params: SamplingParams, spread: float, k: int
) -> None:
    transform, logits = SamplingTransform(params), _logits()
    draws = np.random.default_rng(1).random(ROWS)
    draws[:3] = 0.0, 1.0 - 2.0**-53, 0.5
    found = near_draw(transform, logits, None, draws, k, spread=spread)
    probs = np.asarray(transform.probs(logits))
    for row in range(ROWS):
        scores = _expected(probs[row], draws[row], spread)
        count = int(found.counts[row])
        assert count == min(k, np.count_nonzero(probs[row]))
        best = np.exp(found.logprobs[row, :count])
        assert (np.diff(best) <= 0).all()
        np.testing.assert_allclose(best, np.sort(scores)[::-1][:count], atol=1e-4)
        np.testing.assert_allclose(scores[found.tokens[row, :count]], best, atol=1e-4)
        assert len({*found.tokens[row, :count].tolist()}) == count
        if k == VOCAB:
            assert best.sum() == pytest.approx(1.0, abs=1e-12)


def test_rows_have_as_many_columns_as_were_asked_for() -> None:
    """Candidates of requests with other parameters are joined with them."""
    draws = np.full(ROWS, 0.5)
    narrow = SamplingTransform(SamplingParams(temperature=1.0, top_k=3))
    found = near_draw(narrow, _logits(), None, draws, 7, spread=0.2)
    assert found.tokens.shape == found.logprobs.shape == (ROWS, 7)
    assert (found.counts == 3).all()


def test_a_small_spread_takes_the_drafts_token_at_the_draw() -> None:
    transform, logits = SamplingTransform(FILTERED), _logits()
    draws = np.random.default_rng(1).random(ROWS)
    found = near_draw(transform, logits, None, draws, 1, spread=1e-9)
    assert (found.tokens[:, 0] == transform.sample(logits, draws)).all()


def _decoded(strategy: str, *words: str) -> tuple[list[list[int]], float]:
    """Outputs of three prompts, and tokens per target pass."""
    pair = build_random(
        dtype="float64",
        hidden_size=32,
        num_layers=4,
        draft_layers=3,
        vocab_size=40,
        logit_scale=4.0,
    )
    options = [f"strategy={strategy}", "sampling=t06", "sampling.temperature=1.0"]
    with Decoder([*options, "max_new_tokens=48", *words], pair=pair) as decoder:
        found = decoder.generate([[5, 6, 7, 8], [1], [9, 9, 2]])
    return [list(g.tokens) for g in found], found[0].metrics["acceptance_length"]


def test_outputs_are_those_of_plain_decoding_and_more_drafts_are_right() -> None:
    """The same seed each time: the figures are counts, not estimates."""
    plain, few = _decoded("best_first")
    found, more = _decoded("best_first", "source.guess_draw=true")
    assert plain == found
    assert more > few + 0.1
