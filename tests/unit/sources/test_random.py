"""The random source's quality, and the protocol that all sources follow."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.interfaces import TokenSource
from specdec.sources import (
    DraftModelSource,
    KatzModel,
    MixtureSource,
    NGramSource,
    NullSource,
    PromptLookupSource,
    RandomSource,
    SyntheticPair,
    SyntheticSource,
)
from strategies.staged import StagedSource

from .support import VOCAB, expand, make_request, make_runner, make_state, open_request, tiny_model


def true_token(request, path) -> int:
    return int(path.sum() * 7 + len(path)) % VOCAB


def shares(source, num=400, k=4):
    """Share of nodes with the target's token among the candidates, and with any candidate."""
    state = make_state()
    request = open_request(state, source, make_request(1, [3, 4, 5], max_new_tokens=9))
    for i in range(num):
        parent = i // VOCAB
        request.tree.append(np.array([parent]), np.array([i % VOCAB]), np.array([-1.0]))
    got = expand(state, source, {1: list(range(num))}, k)
    hit = 0
    for slot in range(num):
        tokens = got.tokens[slot, : got.counts[slot]].tolist()
        assert len(set(tokens)) == len(tokens)
        hit += true_token(request, request.path_tokens(slot)) in tokens
    return hit / num, (got.counts > 0).mean()


def test_oracle_and_adversary():
    oracle = RandomSource(vocab_size=VOCAB, quality=1.0, target_token=true_token)
    assert shares(oracle) == (1.0, 1.0)
    hostile = RandomSource(vocab_size=VOCAB, quality=0.0, target_token=true_token)
    assert shares(hostile) == (0.0, 1.0)
    assert shares(hostile, k=VOCAB) == (0.0, 1.0)


def test_shares_of_quality_and_silence():
    """400 nodes, 5 standard deviations: false alarm 6e-7."""
    source = RandomSource(
        vocab_size=VOCAB, quality=0.5, silence=0.25, target_token=true_token, seed=4
    )
    hit, spoken = shares(source)
    assert abs(spoken - 0.75) < 5 * np.sqrt(0.75 * 0.25 / 400)
    assert abs(hit - 0.375) < 5 * np.sqrt(0.375 * 0.625 / 400)


def test_null_source_proposes_nothing():
    state, source = make_state(), NullSource()
    open_request(state, source, make_request(1, [3]))
    assert expand(state, source, {1: [0]}, 3).counts.tolist() == [0]


def every_source() -> list[TokenSource]:
    katz = KatzModel.from_tokens(np.arange(VOCAB), order=2, vocab_size=VOCAB, separator=None)
    draft = DraftModelSource(runner=make_runner(tiny_model()))
    return [
        NGramSource(katz=katz),
        PromptLookupSource(),
        draft,
        MixtureSource(sources=[NGramSource(katz=katz), PromptLookupSource()]),
        StagedSource(draft=draft, cheap=NGramSource(katz=katz)),
        SyntheticSource(pair=SyntheticPair(vocab_size=256)),
        RandomSource(vocab_size=VOCAB),
        NullSource(),
    ]


@pytest.mark.parametrize("source", every_source(), ids=lambda s: type(s).__name__)
def test_protocol(source):
    """Shapes and types of answers, k as an upper bound, open and close."""
    assert isinstance(source, TokenSource)
    assert isinstance(source.gives_probs, bool)
    state = make_state()
    for i in (1, 2):
        open_request(state, source, make_request(i, [3, 4, 3]))
    for k in (3, 1):
        candidates = expand(state, source, {2: [0], 1: [0]}, k)
        assert candidates.tokens.shape == candidates.logprobs.shape
        assert candidates.tokens.shape[0] == len(candidates.counts) == 2
        assert (candidates.counts <= k).all()
        assert candidates.tokens.shape[1] <= k
        assert (candidates.tokens[0] == candidates.tokens[1]).all() or type(source) in (
            SyntheticSource,
            RandomSource,
        )
        valid = np.arange(candidates.tokens.shape[1]) < candidates.counts[:, None]
        assert (candidates.logprobs[valid] <= 0).all()
        assert candidates.tokens.dtype == candidates.counts.dtype == np.int64
    source.commit([], None)
    source.close(1)
    source.close(2)
