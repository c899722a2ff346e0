"""Chains drafted at once (``TokenSource.chains``) leave the trees that single passes leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.device import on_host
from specdec.policies import Chain
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource

from .support import (
    VOCAB,
    commit,
    make_request,
    make_runner,
    make_state,
    open_request,
    random_path,
    tiny_model,
)

LIMIT = 40  # positions of the draft model: the last chains are shorter
MODEL = tiny_model(max_positions=LIMIT)
NAMES = (
    "ids",
    "tokens",
    "parents",
    "positions",
    "submitted_at",
    "origins",
    "answers",
    "logprobs",
    "scores",
    "expanded",
    "candidate_logprobs",
)


class _PassByPass:
    """The source without ``chains``."""

    def __init__(self, source: DraftModelSource) -> None:
        self.expand = source.expand


def _grown(
    at_once: bool, sampling: SamplingParams, steps: int, **options: Any
) -> tuple[list[object], int, int]:
    """Trees after every step of two requests, passes and rows."""
    state = make_state()
    source = DraftModelSource(runner=make_runner(MODEL), **options)
    lengths = (21, 27)
    for i, length in enumerate(lengths):
        prompt = np.random.default_rng(i).integers(0, VOCAB, length)
        open_request(state, source, make_request(i, prompt, sampling=sampling))
    seen: list[object] = []
    policy, rng = Chain(gamma=5), np.random.default_rng(0)
    for _ in range(steps):
        policy.select(state, source if at_once else _PassByPass(source))
        for i, request in state.requests.items():
            tree = request.tree
            seen.append([getattr(tree, name).tolist() for name in NAMES])
            expanded = tree.ids[tree.expanded].tolist()  # others may have a row, which is not used
            drafted = {i: on_host(tree.draft_probs[i]) for i in expanded if i in tree.draft_probs}
            seen.append({i: probs.tolist() for i, probs in drafted.items()})
            path, token = random_path(tree, rng)
            seen.append(commit(state, [source], i, path, token))
    return seen, source.counters.passes, source.counters.rows


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.7)], ids=["greedy", "sampled"]
)
def test_trees_passes_and_rows_are_equal(sampling: SamplingParams) -> None:
    assert repr(_grown(True, sampling, 6)) == repr(_grown(False, sampling, 6))


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0.9, top_k=7)],
    ids=["greedy", "sampled", "filtered"],
)
@pytest.mark.parametrize("spread", [None, 0.2])
def test_they_are_equal_with_the_targets_draws(
    sampling: SamplingParams, spread: float | None
) -> None:
    options = {"guess_draw": True, "guess_spread": spread}
    assert repr(_grown(True, sampling, 6, **options)) == repr(_grown(False, sampling, 6, **options))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.9, top_k=7),
        SamplingParams(temperature=0.6, top_k=9, top_p=0.9),
        SamplingParams(temperature=1.2, top_p=0.8),
    ],
    ids=["greedy", "sampled", "top_k", "both", "top_p"],
)
def test_they_are_equal_when_sampled(sampling: SamplingParams) -> None:
    """Tokens, and the distributions that they were sampled from, which rejection compares."""
    grown = [_grown(at_once, sampling, 6, sample=True) for at_once in (True, False)]
    assert repr(grown[0]) == repr(grown[1])
    distributions = [
        probs for tree in grown[0][0] if isinstance(tree, dict) for probs in tree.values()
    ]
    assert len(distributions) > 40
    assert np.allclose(np.sum(distributions, axis=1), 1.0)


def test_histories_need_single_passes() -> None:
    sampling = SamplingParams(no_repeat_ngram=2)
    assert repr(_grown(True, sampling, 4)) == repr(_grown(False, sampling, 4))


def test_a_chain_ends_at_the_last_position_of_the_model() -> None:
    state = make_state()
    source = DraftModelSource(runner=make_runner(MODEL))
    open_request(state, source, make_request(0, np.arange(LIMIT - 2) % VOCAB))
    Chain(gamma=9).select(state, source)
    assert int(state.requests[0].tree.positions.max()) == LIMIT
