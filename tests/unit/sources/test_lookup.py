"""Prompt lookup against a search by hand; its automaton is in test_suffix.py."""

import numpy as np

from specdec.sources import PromptLookupSource

from .support import commit, expand, make_request, make_state, open_request


def test_continuations_of_the_longest_match_come_first():
    source, state = PromptLookupSource(), make_state()
    prompt = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]  # 1 2 3 was followed by 4, 2 3 by 4 and 5
    request = open_request(state, source, make_request(1, prompt))
    got = expand(state, source, {1: [0]}, 4)
    assert got.tokens[0, : got.counts[0]].tolist()[:2] == [4, 5]
    assert got.counts[0] == 2
    assert np.exp(got.logprobs[0, :2]).sum() < 1
    child = request.tree.take(np.array([0]), np.array([0]))
    got = expand(state, source, {1: child.tolist()}, 4)
    assert got.tokens[0, 0] == 9
    commit(state, [source], 1, child.tolist(), 9)
    got = expand(state, source, {1: [0]}, 4)
    assert got.tokens[0, 0] == 2


def test_short_matches_are_no_matches():
    source, state = PromptLookupSource(min_match=2), make_state()
    request = open_request(state, source, make_request(1, [7, 1, 8, 7]))
    assert expand(state, source, {1: [0]}, 2).counts.tolist() == [0]
    assert not request.tree.expanded[0]


def test_confidence_follows_the_outcomes():
    """In text without any repetition matches of one token mislead, in a loop they do not."""
    source, state = PromptLookupSource(max_match=4), make_state()
    rng = np.random.default_rng(0)
    looping = np.tile([1, 2, 3, 4, 5, 6], 30)
    chaotic = rng.integers(0, 200, 600)
    open_request(state, source, make_request(1, looping))
    open_request(state, source, make_request(2, np.append(chaotic, chaotic[300])))
    got = expand(state, source, {1: [0], 2: [0]}, 1)
    assert np.exp(got.logprobs[0, 0]) > 0.95
    assert got.counts[1] == 0 or np.exp(got.logprobs[1, 0]) < 0.2


def test_matches_are_at_most_max_match_long():
    """After 3 alone came 4 and, more recently, 5: of equally frequent ones the latest leads."""
    source, state = PromptLookupSource(max_match=1), make_state()
    open_request(state, source, make_request(1, [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]))
    assert expand(state, source, {1: [0]}, 2).tokens[0].tolist() == [5, 4]
