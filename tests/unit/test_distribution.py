"""Losslessness in distribution: the joint law of the next tokens against the target's.

Target and draft are tables of logits given the last token, so the exact law is known. Thousands of
prompts, each with its keyed draws, are decoded together by the library's tree, verifier and
commit. Every check must catch planted bugs, which occurred in other projects.

False-alarm rate: 1e-6 per check. Checks are deterministic in the seed; the rate states the power
of a pass, and that a new key layout should not need another seed.

Shape letters: R requests, V vocabulary, L compared tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from specdec.certify.laws import (
    FALSE_ALARM,
    OPPOSED_TABLE,
    TARGET_TABLE,
    chi_square,
    total_variation,
)
from specdec.clocks import MeasuredClock
from specdec.clocks.meter import Meter
from specdec.sampling.keyed_draws import KeyedDraws, Purpose
from specdec.sampling.transform import SamplingParams, SamplingTransform, sample_candidates
from specdec.state import DecodeState, RequestState, StopRules
from specdec.types import Answers, Candidates, Output
from specdec.verifiers import MatchVerifier, RejectionVerifier, rejection

MAX_POSITIONS, MAX_SIBLINGS = 12, 4

TARGET_LOGITS = torch.tensor(TARGET_TABLE, dtype=torch.float64)
OPPOSED_LOGITS = torch.tensor(OPPOSED_TABLE, dtype=torch.float64)
DRAFTS = {
    "opposed": OPPOSED_LOGITS,
    "overconfident": 2.0 * TARGET_LOGITS,
    "blind": 0.0 * TARGET_LOGITS,
}
VOCAB = len(TARGET_LOGITS)
SAMPLINGS = {
    "plain": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.8, top_k=4, top_p=0.95),
}


class TableDraws(KeyedDraws):
    """The same draws as ``KeyedDraws``, for all requests computed at once."""

    def __init__(
        self, *, seed: int, num_requests: int, shared: bool = False, shared_tests: bool = False
    ) -> None:
        super().__init__(seed=seed)
        self.shared, self.shared_tests = shared, shared_tests
        siblings, positions = np.arange(MAX_SIBLINGS)[:, None], np.arange(MAX_POSITIONS)
        self.table = np.array(
            [
                [super(TableDraws, self).uniform(i, positions, p, siblings) for p in Purpose]
                for i in range(num_requests)
            ]
        )  # [R, purposes, siblings, positions]

    def uniform(self, prompt_id, positions, purpose, index=0):
        if self.shared and purpose is Purpose.ACCEPT:
            purpose = Purpose.DRAFT  # planted bug
        if self.shared_tests and purpose is Purpose.ACCEPT:
            index = np.zeros_like(index)  # planted bug
        return self.table[prompt_id, purpose, index, positions]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Configuration of a run: tree shape, transform, pipeline or whole tree, planted bugs."""

    branching: tuple[int, ...]
    sampling: str = "plain"
    root_only: bool = False  # a level-per-step pipeline answers the root alone
    shared_draws: bool = False
    shared_tests: bool = False
    raw_draft_probs: bool = False
    draft: str = "opposed"
    num_requests: int = 2000
    length: int = 2  # tokens whose joint law is tested


def run(setup: Setup, verifier) -> np.ndarray:
    """int64[R, L]: the first tokens of every request."""
    num_requests = setup.num_requests
    params = SAMPLINGS[setup.sampling]
    transform = SamplingTransform(params)
    draft_logits = DRAFTS[setup.draft]
    target, draft = transform.probs(TARGET_LOGITS), transform.probs(draft_logits)
    kept = SamplingTransform(SAMPLINGS["plain"]).probs(draft_logits)
    stored = kept if setup.raw_draft_probs else draft  # planted bug: not what was sampled from
    draws = TableDraws(
        seed=0,
        num_requests=num_requests,
        shared=setup.shared_draws,
        shared_tests=setup.shared_tests,
    )
    state = DecodeState(draws=draws, clock=MeasuredClock(), meter=Meter())
    stop = StopRules(max_new_tokens=setup.length)
    done = []
    for i in range(num_requests):
        state.requests[i] = RequestState(
            request_id=i, prompt=np.array([0]), stop=stop, sampling=params
        )
    while state.requests:
        live = list(state.requests.values())
        for level, width in enumerate(setup.branching):
            grow(live, level, width, draft, stored, draws)
        answers = answer(live, target, draws, setup.root_only)
        output = Output(step=state.step, answers=answers)
        state.commit(verifier.verify(state, state.receive(output)))
        for request in live:
            if request.finished:
                done.append(state.requests.pop(request.id))
    return np.array([r.output for r in sorted(done, key=lambda r: r.id)])


def grow(live, level, width, draft, stored, draws) -> None:
    """Samples ``width`` children for every node at depth ``level`` that has none yet."""
    slots = [np.flatnonzero((r.tree.depths == level) & ~r.tree.expanded) for r in live]
    tokens = np.concatenate([r.tree.tokens[s] for r, s in zip(live, slots, strict=True)])
    positions = np.concatenate([r.tree.positions[s] for r, s in zip(live, slots, strict=True)])
    ids = np.repeat([r.id for r in live], [len(s) for s in slots])
    uniforms = draws.table[ids, Purpose.DRAFT, :width, positions + 1]
    chosen, logprobs, counts = sample_candidates(draft[tokens], width, uniforms)
    probs = stored[tokens]
    candidates = Candidates(tokens=chosen, logprobs=logprobs, counts=counts, probs=probs)
    start = 0
    for request, here in zip(live, slots, strict=True):
        rows = slice(start, start + len(here))
        start = rows.stop
        if len(here):
            request.tree.set_candidates(here, candidates, rows)
            parents, columns = np.nonzero(np.arange(width) < counts[rows, None])
            request.tree.take(here[parents], columns)


def answer(live, target, draws, root_only) -> tuple[Answers, ...]:
    """The target's distribution and keyed draw after every node (or every root)."""
    cdf = target.cumsum(axis=1)
    answers = []
    for request in live:
        nodes = slice(0, 1) if root_only else slice(None)
        tokens = request.tree.tokens[nodes]
        uniforms = draws.uniform(request.id, request.tree.positions[nodes] + 1, Purpose.TARGET)
        own = (cdf[tokens] <= uniforms[:, None]).sum(axis=1)
        answers.append(
            Answers(
                request=request.id,
                node_ids=request.tree.ids[nodes].copy(),
                tokens=np.minimum(own, VOCAB - 1),
                probs=target[tokens],
            )
        )
    return tuple(answers)


def exact_law(setup: Setup) -> np.ndarray:
    """float64[V ** L]: the joint law of the first tokens after the prompt [0]."""
    target = SamplingTransform(SAMPLINGS[setup.sampling]).probs(TARGET_LOGITS)
    law = target[0]
    for _ in range(setup.length - 1):
        law = law[..., None] * target
    return law.ravel()


def counts_of(setup: Setup, tokens: np.ndarray) -> np.ndarray:
    """int64[V ** L]: number of occurrences of each sequence."""
    cells = tokens @ VOCAB ** np.arange(setup.length)[::-1]
    return np.bincount(cells, minlength=VOCAB**setup.length)


def p_value(setup: Setup, tokens: np.ndarray) -> float:
    """Chi-square of the joint law."""
    return chi_square(counts_of(setup, tokens), exact_law(setup))


def assert_lossless(setup: Setup) -> None:
    tokens = run(setup, RejectionVerifier())
    assert p_value(setup, tokens) > FALSE_ALARM
    distance, bound = total_variation(counts_of(setup, tokens), exact_law(setup))
    assert distance < bound


LOSSLESS = {
    "chain": Setup(branching=(1, 1)),
    "tree 2,2, filtered": Setup(branching=(2, 2), sampling="filtered"),
    "tree 3,1,2": Setup(branching=(3, 1, 2)),
    "pipeline 3,1": Setup(branching=(3, 1), root_only=True),
    "all siblings": Setup(branching=(4,), sampling="filtered"),
    "blind draft": Setup(branching=(3, 1), draft="blind"),
    "overconfident draft": Setup(branching=(3, 1), draft="overconfident"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
def test_rejection_sampling_keeps_the_joint_law(name):
    assert_lossless(LOSSLESS[name])


def test_match_gives_the_law_and_the_tokens_of_plain_sampling():
    """Token by token the draws of plain decoding, for any tree."""
    setup = Setup(branching=(3, 1))
    draws = TableDraws(seed=0, num_requests=setup.num_requests)
    target = SamplingTransform(SAMPLINGS["plain"]).probs(TARGET_LOGITS)
    last, plain = np.zeros(setup.num_requests, np.int64), []
    for position in range(1, setup.length + 1):
        uniforms = draws.table[:, Purpose.TARGET, 0, position]
        last = (target.cumsum(axis=1)[last] <= uniforms[:, None]).sum(axis=1)
        plain.append(last)
    tokens = run(setup, MatchVerifier())
    np.testing.assert_array_equal(tokens, np.stack(plain, axis=1))
    assert p_value(setup, tokens) > FALSE_ALARM


# Planted bugs.

SPOILED = {
    "correction from the target": Setup(branching=(2, 2)),
    "draft probs before processors": Setup(
        branching=(2, 2), sampling="filtered", raw_draft_probs=True
    ),
    "candidate and test share a draw": Setup(branching=(2, 2), shared_draws=True),
    "siblings not renormalised": Setup(branching=(3, 1)),
    "siblings share a test": Setup(branching=(3, 1), draft="overconfident", shared_tests=True),
}


def plant(name: str, monkeypatch) -> None:
    if name.startswith("correction"):
        monkeypatch.setattr(rejection, "_residual", lambda target, draft: target)
    elif name == "siblings not renormalised":
        monkeypatch.setattr(rejection, "_without", lambda draft, token: draft)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPOILED)
def test_planted_bugs_are_caught(name, monkeypatch):
    plant(name, monkeypatch)
    assert p_value(SPOILED[name], run(SPOILED[name], RejectionVerifier())) < FALSE_ALARM
