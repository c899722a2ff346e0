"""Tokens drawn in a graph leave the target's law under rejection sampling.

The first emitted token of thousands of requests with one prompt, by the library's source, policy,
verifier and keyed draws. False-alarm rate of a check: 1e-6.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec.certify.laws import FALSE_ALARM, chi_square
from specdec.models import onnx_choices
from specdec.policies import Chain
from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources import DraftModelSource
from specdec.types import Answers, Output
from specdec.verifiers import RejectionVerifier

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
PROMPT = np.arange(4)  # short enough for one call from the first pass on
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
    assert [*runner.onnx.whole_chains._sessions] == [(onnx_choices.Drawn, 1)]
    assert runner._meter.calls["draft"] == NUM_REQUESTS + 1
    return chi_square(drafted, draft_law), chi_square(emitted, target_probs[0])


def test_the_target_s_law_is_kept() -> None:
    assert min(_p_values()) > FALSE_ALARM


def test_other_probabilities_than_those_drawn_from_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = onnx_choices.Drawn.read

    def sharpened(self: Any, *arguments: Any) -> Any:
        logprobs, probs = original(self, *arguments)
        values = probs.values**3
        values /= values.sum(axis=1, keepdims=True)
        return logprobs, replace(probs, values=values)

    monkeypatch.setattr(onnx_choices.Drawn, "read", sharpened)
    drafted, emitted = _p_values()
    assert drafted > FALSE_ALARM
    assert emitted < FALSE_ALARM
