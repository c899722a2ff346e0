"""Candidates found in ONNX Runtime equal those found in the logits.

``ModelRunner.top`` searches the logits of a pass where the session has left them;
``DraftModelSource`` uses it where no more than the most probable tokens is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.device import on_host
from specdec.models.runner import ModelRunner
from specdec.policies import BestFirst, Static
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources import DraftModelSource

from .support import (
    VOCAB,
    commit,
    expand,
    make_onnx_runner,
    make_request,
    make_state,
    open_request,
    random_path,
)

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

from specdec.models.onnx_session import Memory
from specdec.models.onnx_tops import OnnxTops

ROUNDING = 1e-5  # of sums of the log-softmax in another order
ROUNDING_OF_LARGE = 3e-5  # the same over 70,001 tokens, where the transform sums in float64


def _runner(*, tops: bool = True) -> ModelRunner:
    runner = make_onnx_runner(max_positions=64)
    assert runner.gives_tops
    runner.gives_tops = tops
    return runner


def _memory(logits: Any) -> Memory:
    return Memory({}, {"logits": logits[None]})


@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.6, 1.0, 3.0])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 32), (5, 4096), (3, 70_001)])
@pytest.mark.parametrize("k", [1, 4, 33])
def test_tops_are_those_of_the_transform(
    num_rows: int, vocab_size: int, k: int, temperature: float
) -> None:
    logits = np.random.default_rng(0).normal(0, 4, (num_rows, vocab_size)).astype(np.float32)
    transform = SamplingTransform(SamplingParams(temperature=temperature, top_k=2, top_p=0.5))
    expected = transform.top(torch.from_numpy(logits), k)
    memory, tops = _memory(logits), OnnxTops()
    rounding = ROUNDING if vocab_size < 10_000 else ROUNDING_OF_LARGE
    for _ in range(2):  # the second time with the arrays of the first
        tokens, logprobs = tops.run(memory, k, temperature or 1.0)
        assert tokens.dtype == np.int64
        assert logprobs.dtype == np.float64
        np.testing.assert_array_equal(tokens, expected[0])
        np.testing.assert_allclose(logprobs, expected[1], atol=rounding)
        assert (logprobs <= 0).all()


@pytest.mark.parametrize("k", [1, 3, 40])
def test_of_equal_logits_the_lower_ids_come_first(k: int) -> None:
    logits = np.zeros((4, 40), np.float32)
    logits[1, 7::7] = 5.0
    logits[2, 20:] = 3.0
    logits[3, ::2] = -np.inf  # as a model may ban tokens
    tokens, logprobs = OnnxTops().run(_memory(logits), k, 1.0)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(tokens, expected)
    assert (logprobs[3, 20:] == -np.inf).all()


def test_results_are_not_overwritten_by_the_next_pass() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    memory, tops = _memory(logits), OnnxTops()
    tokens, logprobs = tops.run(memory, 3, 1.0)
    before = tokens.copy(), logprobs.copy()
    logits[:] = -logits
    later, _ = tops.run(memory, 3, 1.0)
    assert (later != before[0]).any()
    np.testing.assert_array_equal(tokens, before[0])
    np.testing.assert_array_equal(logprobs, before[1])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_an_error(value: float) -> None:
    logits = np.zeros((2, 8), np.float32)
    logits[1, 3] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        OnnxTops().run(_memory(logits), 2, 1.0)


def _grown(
    policy: Any, sampling: SamplingParams, *, tops: bool, num_requests: int = 1, **options: Any
) -> tuple[list[Any], int]:
    """What the trees hold after every step of some requests; calls of ``ModelRunner.top``."""
    state, runner, calls = make_state(), _runner(tops=tops), 0
    original = runner.top

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*arguments)

    vars(runner)["top"] = counted
    source = DraftModelSource(runner=runner, prefill_chunk=8, **options)
    for i in range(num_requests):
        prompt = np.random.default_rng(i).integers(0, VOCAB, 21)
        open_request(state, source, make_request(i, prompt, sampling=sampling))
    seen: list[Any] = []
    rng = np.random.default_rng(0)
    for _ in range(6):
        policy.select(state, source)
        for request in state.requests.values():
            tree, cache = request.tree, source._drafts[request.id].cache
            ints = [tree.ids, tree.tokens, tree.parents, tree.positions, tree.expanded]
            ints += [tree.candidate_tokens, cache.node_ids]
            floats = [tree.logprobs, tree.scores, tree.candidate_logprobs]
            floats += [on_host(tree.draft_probs[i]) for i in sorted(tree.draft_probs)]
            counters = source.counters
            counts = [counters.passes, counters.rows, counters.catch_up_rows]
            calls_of_model = runner._meter.calls["draft"]
            seen.append(([np.copy(a) for a in ints], [np.copy(a) for a in floats]))
            seen.append(([np.array([*counts, calls_of_model])], []))
        for request in list(state.requests.values()):
            commit(state, [source], request.id, *random_path(request.tree, rng))
    return seen, calls


def _assert_equal(found: list[Any], expected: list[Any]) -> None:
    for (ints, floats), (other_ints, other_floats) in zip(found, expected, strict=True):
        for pair in zip(ints, other_ints, strict=True):
            np.testing.assert_array_equal(*pair)
        for pair in zip(floats, other_floats, strict=True):
            np.testing.assert_allclose(*pair, atol=ROUNDING)


POLICIES = {
    "best first": lambda: BestFirst(bs=9, w=3, d=2),
    "best first, complete": lambda: BestFirst(bs=7, w=2, d="complete"),
    "static": lambda: Static(branching=(2, 2, 1)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_are_those_of_logits(policy: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=5, top_p=0.9)
    found, calls = _grown(POLICIES[policy](), sampling, tops=True)
    expected, none = _grown(POLICIES[policy](), sampling, tops=False)
    assert calls > 6
    assert not none
    _assert_equal(found, expected)


FALLBACKS = {
    "history": (SamplingParams(temperature=0.7, no_repeat_ngram=1), {}),
    "greedy with history": (SamplingParams(no_repeat_ngram=1), {}),
    "sampled candidates": (SamplingParams(temperature=0.7), {"sample": True}),
    "sampled candidates, greedy": (SamplingParams(), {"sample": True}),
    "near the target's draw": (SamplingParams(temperature=0.7), {"guess_draw": True}),
    "the target's draw": (
        SamplingParams(temperature=0.7),
        {"guess_draw": True, "guess_spread": None},
    ),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_logits_are_used_where_more_than_tops_is_needed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, options = FALLBACKS[case]
    policy = POLICIES["static"]
    found, calls = _grown(policy(), sampling, tops=True, **options)
    expected, _ = _grown(policy(), sampling, tops=False, **options)
    assert not calls
    _assert_equal(found, expected)
    # The control: the tops are not what these sources propose.
    monkeypatch.setattr(DraftModelSource, "_needs_tops_only", lambda *_: True)
    wrong, calls = _grown(policy(), sampling, tops=True, **options)
    assert calls
    with pytest.raises((AssertionError, ValueError)):
        _assert_equal(wrong, expected)


@pytest.mark.parametrize("options", [{}, {"guess_draw": True}])
def test_greedy_requests_use_tops_whatever_the_draws(options: dict[str, Any]) -> None:
    _, calls = _grown(POLICIES["static"](), SamplingParams(), tops=True, **options)
    assert calls


def test_requests_of_one_pass_get_the_trees_of_logits() -> None:
    """They have a session call each, whose logits are gathered; single ones may use tops."""
    policy, sampling = POLICIES["static"], SamplingParams(temperature=0.7)
    found, _ = _grown(policy(), sampling, tops=True, num_requests=2)
    expected, _ = _grown(policy(), sampling, tops=False, num_requests=2)
    _assert_equal(found, expected)


def test_nodes_computed_as_ancestors_keep_their_logits() -> None:
    """They have no use for the pass that computes them, but for a later expansion."""
    found = []
    for tops in (True, False):
        state, source = make_state(), DraftModelSource(runner=_runner(tops=tops))
        tree = open_request(state, source, make_request(0, np.arange(9))).tree
        first = expand(state, source, {0: [0]}, 2)
        (child,) = tree.take(np.array([0]), np.array([0]))
        (leaf,) = tree.append(np.array([child]), np.array([5]), np.array([-1.0]))
        below = expand(state, source, {0: [int(leaf)]}, 3)
        assert [*source._drafts[0].logits] == [tree.ids[child]]
        again = expand(state, source, {0: [int(child)]}, 3)
        found.append([first, below, again])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=ROUNDING)
        np.testing.assert_array_equal(one.counts, other.counts)


def test_more_candidates_than_tokens_are_all_tokens() -> None:
    state, source = make_state(), DraftModelSource(runner=_runner())
    open_request(state, source, make_request(0, np.arange(9)))
    candidates = expand(state, source, {0: [0]}, VOCAB + 5)
    assert sorted(candidates.tokens[0].tolist()) == [*range(VOCAB)]
    assert candidates.counts.tolist() == [VOCAB]
