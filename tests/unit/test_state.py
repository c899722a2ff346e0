"""``DecodeState.commit``: the one place that emits tokens, cuts them and moves roots."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.sampling.transform import SamplingParams
from specdec.state import TARGET_ORIGIN, DecodeState, RequestState, StopRules
from specdec.types import Answers, CommitKind, Nodes, Output, Verdict
from tests.states import new_state

PIECES = {10: "a", 11: "b", 12: "ST", 13: "OP", 14: "x", 15: "END", 16: "S", 17: "TOP!"}


def decode(tokens) -> str:
    return "".join(PIECES.get(int(token), "?") for token in tokens)


def one_request(stop: StopRules) -> tuple[DecodeState, RequestState]:
    request = RequestState(
        request_id=7, prompt=np.array([1, 2, 3]), stop=stop, sampling=SamplingParams()
    )
    state = new_state()
    state.requests[7] = request
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
    request = RequestState(
        request_id=7, prompt=np.array([12, 13, 12]), stop=stop, sampling=SamplingParams()
    )
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


def test_emitted_tokens_are_accepted_and_answers_before_cuts():
    """The invariant of metrics for whole-tree answers, on random paths."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        state, request = one_request(StopRules(max_new_tokens=int(rng.integers(1, 20))))
        while not request.finished:
            path = rng.integers(10, 16, rng.integers(1, 6)).tolist()
            commit_path(state, request, path, hit=bool(rng.integers(2)))
        counters = request.counters
        assert counters.accepted + counters.answers == len(request.output) + counters.cut_tokens
        assert len(request.output) == request.stop.max_new_tokens


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


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt 7 has no tokens"):
        RequestState(
            request_id=7,
            prompt=np.zeros(0, np.int64),
            stop=StopRules(max_new_tokens=1),
            sampling=SamplingParams(),
        )


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
