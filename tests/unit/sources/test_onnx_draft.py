"""Rejection keeps the target's law with a draft in ONNX Runtime.

The law is tested on the first emitted token of thousands of requests with one prompt, by the
library's source, policy, verifier and keyed draws; false-alarm rate of a check: 1e-6. Three faults
that an outsider planted in draws on ONNX Runtime were once missed by ``specdec verify``.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec.certify.laws import FALSE_ALARM
from specdec.device import on_host
from specdec.policies import Chain
from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources import DraftModelSource
from specdec.types import Answers, Output
from specdec.verifiers import RejectionVerifier
from tests.laws import chi_square

from .support import (
    VOCAB,
    make_onnx_runner,
    make_request,
    make_runner,
    make_state,
    open_request,
    tiny_model,
)

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

NUM_REQUESTS = 2000
LIMIT = 48  # positions of the draft
PROMPT = np.arange(4)
SAMPLING = SamplingParams(temperature=1.2, top_k=12, top_p=0.95)


def _p_values() -> tuple[float, float]:
    """Of the draft's first tokens under its own law, and of the emitted ones under the target's."""
    runner = make_onnx_runner()
    logits = runner.forward([runner.new_cache(8).rows(prefix_tokens=PROMPT)]).logits[-1:]
    transform = SamplingTransform(SAMPLING)
    draft_law = np.asarray(transform.probs(logits))[0]
    target = make_runner(tiny_model(hidden_size=32, seed=1), "target")
    rows = target.new_cache(8).rows(prefix_tokens=PROMPT)
    target_probs = np.asarray(transform.probs(target.forward([rows]).logits[-1:]))
    state, source = make_state(), DraftModelSource(runner=runner, sample=True)
    policy, verifier = Chain(gamma=1), RejectionVerifier()
    drafted, emitted = np.zeros(VOCAB, np.int64), np.zeros(VOCAB, np.int64)
    for i in range(NUM_REQUESTS):
        request = make_request(i, PROMPT, sampling=SAMPLING)
        tree = open_request(state, source, request).tree
        policy.select(state, source)
        drafted[tree.tokens[1]] += 1
        own = state.draws.uniform(i, np.array([len(PROMPT)]), Purpose.TARGET)
        token = np.searchsorted(target_probs[0].cumsum(), own, side="right")
        answers = Answers(request=i, node_ids=tree.ids[:1], tokens=token, probs=target_probs)
        state.receive(Output(step=state.step, answers=(answers,)))
        (verdict,) = verifier.verify(state, [request])
        emitted[verdict.next_token] += 1  # an accepted child has no answer and becomes the root
        source.close(i)
        del state.requests[i]
    assert runner._meter.calls["draft"] == NUM_REQUESTS + 1
    return chi_square(drafted, draft_law), chi_square(emitted, target_probs[0])


@pytest.mark.slow
def test_the_target_s_law_is_kept() -> None:
    assert min(_p_values()) > FALSE_ALARM


@pytest.mark.slow
def test_other_probabilities_than_those_drawn_from_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = DraftModelSource.expand

    def sharpened(*arguments: Any) -> Any:
        candidates = original(*arguments)
        probs = on_host(candidates.probs) ** 3
        return replace(candidates, probs=probs / probs.sum(axis=1, keepdims=True))

    monkeypatch.setattr(DraftModelSource, "expand", sharpened)
    drafted, emitted = _p_values()
    assert drafted > FALSE_ALARM
    assert emitted < FALSE_ALARM


def test_a_chain_ends_at_the_last_position_of_the_model() -> None:
    state, source = make_state(), DraftModelSource(runner=make_onnx_runner(max_positions=LIMIT))
    open_request(state, source, make_request(0, np.arange(LIMIT - 2) % VOCAB))
    Chain(gamma=9).select(state, source)
    assert int(state.requests[0].tree.positions.max()) == LIMIT
