"""A chain that one session call after another drafts equals the one of single passes.

``ModelRunner.chain`` repeats passes over one token in ONNX Runtime with nothing but the choice of
the next token in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.clocks.meter import Meter
from specdec.device import on_host
from specdec.models.execution import Execution
from specdec.models.runner import ModelRunner
from specdec.policies import Chain
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource
from specdec.sources.growing_chain import GrowingChain
from specdec.types import Nodes

from .support import (
    VOCAB,
    commit,
    expand,
    make_request,
    make_state,
    open_request,
    random_path,
    tiny_model,
)

pytest.importorskip("onnxruntime", reason="pip install specdec-lab[onnx]")

LIMIT = 48  # positions of the model: the last chains are shorter
NAMES = ("ids", "tokens", "parents", "positions", "logprobs", "scores", "expanded")


def _runner(*, chains: bool) -> ModelRunner:
    model = tiny_model(max_positions=LIMIT, hidden_size=32).float()  # heads of 16
    onnx = Execution(backend="onnx")
    runner = ModelRunner(model=model, name="draft", meter=Meter(), execution=onnx)
    assert runner.runs_chains
    runner.runs_chains = chains
    return runner


def _grown(chains: bool, sampling: SamplingParams, **options: Any) -> tuple[list[object], int]:
    """Trees, caches, passes and rows after every step of a request; rows of repeated passes."""
    state, runner, num_rows = make_state(), _runner(chains=chains), 0
    original = runner.chain

    def counted(rows: Any, choose: Any) -> torch.Tensor:
        nonlocal num_rows
        num_rows += len(rows)
        return original(rows, choose)

    vars(runner)["chain"] = counted
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


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (SamplingParams(), {}),
        (SamplingParams(temperature=0.7), {}),
        (SamplingParams(temperature=0.7), {"guess_draw": True}),
        (SamplingParams(temperature=0.9, top_k=7), {"sample": True}),
    ],
    ids=["greedy", "sampled target", "target's draws", "own draws"],
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
