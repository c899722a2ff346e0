"""A draft in ONNX Runtime: its trees are those of eager passes, and rejection keeps the law.

The law is tested on the first emitted token of thousands of requests with one prompt, by the
library's source, policy, verifier and keyed draws; false-alarm rate of a check: 1e-6. Three faults
that an outsider planted in draws on ONNX Runtime were once missed by ``specdec verify``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec.certify.laws import FALSE_ALARM, chi_square
from specdec.device import on_host
from specdec.policies import BestFirst, Chain
from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources import DraftModelSource
from specdec.types import Answers, Output
from specdec.verifiers import RejectionVerifier

from .support import (
    VOCAB,
    commit,
    make_onnx_runner,
    make_request,
    make_runner,
    make_state,
    open_request,
    random_path,
    tiny_model,
)

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

NUM_REQUESTS = 2000
LIMIT = 48  # positions of the draft: the last trees are smaller
ROUNDING = 1e-5  # sums in another order, in float32
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


def test_the_target_s_law_is_kept() -> None:
    assert min(_p_values()) > FALSE_ALARM


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


def _grown(backend: str, policy: Any, sampling: SamplingParams, **options: Any) -> list[Any]:
    """Trees and counts after every step of two requests whose commits are random."""
    state = make_state()
    runner = make_onnx_runner(max_positions=LIMIT, backend=backend)
    source = DraftModelSource(runner=runner, prefill_chunk=8, **options)
    for i in range(2):
        prompt = np.random.default_rng(i).integers(0, VOCAB, 21)
        open_request(state, source, make_request(i, prompt, sampling=sampling))
    seen: list[Any] = []
    rng = np.random.default_rng(0)
    for _ in range(7):
        policy.select(state, source)
        for request in list(state.requests.values()):
            tree = request.tree
            seen.append([tree.tokens.tolist(), tree.parents.tolist(), tree.expanded.tolist()])
            seen.append([tree.logprobs, [on_host(p) for _, p in sorted(tree.draft_probs.items())]])
            commit(state, [source], request.id, *random_path(tree, rng))
        counters = source.counters
        seen.append([counters.passes, counters.rows, counters.catch_up_rows])
    return seen


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (SamplingParams(), {}),
        (SamplingParams(temperature=0.7, top_k=5, no_repeat_ngram=2), {}),
        (SamplingParams(temperature=0.7), {"guess_draw": True}),
        (SAMPLING, {"sample": True}),
    ],
    ids=["greedy", "history", "target's draws", "own draws"],
)
@pytest.mark.parametrize(
    "policy", [Chain(gamma=5), BestFirst(bs=9, w=3, d=2)], ids=["chain", "tree"]
)
def test_trees_and_counts_are_those_of_eager_passes(
    policy: Any, sampling: SamplingParams, options: dict[str, Any]
) -> None:
    found, expected = (_grown(b, policy, sampling, **options) for b in ("onnx", "eager"))
    for one, other in zip(found, expected, strict=True):
        if isinstance(other[0], np.ndarray):
            for pair in zip([one[0], *one[1]], [other[0], *other[1]], strict=True):
                np.testing.assert_allclose(*pair, atol=ROUNDING)
        else:
            assert one == other


def test_a_chain_ends_at_the_last_position_of_the_model() -> None:
    state, source = make_state(), DraftModelSource(runner=make_onnx_runner(max_positions=LIMIT))
    open_request(state, source, make_request(0, np.arange(LIMIT - 2) % VOCAB))
    Chain(gamma=9).select(state, source)
    assert int(state.requests[0].tree.positions.max()) == LIMIT
