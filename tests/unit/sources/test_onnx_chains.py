"""A chain that one session call, or one after another, drafts equals the one of single passes.

``ModelRunner.whole_chain`` drafts a chain in one call of ONNX Runtime; ``ModelRunner.chain``
repeats passes over one token with nothing but the choice of the next token in between.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from specdec.clocks.meter import Meter
from specdec.device import on_host
from specdec.models import onnx_chains
from specdec.models.execution import Execution
from specdec.models.onnx_chains import MAX_FIRST_ROWS, num_bytes
from specdec.models.onnx_choices import Best, Drawn
from specdec.models.runner import ModelRunner
from specdec.policies import Chain
from specdec.sampling.candidates import drawn_firsts
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources import DraftModelSource
from specdec.sources.growing_chain import GrowingChain
from specdec.types import Nodes

from .support import (
    VOCAB,
    commit,
    expand,
    make_onnx_runner,
    make_request,
    make_state,
    open_request,
    random_path,
    tiny_model,
)

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

# Sums in another order: without packed weights, and of the log-softmax. Float32 has 1.2e-7.
ROUNDING = 1e-5
NO_DRAWS = np.zeros(0)
LIMIT = 48  # positions of the model: the last chains are shorter
NAMES = ("ids", "tokens", "parents", "positions", "logprobs", "scores", "expanded")


def _runner(*, chains: bool) -> ModelRunner:
    runner = make_onnx_runner(max_positions=LIMIT)
    assert runner.runs_chains
    assert runner.runs_whole_chains
    runner.runs_chains = runner.runs_whole_chains = chains
    return runner


def _grown(chains: bool, sampling: SamplingParams, **options: Any) -> tuple[list[object], int]:
    """Trees, caches, passes and rows after every step of a request; rows of chains."""
    state, runner, num_rows = make_state(), _runner(chains=chains), 0

    def counted(original: Any) -> Any:
        def call(rows: Any, *arguments: Any) -> Any:
            nonlocal num_rows
            num_rows += len(rows)
            return original(rows, *arguments)

        return call

    for name in ("chain", "whole_chain"):
        vars(runner)[name] = counted(getattr(runner, name))
    source = DraftModelSource(runner=runner, **options)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 21)
    open_request(state, source, make_request(0, prompt, sampling=sampling))
    tree, cache = state.requests[0].tree, source._drafts[0].cache
    seen: list[object] = []
    policy, rng = Chain(gamma=5), np.random.default_rng(0)
    for _ in range(7):
        policy.select(state, source)
        used = cache.cached_len + cache.num_nodes
        seen.append([getattr(tree, name).tolist() for name in NAMES])
        seen.append({i: on_host(probs).tolist() for i, probs in tree.draft_probs.items()})
        seen.append([cache.node_ids.tolist(), cache.storage[..., :used, :].tolist()])
        seen.append([source.counters.passes, source.counters.rows, runner._meter.calls["draft"]])
        path, token = random_path(tree, rng)
        commit(state, [source], 0, path, token)
    return seen, num_rows


def _assert_equal(found: list[object], expected: list[object]) -> None:
    """Nested lists of equal lengths and keys, with numbers equal up to rounding."""
    assert type(found) is type(expected)
    if isinstance(expected, list):
        for pair in zip(found, expected, strict=True):
            _assert_equal(*pair)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        _assert_equal([*found.values()], [*expected.values()])
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=ROUNDING, rel=ROUNDING)
    else:
        assert found == expected


WHOLE = {
    "greedy": (SamplingParams(), {}),
    "sampled target": (SamplingParams(temperature=0.7), {}),
    "filtered target": (SamplingParams(temperature=1.5, top_k=3), {}),
    "own draws": (SamplingParams(temperature=0.9, top_k=7), {"sample": True}),
    "own draws, top-p": (SamplingParams(temperature=1.5, top_k=20, top_p=0.8), {"sample": True}),
}


@pytest.mark.parametrize("prefill_chunk", [1, 2, 512])
@pytest.mark.parametrize("case", WHOLE)
def test_one_call_leaves_the_trees_and_caches_of_single_passes(
    case: str, prefill_chunk: int
) -> None:
    sampling, options = WHOLE[case]
    called, num_rows = _grown(True, sampling, prefill_chunk=prefill_chunk, **options)
    single, none = _grown(False, sampling, prefill_chunk=prefill_chunk, **options)
    assert num_rows > 10
    assert not none
    _assert_equal(called, single)


def _passes(runner: ModelRunner, prompt: Any, num: int, temperature: float) -> tuple[Any, ...]:
    """Tokens, log-probabilities and the cache's contents after ``num`` single greedy passes."""
    cache = runner.new_cache(LIMIT)
    logits = runner.forward([cache.rows(prefix_tokens=prompt)]).logits[-1:]
    tokens, logprobs = [], []
    for i in range(num):
        tokens.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits / temperature, dim=1).max()))
        rows = cache.rows(
            node_ids=np.array([i]),
            node_tokens=np.array(tokens[-1:]),
            parent_ids=np.array([i - 1]),
            node_positions=np.array([len(prompt) + i]),
        )
        if i + 1 < num:
            logits = runner.forward([rows]).logits
    return tokens, logprobs, cache.storage[..., : len(prompt) + num - 1, :]


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
@pytest.mark.parametrize("num_first", [1, 2, MAX_FIRST_ROWS])
@pytest.mark.parametrize("num", [1, 3, 8, 9, 20])
def test_one_call_gives_the_tokens_of_torch(num: int, num_first: int, temperature: float) -> None:
    runner, prompt = _runner(chains=True), np.random.default_rng(num).integers(0, VOCAB, 7)
    expected = _passes(runner, prompt, num, temperature)
    for _ in range(2):  # the second time with the arrays of the first
        cache = runner.new_cache(8)  # grows
        early = len(prompt) - num_first
        runner.forward([cache.rows(prefix_tokens=prompt[:early])])
        places = np.arange(num - 1)
        rows = cache.rows(
            prefix_tokens=prompt[early:],
            node_ids=places,
            node_tokens=np.zeros(num - 1, np.int64),
            parent_ids=places - 1,
            node_positions=places + len(prompt),
        )
        chain = runner.whole_chain(rows, num_first, Best(temperature), NO_DRAWS)
        assert chain.tokens.tolist() == expected[0]
        assert rows.tokens[num_first:].tolist() == expected[0][:-1]
        np.testing.assert_allclose(chain.logprobs, expected[1], atol=ROUNDING)
        end = len(prompt) + num - 1
        torch.testing.assert_close(cache.storage[..., :end, :], expected[2])


def _drawn(
    runner: ModelRunner, choice: Drawn, draws: Any, num: int = 1
) -> tuple[Any, torch.Tensor]:
    """The chain after a prompt, and the logits of the first pass."""
    prompt = np.random.default_rng(3).integers(0, VOCAB, 9)
    cache = runner.new_cache(LIMIT)
    logits = runner.forward([cache.rows(prefix_tokens=prompt)]).logits[-1:]
    cache = runner.new_cache(LIMIT)
    runner.forward([cache.rows(prefix_tokens=prompt[:-1])])
    places = np.arange(num - 1)
    rows = cache.rows(
        prefix_tokens=prompt[-1:],
        node_ids=places,
        node_tokens=np.zeros(num - 1, np.int64),
        parent_ids=places - 1,
        node_positions=places + len(prompt),
    )
    return runner.whole_chain(rows, 1, choice, draws), logits


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 5, 1.0), (0.6, 20, 0.9), (3.0, 31, 0.5), (0.05, 3, 1.0), (2.0, 1, 1.0), (1.0, 8, 1e-6)],
)
def test_draws_in_a_graph_are_those_of_the_host(
    temperature: float, top_k: int, top_p: float
) -> None:
    runner = _runner(chains=True)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    transform = SamplingTransform(params)
    uniforms = [0.0, 1.0 - 2.0**-53, *np.random.default_rng(0).random(20)]
    for uniform in uniforms:
        draws = np.array([uniform])
        chain, logits = _drawn(runner, Drawn(temperature, top_k, top_p), draws)
        expected = drawn_firsts(transform, logits, draws)
        assert chain.tokens.tolist() == expected.tokens[:, 0].tolist()
        probs, dense = on_host(chain.probs), on_host(expected.probs)
        np.testing.assert_allclose(probs, dense, atol=ROUNDING)
        np.testing.assert_allclose(probs.sum(axis=1), 1.0)
        np.testing.assert_array_equal(probs > 0, dense > 0)
        np.testing.assert_allclose(chain.logprobs, np.log(probs[0, chain.tokens]))


def test_tokens_of_a_graph_are_drawn_from_the_reported_probabilities() -> None:
    """Each draw is in the interval of its token's probability, in the order of token ids."""
    runner, num = _runner(chains=True), 12  # two calls
    for seed in range(8):
        draws = np.random.default_rng(seed).random(num)
        chain, _ = _drawn(runner, Drawn(1.7, 9, 0.95), draws, num)
        probs = on_host(chain.probs)
        cdf = probs.cumsum(axis=1)
        rows = np.arange(num)
        above = cdf[rows, chain.tokens]
        assert (draws < above + 1e-12).all()
        assert (draws > above - probs[rows, chain.tokens] - 1e-12).all()
        assert len({*chain.tokens.tolist()}) > 3


def test_ties_at_a_cut_keep_a_valid_distribution() -> None:
    """Some tokens that tie with the k-th are missing; the draw is from the others."""
    model = tiny_model(hidden_size=32).float()
    model.lm_head.weight[:] = 0.0  # all logits are equal
    onnx = Execution(backend="onnx")
    runner = ModelRunner(model=model, name="draft", meter=Meter(), execution=onnx)
    for uniform in (0.0, 0.3, 0.999):
        chain, _ = _drawn(runner, Drawn(1.0, 4, 1.0), np.array([uniform]))
        probs = on_host(chain.probs)[0]
        np.testing.assert_allclose(probs[probs > 0], 0.25)
        assert chain.tokens[0] == np.flatnonzero(probs)[int(4 * uniform)]


def test_of_equal_logits_a_chain_takes_the_first() -> None:
    model = tiny_model(hidden_size=32).float()
    model.lm_head.weight[3:] = model.lm_head.weight[:1]  # 0, 3, 4 and so on are equal
    model.lm_head.weight[1:3] = -model.lm_head.weight[:1]  # and so are 1 and 2
    onnx = Execution(backend="onnx")
    runner = ModelRunner(model=model, name="draft", meter=Meter(), execution=onnx)
    seen = set()
    for first in range(VOCAB):
        rows = runner.new_cache(8).rows(prefix_tokens=np.array([first]))
        seen.add(int(runner.whole_chain(rows, 1, Best(1.0), NO_DRAWS).tokens[0]))
    assert seen == {0, 1}


def test_a_chain_of_numbers_that_are_not_finite_is_an_error() -> None:
    runner = _runner(chains=True)
    rows = runner.new_cache(8).rows(prefix_tokens=np.array([1, 2]))
    with pytest.raises(ValueError, match="NaN or infinity"):
        runner.whole_chain(rows, 2, Best(float("nan")), NO_DRAWS)


def test_rare_lengths_get_no_session_of_their_own() -> None:
    """The last chains of requests have many; making a session takes longer than many passes."""
    runner = _runner(chains=True)
    chains = runner.onnx.whole_chains

    def lengths() -> list[int]:
        return sorted(length for _, length in chains._sessions)

    draws = np.zeros(8)
    assert not lengths()
    for num, expected in ((4, [4]), (3, [1, 4]), (2, [1, 4]), (6, [1, 4, 6]), (3, [1, 4, 6])):
        _drawn(runner, Drawn(1.0, 3, 1.0), draws, num)
        assert lengths() == expected
    for _ in range(40):
        _drawn(runner, Drawn(1.0, 3, 1.0), draws, 3)
    assert lengths() == [1, 3, 4, 6]


def test_weights_of_sessions_are_limited(monkeypatch) -> None:
    """Beyond the limit a chain takes calls of the sessions that exist, or of single passes."""
    num = num_bytes(tiny_model(hidden_size=32))
    draws = np.random.default_rng(0).random(8)
    expected = [_drawn(_runner(chains=True), Drawn(1.0, 3, 1.0), draws, n)[0] for n in (4, 8)]
    monkeypatch.setattr(onnx_chains, "MAX_BYTES", 2 * num)
    runner = _runner(chains=True)
    found = [_drawn(runner, Drawn(1.0, 3, 1.0), draws, n)[0] for n in (2, 4, 8, 4)]
    for chain, other in zip(found[1:3], expected, strict=True):
        assert chain.tokens.tolist() == other.tokens.tolist()
    prompt = runner.new_cache(8).rows(prefix_tokens=np.array([1, 2]))
    runner.whole_chain(prompt, 2, Best(1.0), NO_DRAWS)
    assert [*runner.onnx.whole_chains._sessions] == [(Drawn, 2), (Drawn, 4), (Best, 1)]
    monkeypatch.setattr("specdec.models.onnx_passes.MAX_BYTES", 3 * num)
    with pytest.raises(AssertionError):  # too few copies: passes are repeated
        _runner(chains=True)


def test_calls_of_one_length_share_a_session() -> None:
    runner = _runner(chains=True)
    for temperature in (1.0, 1.0, 2.0):
        rows = runner.new_cache(8).rows(prefix_tokens=np.array([1, 2]))
        runner.whole_chain(rows, 2, Best(temperature), NO_DRAWS)
    chains = runner.onnx.whole_chains
    assert [*chains._sessions] == [(Best, 1)]
    del rows
    gc.collect()
    assert len(chains._calls) == 2
    assert not any(call._bindings._bound for call in chains._calls.values())  # caches are gone


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (SamplingParams(temperature=0.7), {"guess_draw": True}),
        (SamplingParams(temperature=0.9), {"sample": True}),
        (SamplingParams(temperature=0.9, top_p=0.8), {"sample": True}),
        (SamplingParams(), {"sample": True}),
    ],
    ids=["target's draws", "own draws", "own draws, top-p", "own draws, greedy target"],
)
def test_repeated_passes_leave_the_trees_and_caches_of_single_ones(
    sampling: SamplingParams, options: dict[str, Any]
) -> None:
    repeated, num_rows = _grown(True, sampling, **options)
    single, none = _grown(False, sampling, **options)
    assert num_rows > 10
    assert not none
    assert repr(repeated) == repr(single)


def _below_a_branch(chains: bool) -> list[list[float]]:
    """A chain below one of two children of the root, both of which are in the draft's cache."""
    state, source = make_state(), DraftModelSource(runner=_runner(chains=chains))
    prompt = np.random.default_rng(1).integers(0, VOCAB, 9)
    tree = open_request(state, source, make_request(0, prompt)).tree
    expand(state, source, {0: [0]}, 2)
    children = tree.take(np.array([0, 0]), np.array([0, 1]))
    expand(state, source, {0: children.tolist()}, 1)
    (leaf,) = tree.take(children[:1], np.array([0]))
    (chain,) = source.chains(state, Nodes(((0, tree.ids[[leaf]]),)), [4]) or ()
    return [chain.tokens.tolist(), chain.logprobs.tolist()]


def test_a_chain_beside_other_nodes_takes_masked_passes(monkeypatch) -> None:
    single = _below_a_branch(chains=False)
    assert _below_a_branch(chains=True) == single
    monkeypatch.setattr(GrowingChain, "sees_all", True)
    assert _below_a_branch(chains=True) != single  # it sees the other child


def test_times_between_passes_are_not_the_models(monkeypatch) -> None:
    runner = _runner(chains=True)
    cache = runner.new_cache(8)
    runner.forward([cache.rows(prefix_tokens=np.arange(3))])
    rows = cache.rows(
        node_ids=np.arange(2),
        node_tokens=np.array([4, 0]),
        parent_ids=np.array([-1, 0]),
        node_positions=np.array([3, 4]),
    )
    before, now = runner._meter.model_s["draft"], [0.0]
    monkeypatch.setattr("specdec.models.onnx_passes.perf_counter", lambda: now[0])

    def choose(logits: torch.Tensor) -> int:
        now[0] += 1.0  # a second
        return int(logits.argmax())

    logits = runner.chain(rows, choose)
    assert logits.shape == (2, VOCAB)
    assert rows.tokens.tolist() == [4, int(logits[0].argmax())]
    assert runner._meter.model_s["draft"] == before
    assert runner._meter.calls["draft"] == 3
