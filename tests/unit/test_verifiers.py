"""Verifiers on hand-made trees: the walk, its counts, and the rules against slow references."""

import numpy as np
import pytest

from specdec.interfaces import Verifier
from specdec.sampling.transform import SamplingParams
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import Answers, Candidates, CommitKind, Output, Verdict
from specdec.verifiers import MatchVerifier, RejectionVerifier
from strategies.medusa import TypicalVerifier
from strategies.specpipe import RelaxedVerifier, StrictVerifier
from tests.states import new_request, new_state

VOCAB = 4


def a_request(prompt=(1, 2), **sampling) -> tuple[DecodeState, RequestState]:
    request = new_request(0, prompt, 1000, SamplingParams(**sampling))
    return new_state(request), request


def grow(tree: TokenTree, rng: np.random.Generator, num: int) -> None:
    """Adds nodes at random places (siblings differ), so that shallow ones may come late."""
    for _ in range(num):
        parent = int(rng.integers(len(tree)))
        free = np.setdiff1d(np.arange(VOCAB), tree.tokens[tree.children(parent)])
        if len(free):
            tree.append(np.array([parent]), rng.choice(free, 1), np.log(rng.uniform(0.1, 1.0, 1)))


def answered_set(tree: TokenTree, rng: np.random.Generator) -> np.ndarray:
    """The root and a random set of nodes closed under parents."""
    chosen = [0]
    for slot in range(1, len(tree)):
        if tree.parents[slot] in chosen and rng.random() < 0.7:
            chosen.append(slot)
    return np.array(chosen)


def answers_for(tree: TokenTree, slots: np.ndarray, rng: np.random.Generator) -> Answers:
    """Random tokens and distributions, in random order, with rows of pruned nodes among them."""
    order = rng.permutation(len(slots))
    gone = np.array([10**6, int(tree.ids[-1]) + 1])
    node_ids = np.concatenate([tree.ids[slots][order], gone])
    probs = rng.random((len(node_ids), VOCAB)) ** 3
    probs /= probs.sum(axis=1, keepdims=True)
    tokens = (probs.cumsum(axis=1) <= rng.random(len(probs))[:, None]).sum(axis=1)
    return Answers(request=0, node_ids=node_ids, tokens=tokens, probs=probs)


def verdicts_of(verifier: Verifier, state: DecodeState, *answers: Answers) -> list[Verdict]:
    """The verdicts after these answers have arrived, as in the loop."""
    return verifier.verify(state, state.receive(Output(step=state.step, answers=answers)))


def cases(num: int, nodes: int = 14):
    for seed in range(num):
        rng = np.random.default_rng(seed)
        state, request = a_request(temperature=1.0)
        grow(request.tree, rng, nodes)
        slots = answered_set(request.tree, rng)
        answers = answers_for(request.tree, slots, rng)
        yield rng, state, request, slots, answers


def test_match_equals_a_walk_by_hand():
    lengths = set()
    for _, state, request, slots, answers in cases(150):
        tree = request.tree
        token_of = dict(zip(answers.node_ids.tolist(), answers.tokens.tolist(), strict=True))
        here, path = 0, []
        while True:
            wanted = token_of[int(tree.ids[here])]
            children = [c for c in range(len(tree)) if tree.parents[c] == here]
            child = next((c for c in children if tree.tokens[c] == wanted), None)
            if child is None or child not in slots:
                break
            path.append(child)
            here = child
        (verdict,) = verdicts_of(MatchVerifier(), state, answers)
        assert verdict.accepted_ids.tolist() == tree.ids[path].tolist()
        assert verdict.next_token == wanted
        assert verdict.num_verified == len(path) + len(children) - (child is not None)
        assert np.flatnonzero(tree.answered).tolist() == slots.tolist()
        lengths.add(len(path))
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize("verifier", [MatchVerifier(), RelaxedVerifier(), StrictVerifier(),
                                      TypicalVerifier(), TypicalVerifier(epsilon=0.9, delta=2.0)],
                         ids=lambda v: type(v).__name__)  # fmt: skip
def test_a_walk_ends_where_no_answer_is(verifier):
    """The new root still waits for its answer: no verifier stops above an answered node."""
    kinds = set()
    for _, state, request, _, answers in cases(60):
        verdicts = verdicts_of(verifier, state, answers)
        path = request.tree.slots(verdicts[0].accepted_ids)
        assert request.tree.answered[path].all()
        assert request.tree.parents[path].tolist() == [0, *path.tolist()][:-1]
        (commit,) = state.commit(verdicts)
        assert not request.tree.answered.any()
        kinds.add(commit.kind)
    assert kinds == {CommitKind.HIT, CommitKind.MISS}


# Rejection.


def test_a_draft_of_a_larger_vocabulary_is_rejected_beyond_the_targets_row():
    """Vocabularies are padded to different lengths; the first padding token is the likely slip."""
    state, request = a_request(temperature=1.0)
    candidates = Candidates(
        tokens=np.array([[3]]), logprobs=np.log([[0.8]]), counts=np.array([1]),
        probs=np.array([[0, 0, 0.2, 0.8]]),
    )  # fmt: skip
    request.tree.set_candidates(np.array([0]), candidates, slice(0, 1))
    request.tree.take(np.array([0]), np.array([0]))
    probs = np.array([[0.5, 0.3, 0.2]])
    answers = Answers(request=0, node_ids=np.array([0]), tokens=np.array([0]), probs=probs)
    (verdict,) = verdicts_of(RejectionVerifier(), state, answers)
    assert verdict.next_token < 3
    assert len(verdict.accepted_ids) == 0


# Lossy.


def lossy_case(probs, tokens=(0, 1, 2), draft=(0.2, 0.5, 0.3), own_token=3):
    """A root with three children, only the root answered."""
    state, request = a_request(temperature=1.0)
    request.tree.append(np.zeros(3, np.int64), np.array(tokens), np.log(draft))
    answers = Answers(
        request=0, node_ids=np.array([0]), tokens=np.array([own_token]), probs=np.array([probs])
    )
    return state, answers


def test_relaxed_takes_the_child_the_target_likes_best():
    for probs, expected in (
        ([0.1, 0.2, 0.15, 0.55], 1),
        ([0.3, 0.1, 0.1, 0.5], 0),
        ([0.0, 0.0, 0.0, 1.0], 1),  # all alike: the draft decides
    ):
        (verdict,) = verdicts_of(RelaxedVerifier(), *lossy_case(probs))
        assert (verdict.next_token, verdict.num_verified) == (expected, 2)
    state, _ = a_request(temperature=1.0)
    leaf = Answers(
        request=0, node_ids=np.array([0]), tokens=np.array([3]), probs=np.full((1, 4), 0.25)
    )
    assert verdicts_of(RelaxedVerifier(), state, leaf)[0].next_token == 3


def test_strict_takes_the_likeliest_draft_within_the_nucleus():
    for probs, top_p, expected in (
        ([0.4, 0.05, 0.15, 0.4], 0.9, 2),  # 1 lies outside: 0.95 is above it
        ([0.4, 0.05, 0.15, 0.4], 0.8, 0),  # 2 too: 0.8 is above it
        ([0.4, 0.05, 0.15, 0.4], 1.0, 1),
        ([0.1, 0.1, 0.1, 0.7], 0.5, 3),  # none: the target's own token
        ([0.0, 0.0, 0.1, 0.9], 1.0, 2),  # a token without mass is in no nucleus
    ):
        (verdict,) = verdicts_of(StrictVerifier(top_p=top_p), *lossy_case(probs))
        assert verdict.next_token == expected
        assert verdict.num_verified == (3 if expected == 3 else 2)


def test_typical_compares_with_the_entropy_and_takes_the_longest_path():
    for probs, expected in (
        ([0.25, 0.25, 0.25, 0.25], 0),  # threshold 0.3 / 4
        ([0.06, 0.08, 0.05, 0.81], 3),  # below 0.09, and entropy is low
        ([0.01, 0.10, 0.08, 0.81], 1),
    ):
        (verdict,) = verdicts_of(TypicalVerifier(), *lossy_case(probs))
        assert verdict.next_token == expected
    state, request = a_request(temperature=1.0)
    tree = request.tree
    tree.append(np.array([0, 0]), np.array([0, 1]), np.log([0.5, 0.5]))
    tree.append(np.array([1, 1, 2]), np.array([2, 3, 0]), np.log([0.5] * 3))
    tree.append(np.array([3]), np.array([0]), np.log([0.5]))
    likely = np.array([[0.3, 0.6, 0.05, 0.05], *[[0.25] * 4] * 3])
    answers = Answers(request=0, node_ids=np.arange(4), tokens=np.full(4, 1), probs=likely)
    (verdict,) = verdicts_of(TypicalVerifier(), state, answers)
    assert verdict.accepted_ids.tolist() == [1, 3]  # not node 2, which is likelier but ends earlier
    assert verdict.next_token == tree.tokens[6] == 0
