"""A tiny draft model, requests, and a driver that grows trees and commits at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.clocks.meter import Meter
from specdec.interfaces import TokenSource
from specdec.models.execution import Execution
from specdec.models.runner import ModelRunner
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import Answers, Candidates, Commit, Nodes, Output, Verdict
from tests.states import new_request, new_state

VOCAB = 32


def tiny_model(
    *, max_positions: int = 256, hidden_size: int = 16, seed: int = 0
) -> LlamaForCausalLM:
    """Two random layers in float64; next tokens vary with the context."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).double().eval().requires_grad_(False)


def make_runner(model: LlamaForCausalLM, name: str = "draft") -> ModelRunner:
    return ModelRunner(model=model, name=name, meter=Meter())


def make_onnx_runner(*, max_positions: int = 256) -> ModelRunner:
    """A draft in ONNX Runtime, which needs float32 and heads of a multiple of 16."""
    model = tiny_model(max_positions=max_positions, hidden_size=32).float()
    onnx = Execution(backend="onnx")
    return ModelRunner(model=model, name="draft", meter=Meter(), execution=onnx)


make_state = new_state
make_request = partial(new_request, max_new_tokens=200)


def open_request(state: DecodeState, source: TokenSource, request: RequestState) -> RequestState:
    request.prefill_sent = request.num_prefill
    state.requests[request.id] = request
    source.open(request)
    return request


def expand(
    state: DecodeState, source: TokenSource, wanted: dict[int, Sequence[int]], k: int
) -> Candidates:
    """Asks for slots by request and stores the answer in the trees, as policies do."""
    items = tuple((i, state.requests[i].tree.ids[list(slots)]) for i, slots in wanted.items())
    candidates = source.expand(state, Nodes(items), k)
    start = 0
    for request_id, ids in items:
        tree = state.requests[request_id].tree
        stop = start + len(ids)
        tree.set_candidates(tree.slots(ids), candidates, slice(start, stop))
        start = stop
    return candidates


def commit(
    state: DecodeState,
    sources: Sequence[TokenSource],
    request_id: int,
    path: Sequence[int],
    token: int,
) -> Commit:
    """Accepts the nodes at slots ``path`` (without the root) and then ``token``."""
    tree = state.requests[request_id].tree
    retired = tree.ids[[0, *path]]
    tokens = np.array([*tree.tokens[list(path)].tolist(), token])
    answers = Answers(request=request_id, node_ids=retired, tokens=tokens)
    state.receive(Output(step=state.step, answers=(answers,)))
    verdict = Verdict(request=request_id, accepted_ids=retired[1:], next_token=token)
    (decided,) = state.commit([verdict])
    for source in sources:
        source.commit([decided], Output(step=decided.step))
    return decided


def random_path(tree, rng: np.random.Generator) -> tuple[list[int], int]:
    """A path below the root, and a next token that is in the tree half of the time."""
    path, slot = [], 0
    while len(children := tree.children(slot)) and rng.random() < 0.6:
        slot = int(rng.choice(children))
        path.append(slot)
    children = tree.children(slot)
    if len(children) and rng.random() < 0.6:
        return path, int(tree.tokens[rng.choice(children)])
    return path, int(rng.integers(VOCAB))


def grow(tree: TokenTree, rng: np.random.Generator) -> None:
    """Makes nodes of random candidates, and now and then one below an unexpanded node."""
    slots, columns = np.nonzero(tree.candidate_logprobs > -np.inf)
    chosen = rng.permutation(len(slots))[: rng.integers(0, 5)]
    tree.take(slots[chosen], columns[chosen])
    free = np.flatnonzero(~tree.expanded)
    if len(free) and rng.random() < 0.5:
        parent = rng.choice(free, 1)
        if not len(tree.children(int(parent[0]))):
            tree.append(parent, rng.integers(0, VOCAB, 1), np.array([-1.0]))


def expansions(
    state: DecodeState, source: TokenSource, rng: np.random.Generator, rounds: int = 5
) -> Iterator[tuple[dict[int, list[int]], int, Candidates]]:
    """Random expansions (slots by request, k, candidates), and commits between the rounds."""
    for _ in range(rounds):
        for _ in range(int(rng.integers(1, 4))):
            wanted = {}
            for request_id, request in state.requests.items():
                free = np.flatnonzero(~request.tree.expanded)
                if len(free):
                    wanted[request_id] = rng.permutation(free)[:3].tolist()
            k = int(rng.integers(1, 6))
            if wanted:
                yield wanted, k, expand(state, source, wanted, k)
            for request in state.requests.values():
                grow(request.tree, rng)
        for request_id in state.requests:
            path, token = random_path(state.requests[request_id].tree, rng)
            commit(state, [source], request_id, path, token)
