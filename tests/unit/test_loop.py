"""The edges of a request's life; many requests at once are in test_serving.py."""

import pytest

import specdec.state as state_module
from specdec.compose.workbench import Parts, Workbench
from specdec.errors import UserError
from specdec.pairs import RandomPair
from specdec.policies import BestFirst, Chain, FixedWidth, RootOnly
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource, NullSource
from specdec.types import Nodes
from specdec.verifiers import MatchVerifier
from tests.states import new_request

MAX_POSITIONS = 48
PAIR = RandomPair(num_layers=3, vocab_size=24, max_positions=MAX_POSITIONS)
T06 = SamplingParams(temperature=0.6, top_p=0.9, top_k=12)


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


def serve(name: str, prompt: list[int], prefill_chunk: int = 512) -> list[int]:
    """The output of a request."""
    request = new_request(1, prompt, 10, T06)
    parts = strategy(name)
    state = parts.new_state()
    for _ in parts.decode(state, [request], prefill_chunk=prefill_chunk):
        pass
    assert not state.requests
    return request.output


@pytest.mark.parametrize("name", ["chain", "best_first", "specpipe"])
def test_a_prompt_as_long_as_the_context_allows(name: str) -> None:
    prompt = [1 + i % 20 for i in range(MAX_POSITIONS - 10)]
    expected = serve("ar", prompt)
    assert len(expected) == 10
    assert serve(name, prompt, prefill_chunk=7) == expected


def test_a_long_prefill_in_small_chunks_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "_MAX_IDLE_STEPS", 5)
    assert len(serve("ar", [1] * 20, prefill_chunk=1)) > 0


def test_a_policy_that_submits_nothing_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs: a loop without answers stops with the cause."""

    monkeypatch.setattr(RootOnly, "select", lambda self, state, source: Nodes())
    with pytest.raises(UserError, match="the policy submits no nodes"):
        serve("ar", [1, 2])
