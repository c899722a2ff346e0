"""The sampling transform against the oracle (``specdec.certify.oracle``), host and device."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.certify.oracle import processed, reference_probs, reference_token
from specdec.device import SupportProbs
from specdec.sampling import transform as sampling
from specdec.sampling.transform import (
    SamplingParams,
    SamplingTransform,
    drawn,
    inverse_cdf,
    sample_candidates,
)

LARGEST_DRAW = 1.0 - 2.0**-53
EDGE = 1e-11  # draws nearer than this to an edge of the CDF depend on the order of its sums

PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 80, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.3},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 1.5, "top_p": 0.01},
    {"temperature": 1.0, "top_p": 1e-300},
    {"temperature": 2.0, "top_k": 10_000, "top_p": 0.999},
]

KINDS = ["plain", "flat", "peaked", "tied", "banned", "equal", "huge"]

VOCAB_SIZES = (7, 61, 777, 20_011)
"""No multiple of a block; the last is searched by blocks, and copied from a device in parts."""


def logits_of(kind: str, rows: int = 24, vocab: int = 1000, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    if kind == "flat":
        return logits * 0.1
    if kind == "peaked":
        return logits * 6.0
    if kind == "tied":  # as half-precision models have them: many exactly equal logits
        return (logits * 3).round()
    if kind == "banned":
        logits[torch.rand(rows, vocab, generator=generator) < 0.97] = -torch.inf
        logits[:, -1] = 0.5
        return logits
    if kind == "equal":
        return torch.zeros_like(logits)
    if kind == "huge":  # float32 exponentials of them overflow
        return logits * 1e3 + 1e4
    assert kind == "plain"
    return logits * 3.0


@pytest.fixture(params=[False, True], ids=["host", "device"])
def _where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets CPU tensors count as an accelerator's, too."""
    monkeypatch.setattr(sampling, "on_accelerator", lambda tensor: request.param)


# Against the oracle.


@pytest.mark.usefixtures("_where")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
def test_distributions_and_tokens_are_the_oracles(kind, given):
    """The same tokens are kept, with probabilities equal to 1e-12; tokens for draws anywhere."""
    params, rng = SamplingParams(**given), np.random.default_rng(1)
    transform = SamplingTransform(params)
    for logits in _rows_of(kind):
        expected = np.stack([reference_probs(row.double().numpy(), params) for row in logits])
        probs = transform.probs(logits)
        np.testing.assert_array_equal(probs > 0, expected > 0)
        np.testing.assert_allclose(probs, expected, rtol=0, atol=1e-12)
        cdf = expected.cumsum(axis=1)
        for draws in (rng.random(len(logits)), np.array([0.0, LARGEST_DRAW, *rng.random(2)])):
            tokens = transform.sample(logits, draws)
            for row, (token, draw) in enumerate(zip(tokens, draws, strict=True)):
                if np.abs(cdf[row] - draw).min() > EDGE:
                    assert token == reference_token(logits[row].double().numpy(), params, draw)
                assert expected[row, token] > 0


def _rows_of(kind: str) -> Iterator[torch.Tensor]:
    """Four rows of every size, and of every type in turn."""
    types = (torch.float64, torch.float32, torch.bfloat16, torch.float32)
    for vocab, dtype in zip(VOCAB_SIZES, types, strict=True):
        yield logits_of(kind, rows=4, vocab=vocab).to(dtype)


@pytest.mark.parametrize("kind", ["plain", "flat", "peaked", "tied", "banned"])
@pytest.mark.parametrize("given", PARAMS, ids=str)
def test_the_oracles_distributions_are_those_of_transformers(kind, given):
    """Which tied tokens top-p cuts depends on the sort in transformers; here lower ids are kept."""
    logits = logits_of(kind, rows=6)
    expected = hugging_face(logits, **given)
    probs = np.stack([reference_probs(row, SamplingParams(**given)) for row in logits.numpy()])
    if kind == "tied":
        for row, values in zip(probs, logits.numpy(), strict=True):
            tied = np.lexsort((np.arange(len(values)), -values))
            assert (np.diff(row[tied]) <= 0).all()
        probs, expected = np.sort(probs), np.sort(expected)
    np.testing.assert_allclose(probs, expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(probs > 0, expected > 0)


def hugging_face(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0):
    """The distribution that ``generate`` samples from."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    return chain(None, logits).softmax(dim=1).numpy()


@pytest.mark.usefixtures("_where")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_top_lists_the_best_candidates_with_their_log_probabilities(kind, temperature):
    """In token-id order where they are equal; top-k and top-p do not apply."""
    transform = SamplingTransform(SamplingParams(temperature=temperature, top_k=3, top_p=0.5))
    for vocab in VOCAB_SIZES:
        logits = logits_of(kind, rows=4, vocab=vocab)
        expected = (logits / (temperature or 1.0)).log_softmax(dim=1).numpy()
        for k in (1, 16, 1000):
            tokens, logprobs = transform.top(logits, k)
            order = np.argsort(-expected, axis=1, kind="stable")[:, :k]
            ranked = np.take_along_axis(expected, order, axis=1)
            np.testing.assert_allclose(logprobs, ranked, atol=1e-12)
            real = np.isfinite(logprobs)  # banned tokens are no candidates
            np.testing.assert_array_equal(tokens[real], order[real])
            assert (logprobs <= 0).all()


@pytest.mark.usefixtures("_where")
@pytest.mark.parametrize("vocab", [6, 1000, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
def test_a_row_does_not_depend_on_its_batch(vocab, dtype, given):
    """Bit-identical: otherwise a tree's answers would differ from token-by-token decoding."""
    logits = logits_of("plain", rows=5, vocab=vocab).to(dtype)
    logits[3] = logits[3].round()
    transform = SamplingTransform(SamplingParams(**given))
    uniforms = np.random.default_rng(0).random(5)
    together, tokens = transform.probs(logits), transform.sample(logits, uniforms)
    best, scores = transform.top(logits, 4)
    for i in range(5):
        np.testing.assert_array_equal(transform.probs(logits[i : i + 1])[0], together[i])
        assert transform.sample(logits[i : i + 1], uniforms[i : i + 1])[0] == tokens[i]
        alone, score = transform.top(logits[i : i + 1], 4)
        np.testing.assert_array_equal(alone[0], best[i])
        np.testing.assert_array_equal(score[0], scores[i])


# Edges.


@pytest.mark.usefixtures("_where")
@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("top_p, kept", [(0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)])
def test_top_p_keeps_no_more_than_its_mass_needs(top_p, kept, top_k):
    """Exact in binary: four equal tokens, so the cumulative mass meets top_p with equality."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, 0.0, 0.0, -torch.inf]])
    probs = SamplingTransform(SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k)).probs
    assert probs(logits).tolist() == [[0.0] + [1 / kept] * kept + [0.0] * (5 - kept)]


def test_a_draw_on_an_edge_of_the_cdf_belongs_to_the_token_above_it():
    weights = np.array([[0.25, 0.0, 0.25, 0.5]] * 4)
    assert inverse_cdf(weights, np.array([0.0, 0.25, 0.5, 0.75])).tolist() == [0, 2, 3, 3]


@pytest.mark.usefixtures("_where")
@pytest.mark.parametrize("given", [{}, PARAMS[0], PARAMS[1]], ids=str)
def test_no_rows_give_no_tokens(given):
    """All rows of a request may have been pruned."""
    transform, logits = SamplingTransform(SamplingParams(**given)), torch.zeros(0, 1000)
    assert transform.sample(logits, np.zeros(0)).shape == (0,)
    assert transform.probs(logits).shape == (0, 1000)
    assert transform.top(logits, 3)[0].shape == (0, 3)
    assert sample_candidates(np.zeros((0, 9)), 3, np.zeros((0, 3)))[0].shape == (0, 3)


@pytest.mark.usefixtures("_where")
@pytest.mark.parametrize("given", [{}, PARAMS[0], PARAMS[1]], ids=str)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocab", [40, 20_011])
def test_faulty_logits_are_refused(given, fault, vocab):
    logits = logits_of("plain", vocab=vocab)
    logits[5, -1] = fault
    transform, draws = SamplingTransform(SamplingParams(**given)), np.zeros(len(logits))
    for message in ("NaN or infinity", "banned every token"):
        for call in (
            lambda: transform.sample(logits, draws),
            lambda: transform.proposal_probs(logits),
            lambda: transform.top(logits, 4),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        logits[5] = -torch.inf


@pytest.mark.parametrize(
    "given, key",
    [
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram=-2"),
        ({"processors": [len]}, "processors="),
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused_by_name(given, key):
    with pytest.raises(ValueError, match=key):
        SamplingParams(**given)


def test_a_proposal_is_the_processed_distribution_or_the_plain_one_if_greedy():
    logits = logits_of("plain")
    sampled = SamplingTransform(SamplingParams(temperature=0.6, top_k=5))
    np.testing.assert_array_equal(sampled.proposal_probs(logits), sampled.probs(logits))
    greedy = SamplingTransform(SamplingParams()).proposal_probs(logits)
    np.testing.assert_allclose(greedy, logits.softmax(dim=1).numpy(), atol=1e-14)


def test_candidates_are_drawn_without_replacement_from_the_remainder():
    rng = np.random.default_rng(3)
    probs = rng.random((200, 9)) * (rng.random((200, 9)) < 0.5)
    probs[:, 4] += 0.1
    probs /= probs.sum(axis=1, keepdims=True)
    uniforms = rng.random((200, 5))
    tokens, logprobs, counts = sample_candidates(probs, 5, uniforms)
    for i in range(200):
        left = probs[i].copy()
        assert counts[i] == min(5, np.count_nonzero(left))
        for j in range(counts[i]):
            cdf = left.cumsum() / left.sum()
            assert tokens[i, j] == np.searchsorted(cdf, uniforms[i, j], side="right")
            assert logprobs[i, j] == np.log(probs[i, tokens[i, j]])
            left[tokens[i, j]] = 0.0
        assert (logprobs[i, counts[i] :] == -np.inf).all()


def test_candidates_of_a_support_are_those_of_its_array():
    rng = np.random.default_rng(4)
    probs = SamplingTransform(SamplingParams(temperature=1.0, top_k=6, top_p=0.9)).distribution(
        logits_of("tied", rows=40, vocab=50)
    )
    assert isinstance(probs, SupportProbs)
    uniforms = rng.random((40, 4))
    found, dense = drawn(probs, 4, uniforms), drawn(np.asarray(probs), 4, uniforms)
    np.testing.assert_array_equal(found.counts, dense.counts)
    real = np.arange(4) < found.counts[:, None]
    np.testing.assert_array_equal(found.tokens[real], dense.tokens[real])
    np.testing.assert_array_equal(found.logprobs, dense.logprobs)


# Histories.


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_row_is_processed_with_its_own_history(temperature, size):
    """As by transformers' processors, in their order; histories of few tokens repeat n-grams."""
    rng = np.random.default_rng(size)
    histories = [rng.integers(0, 3, rng.integers(1, 30)) for _ in range(40)]
    logits = logits_of("plain", rows=40, vocab=8)
    params = SamplingParams(
        temperature=temperature,
        top_k=4,
        top_p=0.9,
        no_repeat_ngram=size,
        processors=(RepetitionPenaltyLogitsProcessor(1.7),),
    )
    before, transform = logits.clone(), SamplingTransform(params)
    probs = transform.probs(logits, histories)
    assert torch.equal(logits, before), "the caller's logits are not changed"
    for i, history in enumerate(histories):
        scores = processed(logits[i].numpy(), params, history.tolist())
        np.testing.assert_allclose(probs[i], reference_probs(scores, params), atol=1e-12)
        alone = transform.sample(logits[i : i + 1], np.array([0.5]), [history])
        assert alone[0] == transform.sample(logits, np.full(40, 0.5), histories)[i]


def test_a_processor_that_writes_into_its_scores_changes_nothing_else():
    def forbid_first(input_ids, scores):
        scores[:, 0] = -torch.inf
        return scores

    logits = torch.tensor([[5.0, 1.0, 0.0]])
    transform = SamplingTransform(SamplingParams(processors=(forbid_first,)))
    assert transform.sample(logits, np.zeros(1), [np.array([1])]).tolist() == [1]
    assert logits[0, 0] == 5.0
