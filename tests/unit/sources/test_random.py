from __future__ import annotations

import numpy as np

from specdec.sources import RandomSource

from .support import VOCAB, expand, make_request, make_state, open_request


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
