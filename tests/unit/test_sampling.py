"""The sampling transform against transformers' processors and warpers, and edge cases."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.executors import ModelAnswerer
from specdec.sampling.host import Distribution, inverse_cdf, sample_candidates
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.processors import repeated_ngrams
from specdec.sampling.transform import (
    SamplingParams,
    SamplingTransform,
)
from specdec.types import NO_NODE, Batch, TreeRows

LARGEST_DRAW = 1.0 - 2.0**-53

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


def hugging_face(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0):
    """The distribution that ``generate`` samples from."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    return chain(None, logits).softmax(dim=1).numpy()


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
        return logits.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.97, -torch.inf)
    assert kind == "plain"
    return logits * 3.0


KINDS = ["plain", "flat", "peaked", "tied", "banned"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", PARAMS, ids=str)
def test_probs_equal_transformers(kind, given):
    """Equal to 1e-12 in float64, and the same tokens are kept.

    In transformers, which tied tokens top-p cuts depends on the sort; here lower ids are kept.
    """
    logits = logits_of(kind)
    expected = hugging_face(logits, **given)
    probs = SamplingTransform(SamplingParams(**given)).probs(logits)
    if kind == "tied":
        for row, values in zip(probs, logits.numpy(), strict=True):
            tied = np.lexsort((np.arange(len(values)), -values))
            assert (np.diff(row[tied]) <= 0).all()
        probs, expected = np.sort(probs), np.sort(expected)
    np.testing.assert_allclose(probs, expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(probs > 0, expected > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", PARAMS, ids=str)
def test_sample_is_the_inverse_cdf_in_token_order(kind, given):
    logits = logits_of(kind, vocab=777)
    transform = SamplingTransform(SamplingParams(**given))
    probs = transform.probs(logits)
    cdf = probs.cumsum(axis=1)
    rng = np.random.default_rng(2)
    for _ in range(20):
        uniforms = rng.random(len(logits))
        expected = (cdf <= uniforms[:, None]).sum(axis=1)
        edge = np.abs(cdf - uniforms[:, None]).min(axis=1) < 1e-12
        tokens = transform.sample(logits, uniforms)
        np.testing.assert_array_equal(tokens[~edge], expected[~edge])
    rows = np.arange(len(logits))
    for end in (0.0, LARGEST_DRAW):
        assert (probs[rows, transform.sample(logits, np.full(len(rows), end))] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", PARAMS, ids=str)
def test_lower_precision_logits_are_filtered_as_their_exact_values(dtype, given):
    logits = logits_of("plain").to(dtype)
    transform = SamplingTransform(SamplingParams(**given))
    np.testing.assert_array_equal(transform.probs(logits), transform.probs(logits.double()))


@pytest.mark.parametrize("vocab", [6, 1000, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
def test_a_row_does_not_depend_on_its_batch(vocab, dtype, given):
    """Bit-identical: otherwise a tree's answers would differ from token-by-token decoding."""
    logits = logits_of("plain", rows=9, vocab=vocab).to(dtype)
    logits[3] = logits[3].round()
    transform = SamplingTransform(SamplingParams(**given))
    uniforms = np.random.default_rng(0).random(9)
    together, tokens = transform.probs(logits), transform.sample(logits, uniforms)
    best, scores = transform.top(logits, 4)
    for i in range(9):
        np.testing.assert_array_equal(transform.probs(logits[i : i + 1])[0], together[i])
        assert transform.sample(logits[i : i + 1], uniforms[i : i + 1])[0] == tokens[i]
        alone, score = transform.top(logits[i : i + 1], 4)
        np.testing.assert_array_equal(alone[0], best[i])
        np.testing.assert_array_equal(score[0], scores[i])


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("top_p, kept", [(0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)])
def test_top_p_keeps_no_more_than_its_mass_needs(top_p, kept, top_k):
    """Exact in binary: four equal tokens, so the cumulative mass meets top_p with equality."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, 0.0, 0.0, -torch.inf]])
    probs = SamplingTransform(SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k)).probs
    assert probs(logits).tolist() == [[0.0] + [1 / kept] * kept + [0.0] * (5 - kept)]


def test_a_draw_beyond_a_blocks_rounded_end_falls_on_its_last_token():
    """A block's sum and its cumulative sum round differently; a draw may lie between the two."""
    weights = np.zeros((200, 640))
    weights[:, 129:190] = np.random.default_rng(0).random((200, 61))
    block = weights[:, 128:192]
    assert (block.cumsum(axis=1)[:, -1] < block.sum(axis=1) * LARGEST_DRAW).any()
    assert (inverse_cdf(weights, np.full(200, LARGEST_DRAW)) == 189).all()


def test_a_draw_on_an_edge_of_the_cdf_belongs_to_the_token_above_it():
    weights = np.array([[0.25, 0.0, 0.25, 0.5]] * 4)
    assert inverse_cdf(weights, np.array([0.0, 0.25, 0.5, 0.75])).tolist() == [0, 2, 3, 3]


@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
def test_no_rows_give_no_tokens(given):
    """All rows of a request may have been pruned."""
    transform, logits = SamplingTransform(SamplingParams(**given)), torch.zeros(0, 1000)
    assert transform.sample(logits, np.zeros(0)).shape == (0,)
    assert transform.probs(logits).shape == (0, 1000)
    assert transform.top(logits, 3)[0].shape == (0, 3)
    assert sample_candidates(np.zeros((0, 9)), 3, np.zeros((0, 3)))[0].shape == (0, 3)


def test_greedy_takes_the_lowest_of_tied_tokens():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [0.0, 1.0, 3.0]])
    transform = SamplingTransform(SamplingParams())
    assert transform.sample(logits, np.full(3, 0.99)).tolist() == [1, 0, 2]
    assert transform.probs(logits).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("given", [{}, *PARAMS], ids=str)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_faulty_logits_are_refused(given, fault):
    logits = logits_of("plain")
    logits[5, 7] = fault
    transform = SamplingTransform(SamplingParams(**given))
    with pytest.raises(ValueError, match="NaN or infinity"):
        transform.sample(logits, np.zeros(len(logits)))
    logits[5] = -torch.inf
    with pytest.raises(ValueError, match="banned every token"):
        transform.sample(logits, np.zeros(len(logits)))


@pytest.mark.parametrize(
    "given, key",
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram=-2"),
        ({"processors": [len]}, "processors="),
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused_by_name(given, key):
    with pytest.raises(ValueError, match=key):
        SamplingParams(**given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_top_lists_the_best_candidates_with_their_log_probabilities(kind, temperature):
    logits = logits_of(kind)
    given = SamplingParams(temperature=temperature, top_k=3, top_p=0.5)  # filters do not apply
    for k in (1, 16, 2000):
        tokens, logprobs = SamplingTransform(given).top(logits, k)
        expected = (logits / (temperature or 1.0)).log_softmax(dim=1).numpy()
        order = np.argsort(-expected, axis=1, kind="stable")[:, :k]
        ranked = np.take_along_axis(expected, order, axis=1)
        np.testing.assert_allclose(logprobs, ranked, atol=1e-12)
        real = np.isfinite(logprobs)  # banned tokens are no candidates
        np.testing.assert_array_equal(tokens[real], order[real])
        assert (logprobs <= 0).all()


def test_a_proposal_is_the_processed_distribution_or_the_plain_one_if_greedy():
    logits = logits_of("plain")
    sampled = SamplingTransform(SamplingParams(temperature=0.6, top_k=5))
    np.testing.assert_array_equal(sampled.proposal_probs(logits), sampled.probs(logits))
    greedy = SamplingTransform(SamplingParams()).proposal_probs(logits)
    np.testing.assert_allclose(greedy, logits.softmax(dim=1).numpy(), atol=1e-14)


# ---------------------------------------------------------------------- histories


def random_histories(rng: np.random.Generator, num: int, alphabet: int = 3):
    """Histories of different lengths over few tokens, so that n-grams repeat."""
    return [rng.integers(0, alphabet, rng.integers(1, 30)) for _ in range(num)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_repeated_ngrams_equal_transformers(size):
    rng = np.random.default_rng(size)
    histories = random_histories(rng, 60)
    scores = torch.zeros(60, 8)
    rows, tokens = repeated_ngrams(histories, size)
    scores[rows, tokens] = -torch.inf
    processor = NoRepeatNGramLogitsProcessor(size)
    for row, history in zip(scores, histories, strict=True):
        expected = processor(torch.from_numpy(history)[None], torch.zeros(1, 8))
        assert torch.equal(row[None], expected)
    assert torch.isinf(scores).any()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_processors_come_in_transformers_order_with_each_nodes_own_history(temperature):
    rng = np.random.default_rng(5)
    histories = random_histories(rng, 12, alphabet=5)
    logits = logits_of("plain", rows=12, vocab=8)
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    params = SamplingParams(
        temperature=temperature, top_k=4, top_p=0.9, no_repeat_ngram=2, processors=(penalty,)
    )
    before = logits.clone()
    transform = SamplingTransform(params)
    probs = transform.probs(logits, histories)
    assert torch.equal(logits, before), "the caller's logits are not changed"
    for i, history in enumerate(histories):
        input_ids = torch.from_numpy(history)[None]
        scores = penalty(input_ids, NoRepeatNGramLogitsProcessor(2)(input_ids, before[i : i + 1]))
        if temperature:
            expected = hugging_face(scores, temperature, 4, 0.9)[0]
        else:
            expected = np.eye(8)[int(scores.argmax())]
        np.testing.assert_allclose(probs[i], expected, atol=1e-12)
        alone = transform.sample(before[i : i + 1], np.array([0.5]), [history])
        assert alone[0] == transform.sample(logits, np.full(12, 0.5), histories)[i]


def test_a_processor_that_writes_into_its_scores_changes_nothing_else():
    def forbid_first(input_ids, scores):
        scores[:, 0] = -torch.inf
        return scores

    logits = torch.tensor([[5.0, 1.0, 0.0]])
    transform = SamplingTransform(SamplingParams(processors=(forbid_first,)))
    assert transform.sample(logits, np.zeros(1), [np.array([1])]).tolist() == [1]
    assert logits[0, 0] == 5.0


# ---------------------------------------------------------------------- draws


@pytest.mark.parametrize("width", [1, 5, 256, 257, 1000, 4096, 4097])
def test_inverse_cdf_never_falls_on_a_zero(width):
    rng = np.random.default_rng(width)
    weights = rng.random((50, width)) * (rng.random((50, width)) < 0.3)
    weights[:, rng.integers(width)] = 1e-12
    weights[:25, -(width // 2) :] = 0.0
    weights[np.arange(50), rng.integers(0, width, 50)] = 1.0
    for draw in (0.0, 0.3, 0.999999, LARGEST_DRAW):
        at = inverse_cdf(weights, np.full(50, draw))
        assert (weights[np.arange(50), at] > 0).all()
    cdf = weights.cumsum(axis=1) / weights.sum(axis=1, keepdims=True)
    uniforms = rng.random(50)
    expected = (cdf <= uniforms[:, None]).sum(axis=1)
    np.testing.assert_array_equal(inverse_cdf(weights, uniforms), expected)


def test_a_distribution_writes_out_what_it_samples():
    ids = np.array([[1, 4, 0], [0, 2, 3]])
    weights = np.array([[1.0, 3.0, 0.0], [1.0, 0.0, 1.0]])
    distribution = Distribution(ids, weights, 5)
    assert distribution.probs().tolist() == [[0, 0.25, 0, 0, 0.75], [0.5, 0, 0, 0.5, 0]]
    assert distribution.sample(np.array([0.3, 0.6])).tolist() == [4, 3]


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


# ---------------------------------------------------------------------- the answering rank


def tree_rows(request, ids, prefix_len, depths, tokens=None):
    """Rows of nodes in a chain."""
    return TreeRows(
        request=request,
        prefix_len=prefix_len,
        node_ids=ids,
        tokens=np.zeros(len(ids), np.int64) if tokens is None else tokens,
        parent_ids=np.where(np.arange(len(ids)) == 0, NO_NODE, ids - 1),
        depths=depths,
    )


@pytest.mark.parametrize("given", [{}, *PARAMS[:3]], ids=str)
def test_answers_use_the_draw_of_the_position_after_the_node(given):
    logits = logits_of("plain", rows=6)
    params = SamplingParams(**given)
    request = SimpleNamespace(id=42, sampling=params, tokens=np.zeros(256, np.int64))
    positions = np.array([255, 256, 256, 257, 257, 258])
    rows = tree_rows(42, np.arange(10, 16), 255, positions - 255)
    draws = KeyedDraws(seed=9)
    for needs_probs in (False, True):
        answerer = ModelAnswerer(draws=draws, needs_probs=needs_probs)
        answerer.open(request)
        (answers,) = answerer.answer(Batch(step=0, trees=(rows,)), logits)
        for i, position in enumerate(positions):
            uniform = draws.uniform(42, np.array([position + 1]), Purpose.TARGET)
            token = SamplingTransform(params).sample(logits[i : i + 1], uniform)
            assert answers.tokens[i] == token[0]
        assert (answers.probs is not None) == needs_probs
    if params.greedy:
        np.testing.assert_allclose(answers.probs, logits.softmax(1).numpy(), atol=1e-14)
    else:
        np.testing.assert_array_equal(answers.probs, SamplingTransform(params).probs(logits))


@pytest.mark.parametrize("needs_probs", [False, True])
def test_requests_that_share_a_call_are_answered_as_alone(needs_probs):
    """Bit-identical, whether or not they have equal parameters and thus share the call."""
    logits = logits_of("plain", rows=7, vocab=300)
    hot, cold = SamplingParams(temperature=0.9, top_p=0.9), SamplingParams(no_repeat_ngram=2)
    rng = np.random.default_rng(0)
    for kinds in ([hot] * 3, [cold] * 3, [hot, cold, hot]):
        answerer = ModelAnswerer(draws=KeyedDraws(seed=3), needs_probs=needs_probs)
        trees, start = [], 0
        for i, (params, num) in enumerate(zip(kinds, (2, 4, 1), strict=True)):
            prompt = rng.integers(0, 300, 10)
            answerer.open(SimpleNamespace(id=i, sampling=params, tokens=prompt))
            ids, tokens = np.arange(num) + start, rng.integers(0, 300, num)
            trees.append(tree_rows(i, ids, 9, np.arange(num), tokens))
            start += num
        together = answerer.answer(Batch(step=0, trees=tuple(trees)), logits)
        assert [answers.request for answers in together] == [0, 1, 2]
        for each, answers in zip(trees, together, strict=True):
            (alone,) = answerer.answer(Batch(step=0, trees=(each,)), logits[each.node_ids])
            np.testing.assert_array_equal(answers.tokens, alone.tokens)
            np.testing.assert_array_equal(answers.node_ids, each.node_ids)
            if needs_probs:
                np.testing.assert_array_equal(answers.probs, alone.probs)
