"""A staged source builds the draft's own trees, in fewer passes."""

import numpy as np
import pytest
import torch

from specdec.policies import BestFirst, Chain, Static
from specdec.sampling.transform import SamplingParams
from specdec.sources import (
    DraftModelSource,
    KatzModel,
    NGramSource,
    NullSource,
    PromptLookupSource,
    RandomSource,
)
from specdec.testing.contracts import random_path
from strategies.staged import StagedSource

from .support import (
    VOCAB,
    commit,
    make_request,
    make_runner,
    make_state,
    open_request,
    tiny_model,
)

MODEL = tiny_model()
MIDDLE = tiny_model(seed=0)  # the same weights: a cheap source that guesses right


def katz_of_draft() -> KatzModel:
    """A trigram model of the draft's own greedy text."""
    with torch.inference_mode():
        starts = torch.arange(VOCAB)[:, None]
        tokens = MODEL.generate(starts, max_new_tokens=40, do_sample=False, pad_token_id=0)
    return KatzModel(tokens.numpy().ravel(), order=3, vocab_size=VOCAB, separator=None)


KATZ = katz_of_draft()


def make_draft(*, sample: bool = False, name: str = "draft", model=MODEL) -> DraftModelSource:
    return DraftModelSource(runner=make_runner(model, name), sample=sample)


def cheap_sources(sample: bool = False) -> dict:
    return {
        "ngram": lambda: NGramSource(katz=KATZ, sample=sample),
        "lookup": lambda: PromptLookupSource(),
        "random": lambda: RandomSource(vocab_size=VOCAB, silence=0.3),
        "nothing": NullSource,
        "model": lambda: make_draft(name="middle", model=MIDDLE),
        "staged": lambda: StagedSource(
            draft=make_draft(name="middle", model=MIDDLE), cheap=NGramSource(katz=KATZ)
        ),
    }


POLICIES = {
    "chain": lambda: Chain(gamma=6),
    "static": lambda: Static(branching=(1, 1, 3, 1, 1)),
    "best_first": lambda: BestFirst(bs=6, w=3, d=3),
}


def drive(source, policy, *, sampling, rounds=6, seed=0, num_requests=2):
    """Rounds of select and commit; the trees before each commit, and the state."""
    rng = np.random.default_rng(seed)
    state = make_state(seed=1)
    trees = []
    for i in range(num_requests):
        prompt = rng.integers(0, VOCAB, 5 + i)
        open_request(state, source, make_request(i, prompt, sampling=sampling))
    for _ in range(rounds):
        nodes = policy.select(state, source)
        state.mark_submitted(nodes)
        for request in state.requests.values():
            tree = request.tree
            trees.append([a.copy() for a in (tree.tokens, tree.parents, tree.positions)])
            trees[-1].append(tree.logprobs.copy())
            tree.answered[tree.submitted_at >= 0] = True
            path, token = random_path(tree, rng, VOCAB)
            last = path[-1] if path else 0
            while (child := tree.child(last, token)) >= 0 and tree.answered[child]:
                token = (token + 1) % VOCAB  # a verifier never stops above an answered node
            commit(state, [source], request.id, path, token)
    return trees, state


def assert_same_trees(trees, expected):
    assert len(trees) == len(expected)
    for tree, other in zip(trees, expected, strict=True):
        for array, wanted in zip(tree[:3], other[:3], strict=True):
            assert (array == wanted).all()
        np.testing.assert_allclose(tree[3], other[3], atol=1e-10)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cheap", cheap_sources())
def test_trees_are_those_of_the_draft_alone(policy, cheap):
    """Whatever the cheaper source says; float64, so tokens are equal and scores to rounding."""
    sampling = SamplingParams(temperature=0.8)
    draft = make_draft()
    expected, _ = drive(draft, POLICIES[policy](), sampling=sampling)
    inner = make_draft()
    staged = StagedSource(draft=inner, cheap=cheap_sources()[cheap]())
    trees, _ = drive(staged, POLICIES[policy](), sampling=sampling)
    assert_same_trees(trees, expected)
    assert inner.counters.passes <= draft.counters.passes
    if cheap in ("model", "staged") and policy == "chain":
        assert inner.counters.passes <= 0.7 * draft.counters.passes


@pytest.mark.parametrize("policy", ["chain", "static"])
def test_sampled_trees_are_those_of_the_draft_alone(policy):
    """Under rejection: same keyed draws, same distributions; the guesses share the draws."""
    sampling = SamplingParams(temperature=0.8)
    expected, state = drive(make_draft(sample=True), POLICIES[policy](), sampling=sampling)
    staged = StagedSource(draft=make_draft(sample=True), cheap=NGramSource(katz=KATZ, sample=True))
    assert staged.gives_probs
    trees, other = drive(staged, POLICIES[policy](), sampling=sampling)
    assert_same_trees(trees, expected)
    for request_id, request in state.requests.items():
        probs = request.tree.draft_probs
        for node_id, row in other.requests[request_id].tree.draft_probs.items():
            np.testing.assert_allclose(row, probs[node_id], atol=1e-12)
