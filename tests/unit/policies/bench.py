"""What the policy tests run on: a language model by table, a fake target, a loop with checks.

Contexts are tuples of tokens. Every quantity that a policy sees is a function of the context alone,
so a tree can be recomputed from nothing by brute force.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from specdec.interfaces import Events, Executor, TokenSource, TreePolicy, Verifier
from specdec.loop import decode
from specdec.policies.tree_growth import last_position
from specdec.serving.scheduler import FifoScheduler
from specdec.state import DecodeState, RequestState
from specdec.types import (
    NO_NODE,
    Answers,
    Batch,
    Candidates,
    Commit,
    Lossless,
    Nodes,
    Output,
    Verdict,
)
from tests.states import new_request, new_state

VOCAB = 20
Context = tuple[int, ...]


def children_of(context: Context, salt: int = 0) -> tuple[tuple[int, float], ...]:
    """All (token, log-probability) after a context, best first; depends on the last two tokens."""
    return _children_of(context[-2:], salt)


@cache
def _children_of(context: Context, salt: int) -> tuple[tuple[int, float], ...]:
    rng = np.random.default_rng((salt, *context))
    probs = rng.dirichlet(np.full(VOCAB, 0.15)) + 1e-6 * rng.random(VOCAB)
    logprobs = np.log(probs / probs.sum())
    order = np.argsort(-logprobs, kind="stable")
    return tuple((int(t), float(logprobs[t])) for t in order)


def score(context: Context, root: Context) -> float:
    """Cumulative log-probability of a context below a root."""
    return sum(dict(children_of(context[:i]))[context[i]] for i in range(len(root), len(context)))


def target_token(context: Context) -> int:
    """The fake target: mostly one of the draft's first guesses, sometimes none of them."""
    rank = (0, 0, 0, 0, 0, 0, 1, 1, 2, VOCAB - 1)[zlib.crc32(bytes(context)) % 10]
    return children_of(context)[rank][0]


class TableSource(TokenSource):
    """A source that proposes ``children_of`` and records the expanded nodes.

    Attributes:
        calls: per call, {request: contexts asked for}, and ``k`` in ``widths``.
        silent: contexts for which it has no answer (count 0).
        table: context -> [(token, logprob)], instead of ``children_of``.
    """

    def __init__(
        self,
        *,
        silent: Callable[[Context], bool] = lambda context: False,
        table: Callable[[Context], Sequence[tuple[int, float]]] = children_of,
        cheap: TokenSource | None = None,
    ) -> None:
        self.vocab_size = VOCAB
        self.silent = silent
        self.table = table
        self.calls: list[dict[int, list[Context]]] = []
        self.widths: list[int] = []
        self._asked: set[tuple[int, int]] = set()
        if cheap is not None:
            self.cheap = cheap

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        assert len(nodes)
        assert len({r for r, _ in nodes.items}) == len(nodes.items)
        empty = Candidates.empty(len(nodes), k)
        call: dict[int, list[Context]] = {}
        row = 0
        for request_id, ids in nodes.items:
            assert len(ids), "a request without nodes is left out"
            request = state.requests[request_id]
            for node_id, slot in zip(ids.tolist(), request.tree.slots(ids).tolist(), strict=True):
                context = tuple(request.path_tokens(slot).tolist())
                call.setdefault(request_id, []).append(context)
                if not self.silent(context):
                    key = (request_id, node_id)
                    assert key not in self._asked, "a known node is asked for again"
                    self._asked.add(key)
                    best = self.table(context)[:k]
                    empty.counts[row] = len(best)
                    for column, (token, logprob) in enumerate(best):
                        empty.tokens[row, column] = token
                        empty.logprobs[row, column] = logprob
                row += 1
        self.calls.append(call)
        self.widths.append(k)
        return empty


class FakeExecutor(Executor):
    """A pipeline of ``latency`` steps that answers with ``target_token``."""

    def __init__(self, state: DecodeState, latency: int) -> None:
        self.latency = self.in_flight = latency
        self.batches: list[Batch] = []
        self._state = state
        self._flying: list[dict[int, dict[int, Context]]] = [{} for _ in range(latency - 1)]

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)
        contexts: dict[int, dict[int, Context]] = {}
        for rows in batch.trees:
            request = self._state.requests[rows.request]
            for node_id in rows.node_ids.tolist():
                slot = int(request.tree.slots(np.array([node_id]))[0])
                context = tuple(request.path_tokens(slot).tolist())
                contexts.setdefault(rows.request, {})[node_id] = context
        self._flying.append(contexts)

    def collect(self, *, wait: bool = True) -> Output:
        answers = []
        for request_id, contexts in self._flying[0].items():
            ids = np.array(list(contexts), np.int64)
            tokens = np.array([target_token(c) for c in contexts.values()], np.int64)
            if len(ids):
                answers.append(Answers(request=request_id, node_ids=ids, tokens=tokens))
        self._flying.pop(0)
        return Output(step=self._state.step, answers=tuple(answers))

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in commits:
            for contexts in self._flying:
                held = contexts.get(commit.request, {})
                kept = commit.keeps(np.array(list(held), np.int64))
                contexts[commit.request] = {
                    node_id: held[node_id] for node_id, k in zip(list(held), kept, strict=True) if k
                }

    def close(self, request_id: int) -> None:
        for contexts in self._flying:
            contexts.pop(request_id, None)


class PathVerifier(Verifier):
    """Follows the children that carry the target's tokens; the rule of ``match``."""

    lossless = Lossless.TOKEN

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        verdicts = []
        for request in requests:
            tree = request.tree
            slots = np.flatnonzero(tree.answered)
            by_slot = dict(zip(slots.tolist(), tree.answers[slots].tolist(), strict=True))
            slot, accepted = 0, []
            assert 0 in by_slot, "what is answered starts at the root"
            while (child := tree.child(slot, by_slot[slot])) in by_slot:
                slot = child
                accepted.append(tree.ids[child])
            verdicts.append(
                Verdict(
                    request=request.id,
                    accepted_ids=np.array(accepted, np.int64),
                    next_token=by_slot[slot],
                )
            )
        return verdicts


@dataclass
class Selection:
    """What one ``select`` did for one request; contexts are whole sequences."""

    request: int
    root: Context
    before: dict[Context, bool]
    """Nodes of the tree before it -> expanded."""
    chosen: list[Context]
    calls: int


@dataclass
class CheckedPolicy(TreePolicy):
    """Passes calls on to a policy and asserts what every policy owes the loop."""

    policy: TreePolicy
    source: TableSource
    log: list[Selection] = field(default_factory=list)
    overlaps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.value_dependent = self.policy.value_dependent

    def open(self, request: RequestState) -> None:
        self.policy.open(request)

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        before = {r.id: (tree_contexts(r), r.awaiting) for r in state.requests.values()}
        num_calls = len(self.source.calls)
        nodes = self.policy.select(state, source)
        chosen = dict(nodes.items)
        assert len(chosen) == len(nodes.items)
        for request in state.requests.values():
            tree, (contexts, awaiting) = request.tree, before[request.id]
            ids = chosen.get(request.id, np.zeros(0, np.int64))
            slots = tree.slots(ids)
            assert NO_NODE not in slots
            assert (np.diff(slots) > 0).all(), "parents first, nothing twice"
            assert (tree.submitted_at[slots] < 0).all(), "nothing is submitted twice"
            parents = tree.parents[slots]
            in_order = np.isin(parents, slots) | (tree.submitted_at[parents] >= 0)
            assert (in_order | (slots == 0)).all(), "a node goes after its parent"
            assert tree.positions.max() <= last_position(request)
            if len(ids):
                assert request.prefill_sent == request.num_prefill
                assert not (self.policy.serial and awaiting)  # type: ignore[attr-defined]
            for slot in range(len(tree)):
                siblings = tree.tokens[tree.children(slot)]
                assert len(set(siblings.tolist())) == len(siblings)
            self.log.append(
                Selection(
                    request=request.id,
                    root=tuple(request.tokens.tolist()),
                    before=contexts,
                    chosen=[tuple(request.path_tokens(s).tolist()) for s in slots.tolist()],
                    calls=len(self.source.calls) - num_calls,
                )
            )
        return nodes

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        num_calls = len(self.source.calls)
        hurry = self.policy.overlap(state, source, events)
        self.overlaps.append(len(self.source.calls) - num_calls)
        return hurry

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        self.policy.commit(commits, output)

    def close(self, request_id: int) -> None:
        self.policy.close(request_id)


def tree_contexts(request: RequestState) -> dict[Context, bool]:
    """The nodes of a request's tree -> whether they are expanded."""
    return {
        tuple(request.path_tokens(slot).tolist()): bool(request.tree.expanded[slot])
        for slot in range(len(request.tree))
    }


@dataclass
class Run:
    requests: list[RequestState]
    policy: CheckedPolicy
    source: TableSource
    steps: int


def run(
    policy: TreePolicy,
    *,
    latency: int = 1,
    num_requests: int = 1,
    batch_size: int = 1,
    source: TableSource | None = None,
    max_new_tokens: int = 40,
    prefill_chunk: int = 4,
) -> Run:
    """Decodes some prompts to the end through the real loop, state and scheduler."""
    source = source or TableSource()
    checked = CheckedPolicy(policy, source)
    requests = [
        new_request(i, range(i, i + 1 + 3 * i), max_new_tokens) for i in range(num_requests)
    ]
    state = new_state()
    executor = FakeExecutor(state, latency)
    scheduler = FifoScheduler(
        requests=requests,
        parts=(checked, source, executor),
        batch_size=batch_size,
        prefill_chunk=prefill_chunk,
    )
    steps = 0
    for _ in decode(
        state=state,
        scheduler=scheduler,
        policy=checked,
        source=source,
        verifier=PathVerifier(),
        executor=executor,
    ):
        steps += 1
        assert steps < 5000, "no progress"
    return Run(requests, checked, source, steps)


def autoregressive(prompt: Sequence[int], num: int) -> list[int]:
    """What the fake target says by itself."""
    context = tuple(prompt)
    for _ in range(num):
        context = (*context, target_token(context))
    return list(context[len(prompt) :])


def beam(root: Context, width: int, children: int, depth: int) -> list[list[Context]]:
    """Beam search from nothing: the levels below a root."""
    levels, level = [], [root]
    for _ in range(depth):
        pool = [(*c, t) for c in level for t, _ in children_of(c)[:children]]
        pool.sort(key=lambda c: -score(c, root))
        level = pool[:width]
        levels.append(level)
    return levels


def best_first(
    root: Context, bs: int, w: int, d: int, children: int | None = None
) -> list[Context]:
    """SwiftSpec Alg. 1: the ``bs`` best nodes after ``d`` expansions, of all children or some."""
    scores, expanded = {root: 0.0}, set()
    rounds = 0
    while rounds < d or len(scores) < bs:
        leaves = sorted((c for c in scores if c not in expanded), key=lambda c: -scores[c])[:w]
        for leaf in leaves:
            expanded.add(leaf)
            for token, logprob in children_of(leaf)[:children]:
                scores[(*leaf, token)] = scores[leaf] + logprob
        rounds += 1
    return sorted(scores, key=lambda c: -scores[c])[:bs]


class Until(Events):
    """Events of a target that is ready when ``ready`` says so; no pass runs free."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.running = []
        self._ready = ready

    def ready(self) -> bool:
        return self._ready()

    def start(self, *given: Any, **keys: Any) -> Any:
        raise AssertionError("no pass runs free")

    next = next_draft = start


READY = Until(lambda: True)
BUSY = Until(lambda: False)
