"""``DecodeState.commit``: the one place that emits tokens, cuts them and moves roots."""

from copy import copy

import numpy as np
import pytest
import torch

from specdec.state import TARGET_ORIGIN, DecodeState, RequestState, StopRules
from specdec.types import (
    Answers,
    Candidates,
    CommitKind,
    EarlyHidden,
    HiddenName,
    Nodes,
    Output,
    Verdict,
)
from specdec.verifiers import MatchVerifier
from tests.states import new_request, new_state

PIECES = {10: "a", 11: "b", 12: "ST", 13: "OP", 14: "x", 15: "END", 16: "S", 17: "TOP!"}


def decode(tokens) -> str:
    return "".join(PIECES.get(int(token), "?") for token in tokens)


def one_request(stop: StopRules) -> tuple[DecodeState, RequestState]:
    state = new_state()
    state.requests[7] = request = new_request(7, stop=stop)
    return state, request


def commit_path(state: DecodeState, request: RequestState, tokens: list[int], *, hit=False):
    """Accepts all ``tokens`` but the last as a path of the tree, and emits the last after it."""
    slot, ids = 0, []
    for depth, token in enumerate(tokens if hit else tokens[:-1]):
        slot = int(
            request.tree.append(
                np.array([slot]), np.array([token]), np.zeros(1), origins=np.array([depth % 2])
            )[0]
        )
        ids.append(int(request.tree.ids[slot]))
    accepted = np.array(ids[: len(tokens) - 1], np.int64)
    answered = np.concatenate([[request.tree.root_id], accepted])
    answers = Answers(request=7, node_ids=answered, tokens=np.array(tokens))
    assert state.receive(Output(step=state.step, answers=(answers,))) == [request]
    verdict = Verdict(request=7, accepted_ids=accepted, next_token=tokens[-1])
    (commit,) = state.commit([verdict])
    return commit


def token_by_token(stop: StopRules, tokens: list[int]) -> tuple[list[int], str | None]:
    """The output if every token came alone."""
    output: list[int] = []
    for token in tokens:
        output.append(token)
        if (reason := stop.reason(output)) is not None:
            return output, reason
    return output, None


STOPS = {
    "eos inside": (StopRules(max_new_tokens=9, eos_ids=frozenset({12})), "eos"),
    "eos as the next token": (StopRules(max_new_tokens=9, eos_ids=frozenset({15})), "eos"),
    "limit inside": (StopRules(max_new_tokens=2), "length"),
    "limit at the end": (StopRules(max_new_tokens=6), "length"),
    "stop string over two tokens": (
        StopRules(max_new_tokens=9, stop_strings=("STOP",), decode=decode),
        "stop_string",
    ),
    "stop string within a token": (
        StopRules(max_new_tokens=9, stop_strings=("ND",), decode=decode),
        "stop_string",
    ),
    "eos on the limit": (StopRules(max_new_tokens=3, eos_ids=frozenset({12})), "eos"),
    "none": (StopRules(max_new_tokens=9, eos_ids=frozenset({99})), None),
}
PATH = [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("hit", [False, True])
def test_a_path_ends_where_token_by_token_decoding_would(name, hit):
    """However steps divide it: a stop string may begin in one step and end in the next."""
    stop, reason = STOPS[name]
    expected = token_by_token(stop, PATH)
    assert expected[1] == reason
    for split in range(len(PATH)):
        state, request = one_request(stop)
        for part in (PATH[:split], PATH[split:]):
            if part and not request.finished:
                commit = commit_path(state, request, part, hit=hit)
        assert (request.output, request.finish_reason) == expected
        assert commit.finished == request.finished == (reason is not None)
        assert request.tokens.tolist() == [1, 2, 3, *expected[0]]
        assert len(request.output_origins) == len(request.emitted_s) == len(expected[0])
        if not split:
            assert request.counters.cut_tokens == len(PATH) - len(expected[0])


def test_a_stop_string_in_the_prompt_does_not_end_the_request():
    stop = StopRules(max_new_tokens=9, stop_strings=("STOP",), decode=decode)
    request = new_request(7, (12, 13, 12), stop=stop)
    request.emit(13, 0, 0.0)  # completes it only together with the prompt's last token
    assert not request.finished
    request.emit(16, 0, 0.0)
    request.emit(17, 0, 0.0)
    assert request.finish_reason == "stop_string"


@pytest.mark.parametrize("hit", [False, True])
def test_a_commit_lists_retired_and_kept_nodes(hit):
    state, request = one_request(StopRules(max_new_tokens=9))
    state.step = 4
    commit = commit_path(state, request, [10, 11, 12], hit=hit)
    assert commit.retired_tokens.tolist() == [3, 10, 11]
    assert commit.retired_ids.tolist() == [0, 1, 2]
    assert (commit.next_token, commit.step, state.step) == (12, 4, 5)
    assert commit.kind is (CommitKind.HIT if hit else CommitKind.MISS)
    assert commit.root_id == request.tree.root_id == 3
    assert commit.prefix_len == request.prefix_len == 5
    assert commit.kept_ids.tolist() == [3]
    assert commit.keeps(np.array([1, 3, 4])).tolist() == [False, True, False]
    assert request.output_origins == [0, 1, 0 if hit else TARGET_ORIGIN]
    counters = request.counters
    assert (counters.accepted, counters.hits, counters.misses) == (2, hit, not hit)
    assert counters.path_lengths == {3: 1}


def test_idle_steps_are_counted_by_cause():
    state, request = one_request(StopRules(max_new_tokens=9))
    request.prefill_sent = request.num_prefill
    state.commit([])
    assert request.counters.fill_steps == 0  # nothing was submitted
    state.mark_submitted(Nodes(((7, np.array([0])),)))
    state.commit([])
    assert request.counters.fill_steps == 1
    commit_path(state, request, [10])
    state.mark_submitted(Nodes(((7, request.tree.ids.copy()),)))
    state.commit([])
    assert (request.counters.flush_steps, request.counters.refill_steps) == (1, 0)
    commit_path(state, request, [11], hit=True)
    state.mark_submitted(Nodes(((7, request.tree.ids.copy()),)))
    state.commit([])
    assert (request.counters.flush_steps, request.counters.refill_steps) == (1, 1)
    state.requests[8] = new_request(8)  # it waits; the other one is answered, but for a node
    chain_of(request, 99)
    state.mark_submitted(Nodes(((7, request.tree.ids.copy()),)))
    commit_path(state, request, [12])
    assert (request.counters.flush_steps, request.counters.refill_steps) == (1, 1)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt 7 has no tokens"):
        new_request(7, ())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 4, "stop_strings": ("a", ""), "decode": str}, "empty string"),
        ({"max_new_tokens": 4, "stop_strings": ("a",)}, "requires decode"),
    ],
)
def test_invalid_stop_rules_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        StopRules(**rules)


def test_a_cancelled_request_keeps_its_first_reason():
    _, request = one_request(StopRules(max_new_tokens=1))
    request.emit(10, 0, 0.0)
    request.cancel()
    assert request.finish_reason == "length"
    _, other = one_request(StopRules(max_new_tokens=1))
    other.cancel()
    assert other.finish_reason == "cancelled"


NAME = HiddenName(2)

# Answers in any order.


def say(state: DecodeState, request: RequestState, *slots_and_tokens: tuple[int, int]):
    """Answers of some slots arrive; the requests that may be verified."""
    slots, tokens = np.array(slots_and_tokens).reshape(-1, 2).T
    node_ids = request.tree.ids[slots].copy()
    answers = Answers(request=request.id, node_ids=node_ids, tokens=tokens)
    return state.receive(Output(step=state.step, answers=(answers,)))


def chain_of(request: RequestState, *tokens: int) -> None:
    """A chain below the root: slot i + 1 carries token i."""
    for slot, token in enumerate(tokens):
        request.tree.append(np.array([slot]), np.array([token]), np.zeros(1))


@pytest.mark.parametrize("whole", [True, False], ids=["walks", "one token per step"])
def test_any_order_of_answers_emits_the_targets_own_tokens(whole):
    """Random trees, random arrivals, pruned nodes among them; against the target alone."""
    kinds, out_of_order = set(), 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        state, request = one_request(StopRules(max_new_tokens=30))

        def target(context) -> int:
            return int(sum(context[-2:]) % 3)

        pending: list[tuple[int, int]] = []  # node id, its answer
        while not request.finished:
            tree = request.tree
            for _ in range(4):
                slot = int(rng.integers(len(tree)))
                free = np.setdiff1d(np.arange(3), tree.tokens[tree.children(slot)])
                if len(free):
                    tree.append(np.array([slot]), rng.choice(free, 1), np.zeros(1))
            for slot in np.flatnonzero(tree.submitted_at < 0).tolist():
                pending.append((int(tree.ids[slot]), target(request.path_tokens(slot).tolist())))
            tree.submitted_at[:] = state.step
            rng.shuffle(pending)
            num = int(rng.integers(0, len(pending) + 1))
            arrived, pending = pending[:num], pending[num:]
            out_of_order += bool(arrived) and not tree.answered[0]
            outputs = tuple(
                Answers(request=7, node_ids=np.array([i]), tokens=np.array([token]))
                for i, token in arrived
            )
            requests = state.receive(Output(step=state.step, answers=outputs))
            verdicts = MatchVerifier().verify(state, requests)
            if not whole:
                none = np.zeros(0, np.int64)
                verdicts = [
                    Verdict(request=7, accepted_ids=none, next_token=int(r.tree.answers[0]))
                    for r in requests
                ]
            num_nodes = len(tree)
            for commit in state.commit(verdicts):
                kinds.add(commit.kind)
                assert commit.num_examined == num_nodes - len(commit.retired_ids)
        context = [1, 2, 3]
        for _ in range(30):
            context.append(target(context))
        assert request.output == context[3:]
    assert kinds == {CommitKind.HIT, CommitKind.MISS}
    assert out_of_order > 100


def test_a_commit_carries_the_hidden_states_of_retired_nodes():
    """Whether they came with the answers or before; ``early`` ones that all of them have."""
    state, request = one_request(StopRules(max_new_tokens=99))
    chain_of(request, 10, 11)
    other = HiddenName(5, normed=True)
    early = EarlyHidden(
        request=7, node_ids=np.array([1, 0]), hidden={NAME: torch.tensor([[1.0], [0.0]])}
    )
    assert state.receive(Output(step=0, early=(early,))) == []
    answers = Answers(
        request=7,
        node_ids=np.array([0, 1, 2]),
        tokens=np.array([10, 99, 98]),
        hidden={other: torch.tensor([[5.0], [6.0], [7.0]])},
    )
    requests = state.receive(Output(step=0, answers=(answers,)))
    (commit,) = state.commit(MatchVerifier().verify(state, requests))
    assert commit.retired_ids.tolist() == [0, 1]
    assert {name: rows.tolist() for name, rows in commit.hidden.items()} == {
        NAME: [[0.0], [1.0]],
        other: [[5.0], [6.0]],
    }
    assert not request.tree.hidden, "a miss: nothing of the old tree remains"


# Passes beside the loop.


def test_candidates_that_are_children_by_now_are_taken():
    """A free pass may propose what another source has proposed meanwhile: siblings differ."""
    state, request = one_request(StopRules(max_new_tokens=99))
    chain_of(request, 10)
    candidates = Candidates(
        tokens=np.array([[4, 10]]), logprobs=np.full((1, 2), -1.0), counts=np.array([2])
    )
    state.set_candidates(Nodes(((7, np.array([0])),)), candidates)
    assert request.tree.candidate_logprobs[0].tolist() == [-1.0, -np.inf]


def test_a_copy_keeps_the_present_trees_of_its_requests():
    state, request = one_request(StopRules(max_new_tokens=99))
    state.requests[8] = copy(request)
    state.step, state.turn = 5, frozenset([7])
    chain_of(request, 10)
    seen = state.copy(Nodes(((7, np.array([0])),)))
    assert list(seen.requests) == [7]
    assert (seen.step, seen.turn, seen.draws, seen.clock) == (5, {7}, state.draws, state.clock)
    say(state, request, (0, 10))
    state.commit(MatchVerifier().verify(state, [request]))
    request.tree.append(np.array([0]), np.array([11]), np.zeros(1))
    then = seen.requests[7]
    assert then.tree.tokens.tolist() == [3, 10]
    assert not then.tree.answered.any()
    assert then.tokens.tolist() == [1, 2, 3]
    assert then.path_tokens(1).tolist() == [1, 2, 3, 10]
    then.tree.append(np.array([0]), np.array([12]), np.zeros(1))
    assert request.tree.tokens.tolist() == [10, 11]


def test_a_stop_string_is_found_across_tokens_without_text():
    """Regression: the text was looked for in a fixed number of last tokens or characters."""

    def text(tokens):
        return "".join({1: "ST", 2: "OP" + 40 * "."}.get(token, "") for token in tokens)

    stop = StopRules(max_new_tokens=99, stop_strings=("STOP",), decode=text)
    output = [1, *[0] * 40, 2]
    assert stop.reason(output[:-1]) is None
    assert stop.reason(output) == "stop_string"
