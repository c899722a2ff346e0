"""What sources, policies and executors owe the loop, as checks of a single part.

``specdec verify`` shows that a whole composition decodes as plain decoding does. A part that breaks
one of the rules below can still pass there, because other parts hide it: a source whose candidates
depend on branches that were pruned only lowers the acceptance. These checks call a part alone, with
random trees, commits and batches, or beside parts that are known by table.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from specdec.certify.cases import GREEDY, TEMPERATURES_AND_FILTERS, parity_cases
from specdec.certify.oracle import Oracle
from specdec.certify.subject import decode_cases
from specdec.clocks import MeasuredClock
from specdec.clocks.meter import Meter
from specdec.compose.borders import candidates_fault, selection_fault
from specdec.compose.workbench import Workbench, planned
from specdec.device import on_host
from specdec.interfaces import Events, Executor, TokenSource, TreePolicy
from specdec.loop import decode
from specdec.pairs import RandomPair
from specdec.policies import Chain, FixedWidth, RootOnly
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams
from specdec.serving.scheduler import FifoScheduler
from specdec.sources import DraftModelSource
from specdec.state import DecodeState, RequestState, StopRules
from specdec.tree import TokenTree
from specdec.types import (
    Answers,
    Batch,
    Candidates,
    Commit,
    Nodes,
    Output,
    Verdict,
)
from specdec.verifiers import MatchVerifier

_SAMPLING = SamplingParams(temperature=0.7, top_k=10, top_p=0.9)
_LONG = StopRules(max_new_tokens=200)
_REQUESTS = (4001, 4002)
_MAX_STEPS = 5000
_TABLE_VOCAB = 20

Context = tuple[int, ...]
"""Tokens of a prompt and of what follows it."""


# ---------------------------------------------------------------------- sources


def check_source(
    make: Callable[[], TokenSource],
    *,
    vocab_size: int,
    sampling: SamplingParams = _SAMPLING,
    memory: bool = False,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> int:
    """Checks a token source on random trees of two requests, with commits in between.

    - It returns a row per node, of at most ``k`` different tokens with log-probabilities of at most
      0, and distributions that sum to 1 if it says ``gives_probs``.
    - Candidates depend on the tokens up to the node alone: they equal those of a new source whose
      prompt ends with the node, whatever was expanded, accepted or rejected before.
    - A closed request leaves nothing: another one with its id gets what a new source gives.

    Args:
        make: makes a new source; called often.
        vocab_size: number of tokens of the random prompts and trees.
        sampling: of the requests, for sources that sample.
        memory: whether earlier text may change the candidates (a cache of suffixes); the second and
            third rule are then not checked.
        tolerance: of log-probabilities and probabilities that are compared.
        seed: of prompts and trees.

    Returns:
        Number of nodes that were expanded.

    Raises:
        AssertionError: names the rule that is broken.
    """
    rng = np.random.default_rng(seed)
    source, state = make(), _state(seed)
    prompts = {i: rng.integers(0, vocab_size, rng.integers(1, 40)) for i in _REQUESTS}
    for request_id, prompt in prompts.items():
        open_request(state, source, _request(request_id, prompt, sampling))
    num_nodes = 0
    for slots, k, found in expansions(state, source, rng, vocab_size):
        nodes = [(request_id, slot) for request_id, own in slots.items() for slot in own]
        num_nodes += len(nodes)
        _check_candidates(source, found, k)
        for row, (request_id, slot) in enumerate(() if memory else nodes):
            path = state.requests[request_id].path_tokens(slot)
            what = f"the candidates after {path.tolist()} depend on more than these tokens"
            fresh = _of_a_new_source(make, request_id, path, sampling, k, seed)
            _assert_same(found, row, fresh, what, tolerance)
    for request_id in _REQUESTS:
        source.close(request_id)
        del state.requests[request_id]
    source.close(_REQUESTS[0])  # a second time: nothing is left to close
    if not memory:
        path = rng.integers(0, vocab_size, 12)
        open_request(state, source, _request(_REQUESTS[0], path, sampling))
        found = expand(state, source, {_REQUESTS[0]: [0]}, 3)
        fresh = _of_a_new_source(make, _REQUESTS[0], path, sampling, 3, seed)
        what = "a closed request has left something to the next one with its id"
        _assert_same(found, 0, fresh, what, tolerance)
    return num_nodes


def _check_candidates(source: TokenSource, found: Candidates, k: int) -> None:
    fault = candidates_fault(found, len(found.counts), k, source.vocab_size)
    assert not fault, fault
    has = found.probs is not None
    stated = source.gives_probs
    assert has == stated or not found.counts.any(), f"gives_probs={stated}, probs given: {has}"
    if found.probs is not None:
        rows = on_host(found.probs)[found.counts > 0]
        assert np.allclose(rows.sum(axis=1), 1.0, atol=1e-6), "probs must sum to 1"


def _of_a_new_source(
    make: Callable[[], TokenSource],
    request_id: int,
    path: Any,
    sampling: SamplingParams,
    k: int,
    seed: int,
) -> Candidates:
    source, state = make(), _state(seed)
    open_request(state, source, _request(request_id, path, sampling))
    return expand(state, source, {request_id: [0]}, k)


def _assert_same(
    found: Candidates, row: int, fresh: Candidates, what: str, tolerance: float
) -> None:
    num = int(fresh.counts[0])
    assert found.counts[row] == num, what
    assert found.tokens[row, :num].tolist() == fresh.tokens[0, :num].tolist(), what
    same = partial(np.allclose, atol=tolerance, rtol=0.0)
    assert same(found.logprobs[row, :num], fresh.logprobs[0, :num]), what
    if found.probs is not None and fresh.probs is not None:
        assert same(on_host(found.probs)[row], on_host(fresh.probs)[0]), what


def _state(seed: int = 0) -> DecodeState:
    return DecodeState(draws=KeyedDraws(seed=seed), clock=MeasuredClock(), meter=Meter())


def _request(request_id: int, prompt: Any, sampling: SamplingParams) -> RequestState:
    return RequestState(
        request_id=request_id, prompt=np.asarray(prompt), stop=_LONG, sampling=sampling
    )


def open_request(state: DecodeState, source: TokenSource, request: RequestState) -> RequestState:
    """Admits a request whose prompt the target has seen."""
    request.prefill_sent = request.num_prefill
    state.requests[request.id] = request
    source.open(request)
    return request


def expand(
    state: DecodeState, source: TokenSource, slots: Mapping[int, Sequence[int]], k: int
) -> Candidates:
    """Expands the nodes at ``slots`` (by request) and stores the result, as policies do."""
    items = tuple((i, state.requests[i].tree.ids[list(own)]) for i, own in slots.items())
    nodes = Nodes(items)
    candidates, num = source.expand(state, nodes, k), len(nodes)
    assert len(candidates.tokens) == len(candidates.counts) == num, (
        f"{num} nodes must give {num} rows"
    )
    state.set_candidates(nodes, candidates)
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


def random_path(
    tree: TokenTree, rng: np.random.Generator, vocab_size: int
) -> tuple[list[int], int]:
    """Returns slots of a path below the root, and a next token that is often in the tree."""
    path, slot = list[int](), 0
    while len(children := tree.children(slot)) and rng.random() < 0.6:
        slot = int(rng.choice(children))
        path.append(slot)
    children = tree.children(slot)
    if len(children) and rng.random() < 0.6:
        return path, int(tree.tokens[rng.choice(children)])
    return path, int(rng.integers(vocab_size))


def _grow(tree: TokenTree, rng: np.random.Generator, vocab_size: int) -> None:
    """Makes nodes of random candidates, and now and then one below an unexpanded node."""
    slots, columns = np.nonzero(tree.candidate_logprobs > -np.inf)
    chosen = rng.permutation(len(slots))[: rng.integers(0, 5)]
    tree.take(slots[chosen], columns[chosen])
    free = np.flatnonzero(~tree.expanded)
    if len(free) and rng.random() < 0.5:
        parent = rng.choice(free, 1)
        if not len(tree.children(int(parent[0]))):
            tree.append(parent, rng.integers(0, vocab_size, 1), np.array([-1.0]))


def expansions(
    state: DecodeState,
    source: TokenSource,
    rng: np.random.Generator,
    vocab_size: int,
    rounds: int = 5,
) -> Iterator[tuple[dict[int, list[int]], int, Candidates]]:
    """Yields random expansions (slots by request, k, candidates), with commits between rounds."""
    for _ in range(rounds):
        for _ in range(int(rng.integers(1, 4))):
            slots = {}
            for request_id, request in state.requests.items():
                free = np.flatnonzero(~request.tree.expanded)
                if len(free):
                    slots[request_id] = rng.permutation(free)[:3].tolist()
            k = int(rng.integers(1, 6))
            if slots:
                yield slots, k, expand(state, source, slots, k)
            for request in state.requests.values():
                _grow(request.tree, rng, vocab_size)
        for request_id in state.requests:
            path, token = random_path(state.requests[request_id].tree, rng, vocab_size)
            commit(state, [source], request_id, path, token)


# ---------------------------------------------------------------------- policies


def table_children(context: Context, salt: int = 0) -> tuple[tuple[int, float], ...]:
    """Returns all (token, log-probability) after a context, best first.

    They depend on its last two tokens, so a tree can be recomputed from nothing.
    """
    return _table_children(context[-2:], salt)


@cache
def _table_children(context: Context, salt: int) -> tuple[tuple[int, float], ...]:
    rng = np.random.default_rng((salt, *context))
    probs = rng.dirichlet(np.full(_TABLE_VOCAB, 0.15)) + 1e-6 * rng.random(_TABLE_VOCAB)
    logprobs = np.log(probs / probs.sum())
    order = np.argsort(-logprobs, kind="stable")
    return tuple((int(t), float(logprobs[t])) for t in order)


def table_target(context: Context) -> int:
    """Returns the target's next token: mostly a first guess of the table, sometimes none of it."""
    rank = (0, 0, 0, 0, 0, 0, 1, 1, 2, _TABLE_VOCAB - 1)[zlib.crc32(bytes(context)) % 10]
    return table_children(context)[rank][0]


def table_output(prompt: Sequence[int], num: int) -> list[int]:
    """Returns what ``table_target`` says by itself, int[num]."""
    context = tuple(prompt)
    for _ in range(num):
        context = (*context, table_target(context))
    return list(context[len(prompt) :])


class TableSource(TokenSource):
    """A source that proposes ``table_children`` and records the expanded nodes.

    It refuses a node that it has answered before, an empty call, and a request named twice.

    Attributes:
        calls: per call, {request: contexts of the nodes}; its ``k`` is in ``widths``.
        silent: contexts for which it has no answer (count 0).
        table: context -> [(token, logprob)].
    """

    def __init__(
        self,
        *,
        silent: Callable[[Context], bool] = lambda _: False,
        table: Callable[[Context], Sequence[tuple[int, float]]] = table_children,
        cheap: TokenSource | None = None,
    ) -> None:
        self.vocab_size = _TABLE_VOCAB
        self.silent = silent
        self.table = table
        self.calls: list[dict[int, list[Context]]] = []
        self.widths: list[int] = []
        self._answered: set[tuple[int, int]] = set()
        if cheap is not None:
            self.cheap = cheap

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        assert len(nodes), "a source is called without nodes"
        assert len({r for r, _ in nodes.items}) == len(nodes.items), "a request is named twice"
        found = Candidates.empty(len(nodes), k)
        call: dict[int, list[Context]] = {}
        row = 0
        for request_id, ids in nodes.items:
            assert len(ids), "a request without nodes must be left out"
            request = state.requests[request_id]
            for node_id, slot in zip(ids.tolist(), request.tree.slots(ids).tolist(), strict=True):
                context = tuple(request.path_tokens(slot).tolist())
                call.setdefault(request_id, []).append(context)
                if not self.silent(context):
                    key = (request_id, node_id)
                    assert key not in self._answered, "a node is expanded twice"
                    self._answered.add(key)
                    best = self.table(context)[:k]
                    found.counts[row] = len(best)
                    for column, (token, logprob) in enumerate(best):
                        found.tokens[row, column] = token
                        found.logprobs[row, column] = logprob
                row += 1
        self.calls.append(call)
        self.widths.append(k)
        return found


class TableExecutor(Executor):
    """A pipeline of ``latency`` steps that answers with ``table_target``."""

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
            slots = request.tree.slots(rows.node_ids).tolist()
            contexts[rows.request] = {
                node_id: tuple(request.path_tokens(slot).tolist())
                for node_id, slot in zip(rows.node_ids.tolist(), slots, strict=True)
            }
        self._flying.append(contexts)

    def collect(self, *, wait: bool = True) -> Output:
        answers = []
        for request_id, contexts in self._flying.pop(0).items():
            ids = np.array(list(contexts), np.int64)
            tokens = np.array([table_target(c) for c in contexts.values()], np.int64)
            if len(ids):
                answers.append(Answers(request=request_id, node_ids=ids, tokens=tokens))
        return Output(step=self._state.step, answers=tuple(answers))

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in commits:
            for contexts in self._flying:
                before = contexts.get(commit.request, {})
                kept = commit.keeps(np.array(list(before), np.int64))
                contexts[commit.request] = {
                    node_id: before[node_id]
                    for node_id, keep in zip(list(before), kept, strict=True)
                    if keep
                }

    def close(self, request_id: int) -> None:
        for contexts in self._flying:
            contexts.pop(request_id, None)


@dataclass
class Selection:
    """What one ``select`` did for one request; contexts are whole sequences."""

    request: int
    root: Context
    before: dict[Context, bool]
    """Nodes of the tree before it -> expanded."""
    chosen: list[Context]
    calls: int
    """Of the source, for all requests."""


@dataclass
class CheckedPolicy(TreePolicy):
    """Passes calls on to a policy and asserts the first rule of ``check_policy``."""

    policy: TreePolicy
    source: TableSource
    log: list[Selection] = field(default_factory=list)
    overlaps: list[int] = field(default_factory=list)
    """Calls of the source in each ``overlap``."""

    def __post_init__(self) -> None:
        self.value_dependent = self.policy.value_dependent

    def open(self, request: RequestState) -> None:
        self.policy.open(request)

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        before = {r.id: (tree_contexts(r), r.awaiting) for r in state.requests.values()}
        num_calls = len(self.source.calls)
        nodes = self.policy.select(state, source)
        chosen = dict(nodes.items)
        assert len(chosen) == len(nodes.items), "a request is named twice"
        for request in state.requests.values():
            contexts, awaiting = before[request.id]
            ids = chosen.get(request.id, np.zeros(0, np.int64))
            _check_selection(request, ids, awaiting=self.policy.serial and awaiting)
            slots = request.tree.slots(ids).tolist()
            self.log.append(
                Selection(
                    request=request.id,
                    root=tuple(request.tokens.tolist()),
                    before=contexts,
                    chosen=[tuple(request.path_tokens(slot).tolist()) for slot in slots],
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


def _check_selection(request: RequestState, ids: Any, *, awaiting: bool) -> None:
    tree, fault = request.tree, selection_fault(request, ids)
    assert not fault, fault
    if len(ids):
        assert not request.finished, "the request has finished"
        assert not awaiting, "a serial policy submits while answers are awaited"
    pairs = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len({*pairs}) == len(pairs), "two children of a node carry the same token"


def tree_contexts(request: RequestState) -> dict[Context, bool]:
    """Returns the nodes of a request's tree -> whether they are expanded."""
    return {
        tuple(request.path_tokens(slot).tolist()): bool(request.tree.expanded[slot])
        for slot in range(len(request.tree))
    }


@dataclass
class TableRun:
    """What ``run_policy`` has decoded."""

    requests: list[RequestState]
    policy: CheckedPolicy
    source: TableSource
    steps: int


def run_policy(
    policy: TreePolicy,
    *,
    latency: int = 1,
    num_requests: int = 1,
    batch_size: int = 1,
    source: TableSource | None = None,
    max_new_tokens: int = 40,
    prefill_chunk: int = 4,
) -> TableRun:
    """Decodes prompts of 1, 4, 7, ... tokens with the real loop, and checks every selection."""
    source = source or TableSource()
    checked = CheckedPolicy(policy, source)
    requests = [
        RequestState(
            request_id=i,
            prompt=np.arange(i, i + 1 + 3 * i),
            stop=StopRules(max_new_tokens=max_new_tokens),
            sampling=GREEDY,
        )
        for i in range(num_requests)
    ]
    state = _state()
    executor = TableExecutor(state, latency)
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
        verifier=MatchVerifier(),
        executor=executor,
    ):
        steps += 1
        assert steps < _MAX_STEPS, f"no end after {steps} steps"
    return TableRun(requests, checked, source, steps)


def check_policy(
    make: Callable[[], TreePolicy],
    *,
    make_source: Callable[[bool], TableSource] | None = None,
    latencies: Sequence[int] = (1, 4),
) -> None:
    """Checks a policy beside a source, a target and a verifier that are known by table.

    - It chooses nodes of the tree in order, none twice, none before its parent, none beyond the
      last position, none of a request whose prompt is not yet computed or that has finished, and
      none of one that awaits answers if it is ``serial``. Children of a node differ, and no node
      is expanded twice.
    - The output is the target's own, on every latency, alone and in a batch, also with a source
      that knows nothing of a third of the contexts.
    - The same requests get the same trees again, alone or in a batch.

    Args:
        make: makes a new policy; called often.
        make_source: makes the source; its argument says whether it knows nothing of some contexts.
            Default: a ``TableSource``.
        latencies: of the target, in steps.

    Raises:
        AssertionError: names the rule that is broken.
    """

    def source(silent: bool) -> TableSource:
        if make_source is not None:
            return make_source(silent)
        return TableSource(silent=lambda c: silent and sum(c[-2:]) % 3 == 0)

    for latency in latencies:
        logs = []
        for batch_size, silent in ((1, False), (1, False), (2, False), (2, True)):
            done = run_policy(
                make(),
                latency=latency,
                num_requests=3,
                batch_size=batch_size,
                source=source(silent),
                max_new_tokens=20,
                prefill_chunk=99,
            )
            for request in done.requests:
                prompt = request.tokens[: request.num_prompt].tolist()
                assert request.output == table_output(prompt, 20), "not the target's own output"
            log = [s for s in done.policy.log if s.chosen]
            logs.append([[s.chosen for s in log if s.request == r] for r in range(3)])
        assert logs[0] == logs[1], "the same requests get other trees again"
        assert logs[0] == logs[2], "a request's trees depend on what shares its batch"
    filling, over, live = (_request(i, (1, 2, 3), GREEDY) for i in (1, 2, 3))
    state, policy, drafts = _state(), make(), source(False)
    for request in (filling, over, live):
        open_request(state, drafts, request)
        policy.open(request)
    filling.prefill_sent -= 1
    over.cancel()
    nodes = policy.select(state, drafts)
    assert [request for request, _ in nodes.items] == [3], "nodes of a request in prefill or over"


# ---------------------------------------------------------------------- executors


_PASSED_ON = (
    *("latency", "in_flight", "hidden", "early_hidden", "can_poll", "distributed"),
    *("open", "ready", "due_s", "poll", "set_wakeup", "shutdown"),
)


class CheckedExecutor(Executor):
    """Passes calls on to an executor and asserts the order of calls and answers.

    It has the other executor's attributes.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._submitted: list[dict[int, set[int]]] = []  # by batch: request -> nodes
        for name in _PASSED_ON:
            setattr(self, name, getattr(executor, name))

    def submit(self, batch: Batch) -> None:
        self._submitted.append({rows.request: {*rows.node_ids.tolist()} for rows in batch.trees})
        self._executor.submit(batch)

    def collect(self, *, wait: bool = True) -> Output:
        output = self._executor.collect(wait=wait)
        due: dict[int, set[int]] = {}
        if self.latency is None:
            for batch in self._submitted:
                for request_id, nodes in batch.items():
                    due.setdefault(request_id, set()).update(nodes)
        elif len(self._submitted) >= self.latency:
            due = self._submitted.pop(0)
        for answers in output.answers:
            nodes, asked = {*answers.node_ids.tolist()}, due.get(answers.request, set())
            assert len(nodes) == len(answers.node_ids) == len(answers.tokens), "rows of answers"
            assert nodes <= asked, f"answers of nodes {sorted(nodes - asked)}, which are not due"
            for batch in self._submitted:
                batch.get(answers.request, set()).difference_update(nodes)
            asked -= nodes
        if self.latency is not None:
            left = {request_id: nodes for request_id, nodes in due.items() if nodes}
            assert not left, f"no answers of {left} after {self.latency} steps"
        return output

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in commits:
            kept = {*commit.kept_ids.tolist()}
            for batch in self._submitted:
                if commit.request in batch:
                    batch[commit.request] &= kept
        self._executor.commit(commits, output)

    def close(self, request_id: int) -> None:
        for batch in self._submitted:
            batch.pop(request_id, None)
        self._executor.close(request_id)


def check_executor(executor: type[Executor], **keys: Any) -> int:
    """Checks an executor on a small random pair in float64.

    - With a latency, every live node is answered exactly once, that many steps later; without, only
      nodes that were submitted and neither answered nor pruned are answered.
    - Tokens equal those of plain decoding with transformers' own forward, greedy and sampled, for
      single roots, chains and (with a latency) trees that are fed at every step, with two requests
      at once and prompts in chunks. Caches that keep pruned rows show here.

    Args:
        executor: a class with ``plan`` and ``build``.
        keys: of its configuration, for ``plan``.

    Returns:
        Number of requests that were compared.

    Raises:
        AssertionError: names the rule that is broken.
    """
    pair = RandomPair(num_layers=4, draft_layers=3, hidden_size=16, vocab_size=48, logit_scale=4.0)
    oracle = Oracle(pair.target, seed=3)
    samplings = {"greedy": GREEDY, "t=1": TEMPERATURES_AND_FILTERS["t=1"]}
    cases = parity_cases(samplings, per_sampling=3, vocab_size=48, num_tokens=14)
    policies: list[Callable[[], TreePolicy]] = [RootOnly, lambda: Chain(gamma=3)]
    if executor.plan(pair, **keys).latency is not None:
        policies.append(lambda: FixedWidth(width=4, children=3))
    for make in policies:
        bench = Workbench(pair, seed=3)
        parts = bench.parts(
            source=DraftModelSource(runner=bench.draft_runner()),
            policy=make(),
            verifier=MatchVerifier(),
            executor=planned(executor, pair, **keys),
        )
        parts = replace(parts, executor=CheckedExecutor(parts.executor))
        try:
            outputs = decode_cases(parts, cases, batch_size=2, prefill_chunk=4)
        finally:
            parts.executor.shutdown()
        for case in cases:
            expected = oracle.decode(
                prompt_id=case.id, prompt=case.prompt, sampling=case.sampling, stop=case.stop
            )
            what = f"{case.label}, {type(parts.policy).__name__}: not plain decoding's tokens"
            assert outputs[case.id].output == expected.output, what
    return len(policies) * len(cases)
