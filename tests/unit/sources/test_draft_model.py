"""The draft model source against fresh forwards, and its accounting."""

import numpy as np
import torch

from specdec.clocks import CONTROLLER, LatencyProfile, SimulatedClock
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources import DraftModelSource

from .support import (
    VOCAB,
    expand,
    make_request,
    make_runner,
    make_state,
    open_request,
    tiny_model,
)

MODEL = tiny_model()
TEMPERATE = SamplingParams(temperature=0.7, top_k=10, top_p=0.9)


def fresh_logits(request, slot, model=MODEL):
    """[1, V]: one plain forward over the whole sequence up to the node."""
    tokens = torch.from_numpy(request.path_tokens(slot))[None]
    with torch.inference_mode():
        return model(tokens).logits[0, -1:]


def test_a_long_prompt_catches_up_in_chunks():
    runner = make_runner(MODEL)
    state = make_state()
    state.clock = SimulatedClock(LatencyProfile(name="free"))
    charged = []
    state.clock.charge = lambda rank, kind, num: charged.append((rank, str(kind), num))
    source = DraftModelSource(runner=runner, prefill_chunk=10)
    request = open_request(state, source, make_request(1, np.arange(36) % VOCAB))
    candidates = expand(state, source, {1: [0]}, 3)
    assert charged == [(CONTROLLER, "draft", n) for n in (10, 10, 10, 6)]  # 35 committed + root
    assert (source.counters.passes, source.counters.rows) == (4, 36)
    assert source.counters.catch_up_rows == 35
    assert source.counters.by_level == {"draft": 4}
    tokens, logprobs = SamplingTransform(request.sampling).top(fresh_logits(request, 0), 3)
    assert (candidates.tokens == tokens).all()
    np.testing.assert_allclose(candidates.logprobs, logprobs, atol=1e-10)


def test_nodes_beyond_the_models_positions_get_count_zero():
    model = tiny_model(max_positions=8)
    source, state = DraftModelSource(runner=make_runner(model), sample=True), make_state()
    request = open_request(state, source, make_request(1, np.arange(7)))
    other = open_request(state, source, make_request(2, [1, 2]))
    last = request.tree.append(np.array([0]), np.array([1]), np.array([-1.0]))
    request.tree.append(last, np.array([2]), np.array([-1.0]))
    candidates = expand(state, source, {1: [0, 1, 2], 2: [0]}, 3)
    assert candidates.counts.tolist() == [3, 3, 0, 3]
    assert not request.tree.expanded[2]
    assert candidates.probs is not None
    expected = torch.softmax(fresh_logits(other, 0, model), -1).numpy()
    np.testing.assert_allclose(candidates.probs[3], expected[0], atol=1e-12)
