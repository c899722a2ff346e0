"""Suffix decoding in the loop: the cache changes the passes and never the output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from specdec.compose.workbench import Workbench
from specdec.pairs import RandomPair
from specdec.policies import BestFirst
from specdec.sampling.transform import SamplingParams
from specdec.sources import PromptLookupSource, SuffixSource
from specdec.verifiers import MatchVerifier
from tests.states import new_request

NUM_TOKENS = 24
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95)]


@dataclass
class Run:
    """What a run of several requests gave.

    Attributes:
        outputs: by request id.
        accepted: draft tokens accepted, by request id.
    """

    outputs: dict[int, tuple[int, ...]]
    accepted: dict[int, int]


@pytest.fixture(scope="module")
def pair() -> RandomPair:
    return RandomPair(num_layers=3, hidden_size=16, num_heads=2, vocab_size=32, seed=7)


def prompts() -> list[tuple[int, np.ndarray]]:
    """Eight prompts of four texts: every second one differs from the one before in its start."""
    rng = np.random.default_rng(3)
    found = []
    for number in range(4):
        text = rng.integers(1, 32, 9)
        found += [(2 * number, text), (2 * number + 1, np.concatenate([[number + 1], text]))]
    return found


def run(pair, source, sampling, *, order=None, batch=1, stages=None) -> Run:
    parts = Workbench(pair, seed=5).parts(
        source=source,
        policy=BestFirst(bs=12, w=12, d="complete", children=3),
        verifier=MatchVerifier(),
        stages=stages,
    )
    wanted = prompts()
    requests = [
        new_request(i, p, NUM_TOKENS, sampling)
        for i, p in (wanted if order is None else [wanted[at] for at in order])
    ]
    for _ in parts.decode(parts.new_state(), requests, batch_size=batch):
        pass
    parts.executor.shutdown()
    return Run(
        {r.id: tuple(r.output) for r in requests}, {r.id: r.counters.accepted for r in requests}
    )


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("batch", "stages"), [(1, None), (3, None), (2, 3)])
def test_the_output_does_not_depend_on_what_is_cached(pair, sampling, batch, stages):
    """Any order of the requests, any batch, and a cache too small for two of them."""
    plain = run(pair, PromptLookupSource(max_match=1), sampling).outputs
    rng = np.random.default_rng(batch)
    for max_tokens in (1000, 50):
        source = SuffixSource(vocab_size=32, max_tokens=max_tokens)
        order = rng.permutation(8)
        assert run(pair, source, sampling, order=order, batch=batch, stages=stages).outputs == plain
        assert source.cache.num_tokens <= max_tokens


def test_finished_requests_are_copied_from(pair):
    """A random model goes on alike after alike prompts often enough for the cache to help."""
    alone = run(pair, PromptLookupSource(), SamplingParams()).accepted
    shared = run(pair, SuffixSource(vocab_size=32), SamplingParams()).accepted
    assert sum(shared.values()) > sum(alone.values())
