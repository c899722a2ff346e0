"""The loop with many requests, and the edges of a request's life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

import specdec.state as state_module
from specdec.compose.workbench import Parts, Workbench
from specdec.pairs import RandomPair
from specdec.policies import BestFirst, Chain, FixedWidth, RootOnly
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource, NullSource
from specdec.state import RequestState, StopRules
from specdec.types import Nodes
from specdec.verifiers import MatchVerifier

MAX_POSITIONS = 48
PAIR = RandomPair(num_layers=3, vocab_size=24, max_positions=MAX_POSITIONS)
T06 = SamplingParams(temperature=0.6, top_p=0.9, top_k=12)
STRATEGIES = ["chain", "best_first", "specpipe"]


@dataclass
class Work:
    """Requests and how to serve them."""

    prompts: dict[int, list[int]]
    sampling: SamplingParams = T06
    stop: StopRules = field(default_factory=lambda: StopRules(max_new_tokens=10))
    batch_size: int = 1
    prefill_chunk: int = 512
    cancel_after: dict[int, int] = field(default_factory=dict)


def strategy(name: str) -> Parts:
    """A strategy over the tiny random pair; the pipeline has 3 stages."""
    bench = Workbench(PAIR, seed=5)
    draft = DraftModelSource(runner=bench.draft_runner())
    policies = {
        "ar": RootOnly(),
        "chain": Chain(gamma=4),
        "best_first": BestFirst(bs=8, w=2, d=3),
        "specpipe": FixedWidth(width=6, children=4, levels_per_step=1),
    }
    return bench.parts(
        source=NullSource() if name == "ar" else draft,
        policy=policies[name],
        verifier=MatchVerifier(),
        stages=3 if name == "specpipe" else None,
    )


def serve(name: str, work: Work) -> dict[int, RequestState]:
    """Runs the work; finished requests by id."""
    parts = strategy(name)
    state = parts.new_state()
    finished: dict[int, RequestState] = {}
    requests = [
        RequestState(request_id=i, prompt=np.array(p), stop=work.stop, sampling=work.sampling)
        for i, p in work.prompts.items()
    ]
    loop = parts.decode(
        state,
        requests,
        batch_size=work.batch_size,
        prefill_chunk=work.prefill_chunk,
        on_finish=lambda r: finished.__setitem__(r.id, r),
    )
    for step, _ in enumerate(loop):
        for request in list(state.requests.values()):
            if work.cancel_after.get(request.id) == step:
                request.cancel()
    assert not state.requests
    return finished


def outputs(found: dict[int, RequestState]) -> dict[int, list[int]]:
    return {i: r.output for i, r in found.items()}


PROMPTS = {3: [1, 2, 3, 4, 5, 6, 7], 0: [9], 8: [4, 4, 4], 5: list(range(1, 15)), 6: [2, 1]}


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    return outputs(serve("ar", Work(PROMPTS)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_cancelling_one_request_disturbs_no_other(name: str, alone: dict[int, list[int]]) -> None:
    found = serve(name, Work(PROMPTS, batch_size=5, cancel_after={3: 4, 5: 5}))
    assert found[3].finish_reason == found[5].finish_reason == "cancelled"
    for request_id in (0, 8, 6):
        assert found[request_id].output == alone[request_id]
    for request_id in (3, 5):
        cut = found[request_id].output
        assert cut == alone[request_id][: len(cut)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_stop_strings_across_token_boundaries(name: str, alone: dict[int, list[int]]) -> None:
    def letters(ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in ids)

    middle = letters(alone[5][3:5])[1:-1]  # ends inside the text of the second token
    stop = StopRules(max_new_tokens=10, stop_strings=(middle,), decode=letters)
    expected = outputs(serve("ar", Work(PROMPTS, stop=stop)))
    assert middle in letters(expected[5])
    assert len(expected[5]) <= 5
    assert outputs(serve(name, Work(PROMPTS, stop=stop, batch_size=5))) == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_prompt_as_long_as_the_context_allows(name: str) -> None:
    prompt = {1: [1 + i % 20 for i in range(MAX_POSITIONS - 10)]}
    expected = outputs(serve("ar", Work(prompt)))
    assert len(expected[1]) == 10
    assert outputs(serve(name, Work(prompt, prefill_chunk=7))) == expected


def test_a_long_prefill_in_small_chunks_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "_MAX_IDLE_STEPS", 5)
    assert len(outputs(serve("ar", Work({1: [1] * 20}, prefill_chunk=1)))[1]) > 0


def test_a_policy_that_submits_nothing_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs: a loop without answers stops with the cause."""

    monkeypatch.setattr(RootOnly, "select", lambda self, state, source: Nodes())
    with pytest.raises(RuntimeError, match="the policy submits no nodes"):
        serve("ar", Work({1: [1, 2]}))
