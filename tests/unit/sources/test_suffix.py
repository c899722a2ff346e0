"""Suffix decoding: one automaton of many texts, a bounded cache, and where proposals come from."""

from collections import Counter

import numpy as np
import pytest

from specdec.sources import SuffixSource
from specdec.sources.suffix import CachedText, SuffixAutomaton, SuffixCache

from .support import VOCAB, commit, expand, make_request, make_state, open_request


def text(tokens, num_prompt=1):
    return CachedText(np.asarray(tokens, np.int64), num_prompt)


def followers(texts, piece):
    """How often each token follows ``piece``, over all texts, by search."""
    found = Counter()
    for whole in texts:
        for at in range(len(whole) - len(piece)):
            if whole[at : at + len(piece)] == piece:
                found[whole[at + len(piece)]] += 1
    return found


def counted(automaton, piece):
    """The same by the automaton; the extra count of the latest one taken off."""
    state = 0
    for token in piece:
        if not automaton.has(state, token):
            return Counter()
        state = automaton.next[state][token]
    weights = automaton.followers(state)
    return Counter({t: automaton.count[automaton.next[state][t]] for t in weights})


@pytest.mark.parametrize("seed", range(3))
def test_counts_over_many_texts_are_those_of_a_search(seed):
    """Texts come and go; every substring's followers are counted over the texts that are left."""
    rng = np.random.default_rng(seed)
    automaton, texts = SuffixAutomaton(), []
    for _ in range(14):
        if len(texts) > 2 and rng.random() < 0.4:
            automaton.remove(texts.pop(int(rng.integers(len(texts)))))
        tokens = rng.integers(0, 3, int(rng.integers(1, 14))).tolist()
        automaton.begin()
        for token in tokens:
            automaton.append(token)
        texts.append(tokens)
        for _ in range(12):
            source = texts[int(rng.integers(len(texts)))]
            start = int(rng.integers(len(source)))
            piece = source[start : start + int(rng.integers(0, 5))]
            assert counted(automaton, piece) == followers(texts, piece), (texts, piece)
        path = rng.integers(0, 4, 6).tolist()
        state, length = 0, 0
        for at, token in enumerate(path, 1):
            state, length = automaton.advance(state, length, token, 100)
            longest = max(
                n
                for n in range(at + 1)
                for whole in texts
                if any(whole[i : i + n] == path[at - n : at] for i in range(len(whole) - n + 1))
            )
            assert length == longest


def test_the_oldest_requests_are_evicted_and_memory_stays_bounded():
    cache = SuffixCache(max_tokens=40)
    for first in range(60):
        cache.add(text([first % 7, 8, 9, first % 5, 10, 11, 12]))
        assert cache.num_tokens <= 40
        assert cache.automaton.size <= 80
        assert len(cache.automaton.next) <= 2 * 80 + 1  # a text of n tokens has < 2 n states
    assert [t.tokens[0] for t in cache.texts] == [first % 7 for first in range(55, 60)]
    assert counted(cache.automaton, [8, 9]) == Counter(first % 5 for first in range(55, 60))
    cache.add(text(range(50)))
    assert [t.tokens.tolist() for t in cache.texts] == [list(range(10, 50))]
    assert counted(cache.automaton, [8]) == Counter(), "evicted"


def test_a_request_copies_from_finished_ones_only():
    source, state = SuffixSource(vocab_size=VOCAB), make_state()
    open_request(state, source, make_request(1, [1, 2, 3]))
    commit(state, [source], 1, [], 4)
    commit(state, [source], 1, [], 5)
    open_request(state, source, make_request(2, [9, 2, 3]))
    assert expand(state, source, {2: [0]}, 2).counts.tolist() == [0], "request 1 is still open"
    source.close(1)
    got = expand(state, source, {2: [0]}, 2)
    assert got.tokens[0, : got.counts[0]].tolist() == [4]
    child = state.requests[2].tree.take(np.array([0]), np.array([0]))
    got = expand(state, source, {2: child.tolist()}, 2)
    assert got.tokens[0, 0] == 5
    commit(state, [source], 2, child.tolist(), 7)
    source.close(2)
    assert [t.tokens.tolist() for t in source.cache.texts] == [[1, 2, 3, 4, 5], [9, 2, 3, 4, 7]]


def test_both_texts_propose_and_the_surer_one_leads():
    """The request's own text has a match of three tokens, the finished one a match of one."""
    source, state = SuffixSource(vocab_size=VOCAB), make_state()
    open_request(state, source, make_request(1, [20, 3, 7]))
    source.close(1)
    open_request(state, source, make_request(2, [1, 2, 3, 4, 1, 2, 3]))
    got = expand(state, source, {2: [0]}, 4)
    assert got.tokens[0, : got.counts[0]].tolist()[:2] == [4, 7]
    assert np.exp(got.logprobs[0, : got.counts[0]]).sum() < 1


@pytest.mark.parametrize(
    ("factor", "max_depth", "depth"), [(1.0, 32, 3), (2.0, 32, 6), (2.0, 4, 4)]
)
def test_drafts_are_as_long_as_the_match_allows(factor, max_depth, depth):
    """A match of three tokens allows factor x 3 draft tokens, at most max_depth."""
    source, state = SuffixSource(vocab_size=VOCAB, factor=factor, max_depth=max_depth), make_state()
    open_request(state, source, make_request(1, [1, 2, 3, *range(10, 25)]))
    source.close(1)
    request = open_request(state, source, make_request(2, [30, 1, 2, 3]))
    slot, found = 0, 0
    while expand(state, source, {2: [slot]}, 1).counts[0]:
        slot = int(request.tree.take(np.array([slot]), np.array([0]))[0])
        assert request.tree.tokens[slot] == 10 + found
        found += 1
    assert found == depth


def test_the_same_prompt_does_not_copy_its_own_earlier_output():
    """Warm-up and repeated measurements would flatter themselves."""
    prompt = [1, 2, 3]
    for repeats, count in ((False, 0), (True, 1)):
        source, state = SuffixSource(vocab_size=VOCAB, repeats=repeats), make_state()
        open_request(state, source, make_request(1, prompt))
        commit(state, [source], 1, [], 4)
        source.close(1)
        open_request(state, source, make_request(1, prompt))
        assert expand(state, source, {1: [0]}, 1).counts.tolist() == [count]


def test_a_loaded_cache_proposes_as_the_saved_one(tmp_path):
    file = tmp_path / "cache.npz"
    source, state = SuffixSource(vocab_size=VOCAB, save=str(file)), make_state()
    for i, prompt in enumerate([[1, 2, 3], [4, 2, 3], [2, 3]]):
        open_request(state, source, make_request(i, prompt))
        commit(state, [source], i, [], 5 + i)
        assert not file.exists() or i
        source.close(i)
    loaded = SuffixSource(vocab_size=VOCAB, path=str(file))
    assert [t.tokens.tolist() for t in loaded.cache.texts] == [
        t.tokens.tolist() for t in source.cache.texts
    ]
    rows = []
    for each in (source, loaded):
        fresh = make_state()
        open_request(fresh, each, make_request(9, [8, 2, 3]))
        rows.append(expand(fresh, each, {9: [0]}, 4))
    assert rows[0].tokens.tolist() == rows[1].tokens.tolist()
    assert sorted(rows[1].tokens[0, : rows[1].counts[0]].tolist()) == [5, 6, 7]
