"""The n-gram model against a plain reading of Katz 1987."""

from collections import Counter

import numpy as np
import pytest

from specdec.sources.katz import KatzModel, NGramSource, discounts

from .support import VOCAB, commit, expand, make_request, make_state, open_request


def zipf_tokens(rng: np.random.Generator, num: int, vocab_size: int) -> np.ndarray:
    """Text with repeats: copies of earlier stretches among random tokens, documents split by 0."""
    tokens = list(np.minimum(rng.zipf(1.3, 50), vocab_size - 1))
    while len(tokens) < num:
        if rng.random() < 0.5:
            at = rng.integers(0, len(tokens) - 8)
            tokens += tokens[at : at + rng.integers(2, 8)]
        else:
            tokens += list(np.minimum(rng.zipf(1.3, 3), vocab_size - 1))
        if rng.random() < 0.02:
            tokens.append(0)
    return np.array(tokens[:num], np.int64)


class BruteKatz:
    """Dictionaries and loops over the whole vocabulary, straight from the formulae."""

    def __init__(self, tokens, order, vocab_size, separator):
        self.order, self.size = order, vocab_size
        self.counts = []
        for m in range(1, order + 1):
            grams = Counter()
            for i in range(len(tokens) - m + 1):
                gram = tuple(tokens[i : i + m].tolist())
                if separator not in gram[1:-1]:
                    grams[gram] += 1
            self.counts.append(grams)
        self.factors = []
        for grams in self.counts:
            values = np.array(list(grams.values()))
            self.factors.append(dict(zip(values.tolist(), discounts(values).tolist(), strict=True)))

    def row(self, context):
        context = tuple(context[-(self.order - 1) :]) if self.order > 1 else ()
        return self._row(context)

    def _row(self, context):
        if context is None:
            return np.full(self.size, 1 / self.size)
        lower = self._row(context[1:] if context else None)
        m = len(context) + 1
        seen = {w: c for w in range(self.size) if (c := self.counts[m - 1].get((*context, w), 0))}
        if not seen:
            return lower
        total = sum(seen.values())
        probs = {w: self.factors[m - 1][c] * c / total for w, c in seen.items()}
        if 1 - sum(probs.values()) < 1e-9:
            probs = {w: c / (total + 1) for w, c in seen.items()}
        if len(seen) == self.size:
            whole = sum(probs.values())
            probs = {w: p / whole for w, p in probs.items()}
            alpha = 0.0
        else:
            alpha = (1 - sum(probs.values())) / (1 - sum(lower[w] for w in seen))
        row = alpha * lower
        for w, p in probs.items():
            row[w] = p
        return row


@pytest.fixture(params=[1, 2, 3, 4])
def case(request):
    rng = np.random.default_rng(request.param)
    tokens = zipf_tokens(rng, 3000, 60)
    model = KatzModel(tokens, order=request.param, vocab_size=60, separator=0)
    seen = [tokens[i : i + 3] for i in rng.integers(0, 2990, 60)]
    made = [rng.integers(0, 60, rng.integers(0, 5)) for _ in range(60)]
    return model, BruteKatz(tokens, request.param, 60, 0), [*seen, *made]


def test_probs_equal_brute_force(case):
    model, brute, contexts = case
    probs = model.probs(contexts)
    expected = np.stack([brute.row(c.tolist()) for c in contexts])
    np.testing.assert_allclose(probs, expected, rtol=1e-9)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-12)
    assert (probs > 0).all()


@pytest.mark.parametrize("k", [1, 8, 32, 40])
def test_top_is_the_top_of_probs(case, k):
    model, _, contexts = case
    probs = model.probs(contexts)
    tokens, logprobs = model.top(contexts, k)
    np.testing.assert_allclose(np.exp(logprobs), -np.sort(-probs, axis=1)[:, :k], rtol=1e-9)
    np.testing.assert_allclose(np.take_along_axis(probs, tokens, 1), np.exp(logprobs), rtol=1e-9)
    assert all(len(set(row)) == k for row in tokens.tolist())


def test_discounts_are_good_turing():
    """Counts of counts 100, 40, 20, 12, 8, 5: the formula by hand for r = 1 and r = 3."""
    num = [100, 40, 20, 12, 8, 5]
    counts = np.repeat(np.arange(1, 7), num)
    factors = discounts(counts)
    rest = 6 * 5 / 100
    assert factors[0] == pytest.approx((2 * 40 / 100 - rest) / (1 - rest))
    assert factors[100 + 40] == pytest.approx((4 * 12 / 20 / 3 - rest) / (1 - rest))
    assert factors[-1] == 1.0
    # The discounted mass of counts 1..5 is n_1 in all: what Good and Turing leave for the unseen.
    lost = ((1 - factors) * counts).sum()
    assert lost == pytest.approx(100)


def test_missing_counts_of_counts_lower_the_threshold():
    counts = np.repeat([1, 2, 3, 9], [50, 20, 9, 4])  # no 4: k = 2 is the largest possible
    factors = discounts(counts)
    rest = 3 * 9 / 50
    assert factors[0] == pytest.approx((2 * 20 / 50 - rest) / (1 - rest))
    assert (factors[70:] == 1.0).all()
    only_ones = discounts(np.ones(5, np.int64))
    assert (only_ones == 0.5).all()


def test_ngrams_do_not_reach_over_separators():
    tokens = np.array([5, 6, 0, 7, 8, 0, 5, 6, 0, 7, 8])
    model = KatzModel(tokens, order=3, vocab_size=9, separator=0)
    after = model.probs([np.array([6, 0])])
    assert (after == model.probs([np.array([0])])).all()  # 6 0 7 was not counted
    assert model.top([np.array([5, 6])], 1)[0].item() == 0  # but 5 6 0 was: the end of a document
    joined = KatzModel(tokens, order=3, vocab_size=9, separator=None)
    assert joined.probs([np.array([6, 0])])[0, 7] > after[0, 7]


def test_hashless_keys_with_a_large_vocabulary():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, 5000)
    tokens[2500:] = tokens[:2500]
    model = KatzModel(tokens, order=5, vocab_size=150_000, separator=None)
    found = model.top([tokens[i : i + 4] for i in range(100)], 1)[0][:, 0]
    assert (found == tokens[4:104]).all()


@pytest.mark.parametrize(
    ("tokens", "order", "complaint"),
    [([1, 99], 2, "outside the vocabulary"), ([1, 2], 0, "order=0"), ([], 2, "at least one token")],
)
def test_bad_input_is_refused(tokens, order, complaint):
    with pytest.raises(ValueError, match=complaint):
        KatzModel(np.array(tokens, np.int64), order=order, vocab_size=9, separator=0)


def test_source_reads_path_and_committed_tokens():
    """A context is the path and, above the root, committed tokens; also near the start."""
    rng = np.random.default_rng(3)
    model = KatzModel(zipf_tokens(rng, 2000, VOCAB), order=4, vocab_size=VOCAB, separator=0)
    source, state = NGramSource(katz=model), make_state()
    a = open_request(state, source, make_request(3, [4, 5, 6, 7]))
    b = open_request(state, source, make_request(8, [9]))
    for request in (a, b):
        first = request.tree.append(np.array([0]), np.array([2]), np.array([-1.0]))
        request.tree.append(first, np.array([3]), np.array([-1.0]))
    got = expand(state, source, {3: [0, 2], 8: [0, 1, 2]}, 6)
    contexts = [[5, 6, 7], [7, 2, 3], [9], [9, 2], [9, 2, 3]]
    expected, scores = model.top([np.array(c) for c in contexts], 6)
    assert (got.tokens == expected).all()
    assert (got.logprobs == scores).all()
    commit(state, [source], 3, [1], 3)
    got = expand(state, source, {3: [0]}, 6)
    assert (got.tokens == model.top([np.array([7, 2, 3])], 6)[0]).all()


def test_sampled_candidates_come_with_their_distribution():
    rng = np.random.default_rng(3)
    model = KatzModel(zipf_tokens(rng, 2000, VOCAB), order=3, vocab_size=VOCAB, separator=0)
    source, state = NGramSource(katz=model, sample=True), make_state()
    open_request(state, source, make_request(3, [4, 5]))
    got = expand(state, source, {3: [0]}, 5)
    assert source.gives_probs
    assert got.probs is not None
    assert (got.probs == model.probs([np.array([4, 5])])).all()
    assert len(set(got.tokens[0].tolist())) == 5
    np.testing.assert_allclose(np.exp(got.logprobs[0]), got.probs[0, got.tokens[0]])
