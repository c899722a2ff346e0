"""Mixtures: merged probabilities, origins, exact distributions."""

import numpy as np
import pytest

from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import sample_candidates
from specdec.sources import MixtureSource, NullSource, RandomSource
from specdec.types import Candidates

from .support import VOCAB, expand, make_request, make_state, open_request


class Fixed(TokenSource):
    """Proposes given rows for every node; records the number of nodes per call."""

    def __init__(self, *rows, vocab_size=None):
        self.asked = []
        self.counters = SourceCounters(passes=1, rows=2, by_level={"fixed": 1})
        self.vocab_size = vocab_size
        self.rows = rows

    def expand(self, state, nodes, k):
        self.asked.append(len(nodes))
        answer = Candidates.empty(len(nodes), max(map(len, self.rows)) or 1)
        for at, row in enumerate(self.rows[: len(nodes)]):
            for column, (token, prob) in enumerate(row):
                answer.tokens[at, column] = token
                answer.logprobs[at, column] = np.log(prob)
            answer.counts[at] = len(row)
        return answer


def ask(source, k, num_nodes=1):
    state = make_state()
    request = open_request(state, source, make_request(1, [3, 4, 3]))
    for token in range(num_nodes - 1):
        request.tree.append(np.array([0]), np.array([token]), np.array([-1.0]))
    return expand(state, source, {1: list(range(num_nodes))}, k)


def test_equal_tokens_add_up_and_origins_name_the_largest_share():
    a = Fixed([(5, 0.6), (6, 0.3)], [(1, 0.5)])
    b = Fixed([(6, 0.5), (7, 0.2), (5, 0.1)], [])
    got = ask(MixtureSource(sources=[a, b], weights=[1.0, 3.0]), 3, num_nodes=2)
    assert got.tokens[0].tolist() == [6, 5, 7]
    expected = [0.25 * 0.3 + 0.75 * 0.5, 0.25 * 0.6 + 0.75 * 0.1, 0.75 * 0.2]
    np.testing.assert_allclose(np.exp(got.logprobs[0]), expected)
    assert got.origins is not None
    assert got.origins[0].tolist() == [1, 0, 1]
    # Only the first source answers for the second node: its weight is 1 there.
    assert got.counts.tolist() == [3, 1]
    assert got.tokens[1, 0] == 1
    assert np.exp(got.logprobs[1, 0]) == pytest.approx(0.5)


def test_later_sources_are_called_only_where_earlier_ones_are_not_confident():
    sure = Fixed([(5, 0.9)], [(5, 0.7)], [])
    last = Fixed([(6, 0.8)], [(6, 0.8)])
    got = ask(MixtureSource(sources=[sure, last], confident=0.8), 3, num_nodes=3)
    assert last.asked == [2]
    assert got.tokens[0, 0] == 5
    assert np.exp(got.logprobs[0, 0]) == pytest.approx(0.9)  # alone, so its weight is 1
    assert got.counts.tolist() == [1, 2, 1]
    assert got.tokens[1, :2].tolist() == [6, 5]
    np.testing.assert_allclose(np.exp(got.logprobs[1, :2]), [0.4, 0.35])
    assert (got.tokens[2, 0], np.exp(got.logprobs[2, 0])) == (6, pytest.approx(0.8))
    assert got.origins is not None
    assert got.origins[:, 0].tolist() == [0, 1, 1]
    everything_sure = Fixed([(5, 0.9)])
    never = Fixed([(6, 0.8)])
    ask(MixtureSource(sources=[everything_sure, never], confident=0.9), 3)
    assert never.asked == []


def test_token_zero_is_not_confused_with_padding():
    a, b = Fixed([(0, 0.2)], [(4, 0.1)]), Fixed([(8, 0.3), (0, 0.1)], [])
    got = ask(MixtureSource(sources=[a, b]), 4, num_nodes=2)
    assert got.counts.tolist() == [2, 1]
    assert sorted(got.tokens[0, :2].tolist()) == [0, 8]
    assert got.tokens[1, 0] == 4


def test_mixture_of_distributions_is_exact():
    one = RandomSource(vocab_size=VOCAB, sample=True, seed=1)
    two = RandomSource(vocab_size=VOCAB, sample=True, seed=2)
    source = MixtureSource(sources=[one, two], weights=[1.0, 2.0], sample=True)
    state = make_state(seed=9)
    open_request(state, source, make_request(1, [3, 4, 3]))
    got = expand(state, source, {1: [0]}, 4)
    silent = MixtureSource(sources=[NullSource(), one, two], weights=[9.0, 1.0, 2.0], sample=True)
    behind = expand(state, silent, {1: [0]}, 4)
    assert behind.tokens.tolist() == got.tokens.tolist()
    assert (behind.origins == got.origins + 1).all(), "a source is named by its place among all"
    parts = [expand(state, s, {1: [0]}, 4).probs[0] for s in (one, two)]
    probs = parts[0] / 3 + 2 * parts[1] / 3
    assert got.probs is not None
    np.testing.assert_allclose(got.probs[0], probs, atol=1e-15)
    draws = [state.draws.uniform(1, np.array([3]), Purpose.DRAFT, j) for j in range(4)]
    tokens, _, _ = sample_candidates(got.probs, 4, np.stack(draws, axis=1))
    assert (got.tokens == tokens).all()
    assert got.origins is not None
    larger = (parts[0] / 3 < 2 * parts[1] / 3)[got.tokens[0]]
    assert (got.origins[0] == larger).all()


def test_counts_that_a_source_adds_in_commit_are_included():
    """An exit head's passes are known when they come back, after the step's last expand."""
    late = Fixed([(5, 0.6)])
    late.commit = lambda commits, output: setattr(late.counters, "passes", 7)
    source = MixtureSource(sources=[late, NullSource()])
    ask(source, 2)
    source.commit([], None)
    assert source.counters.passes == 7
