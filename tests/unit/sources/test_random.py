import numpy as np

from specdec.sources import RandomSource

from .support import VOCAB, expand, make_request, make_state, open_request


def test_share_of_silence() -> None:
    """400 nodes, 5 standard deviations: false alarm 6e-7."""
    num, source = 400, RandomSource(vocab_size=VOCAB, silence=0.25, seed=4)
    state = make_state()
    request = open_request(state, source, make_request(1, [3, 4, 5], max_new_tokens=9))
    for i in range(num):
        request.tree.append(np.array([i // VOCAB]), np.array([i % VOCAB]), np.array([-1.0]))
    got = expand(state, source, {1: list(range(num))}, 4)
    for tokens, count in zip(got.tokens.tolist(), got.counts.tolist(), strict=True):
        assert len(set(tokens[:count])) == count
    assert abs((got.counts > 0).mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / num)
