"""Checks a single source, policy or executor by the rules on which the decode loop relies.

A part that breaks a rule can still pass ``specdec verify``, because other parts hide the fault:
candidates that depend on pruned branches, for example, only lower the acceptance. These checks call
a part alone, with random trees, commits and batches, or with other parts that are fixed tables, and
raise an AssertionError that names the broken rule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from specdec.attention.tree_attention import EMPTY
from specdec.certify.cases import GREEDY, TEMPERATURES_AND_FILTERS, Case, Decoded, parity_cases
from specdec.certify.oracle import Oracle, plain_decode
from specdec.certify.subject import decode_steps, observe
from specdec.clocks import MeasuredClock
from specdec.clocks.meter import Meter
from specdec.compose.borders import candidates_fault, selection_fault
from specdec.compose.workbench import Workbench, planned
from specdec.device import on_host
from specdec.interfaces import Executor, TokenSource, TreePolicy
from specdec.pairs import RandomPair, TablePair
from specdec.policies import Chain, FixedWidth, RootOnly
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams
from specdec.sources import DraftModelSource
from specdec.state import DecodeState, RequestState, StopRules
from specdec.tree import TokenTree
from specdec.types import Answers, Candidates, Commit, IntArray, Nodes, Output, Verdict
from specdec.verifiers import MatchVerifier

_SAMPLING = SamplingParams(temperature=0.7, top_k=10, top_p=0.9)
_REQUESTS = (4001, 4002)
_MAX_STEPS = 5000
_TABLE_VOCAB = 20

Context = tuple[int, ...]  # tokens of a prompt and of what follows it


def check_source(
    make: Callable[[], TokenSource],
    *,
    vocab_size: int,
    sampling: SamplingParams = _SAMPLING,
    memory: bool = False,
    tolerance: float = 1e-10,
) -> int:
    """Checks a token source on random trees of two requests, with commits in between.

    - The source returns a row per node: at most ``k`` different tokens with log-probabilities of
      at most 0, and distributions that sum to 1 if its attribute ``gives_probs`` is True.
    - Candidates depend on the tokens up to the node alone: they equal those of a new source whose
      prompt ends with the node, whatever was expanded, accepted or rejected before.
    - A closed request leaves no state: a later one of the same id gets a new source's candidates.

    Args:
        make: makes a new source; called often.
        vocab_size: number of tokens of the random prompts and trees.
        sampling: sampling parameters of the requests, for sources that sample.
        memory: whether earlier text may change the candidates (a cache of suffixes); the second and
            third rule are then not checked.
        tolerance: allowed difference of log-probabilities and probabilities.

    Returns the number of nodes that were expanded.
    """
    rng, source, state, num_nodes = np.random.default_rng(0), make(), _state(), 0

    def check_as_new(row: Candidates, request_id: int, path: IntArray, k: int, what: str) -> None:
        other, fresh_state = make(), _state()
        open_request(fresh_state, other, _request(request_id, path, sampling))
        fresh = expand(fresh_state, other, {request_id: [0]}, k)
        num = int(fresh.counts[0])
        assert row.counts[0] == num, what
        assert row.tokens[0, :num].tolist() == fresh.tokens[0, :num].tolist(), what
        pairs = [(row.logprobs[0, :num], fresh.logprobs[0, :num])]
        if row.probs is not None and fresh.probs is not None:
            pairs.append((on_host(row.probs)[0], on_host(fresh.probs)[0]))
        assert all(np.allclose(*pair, atol=tolerance, rtol=0.0) for pair in pairs), what

    for request_id in _REQUESTS:
        prompt = rng.integers(0, vocab_size, rng.integers(1, 40))
        open_request(state, source, _request(request_id, prompt, sampling))
    for slots, k, found in expansions(state, source, rng, vocab_size):
        nodes = [(request_id, slot) for request_id, own in slots.items() for slot in own]
        num_nodes += len(nodes)
        fault = candidates_fault(found, source.vocab_size, state, nodes, k)
        assert not fault, fault
        has, stated = found.probs is not None, source.gives_probs
        assert has == stated or not found.counts.any(), f"gives_probs={stated}, probs given: {has}"
        if found.probs is not None:
            rows = on_host(found.probs)[found.counts > 0]
            assert np.allclose(rows.sum(axis=1), 1.0, atol=1e-6), "probs must sum to 1"
        for row, (request_id, slot) in enumerate(() if memory else nodes):
            path = state.requests[request_id].path_tokens(slot)
            what = f"the candidates after {path.tolist()} depend on more than these tokens"
            check_as_new(found.take(np.array([row])), request_id, path, k, what)
    for request_id in _REQUESTS:
        source.close(request_id)
        del state.requests[request_id]
    source.close(_REQUESTS[0])  # a second time: nothing is left to close
    if not memory:
        path = rng.integers(0, vocab_size, 12)
        open_request(state, source, _request(_REQUESTS[0], path, sampling))
        found = expand(state, source, {_REQUESTS[0]: [0]}, 3)
        what = "a closed request has left something to the next one with its id"
        check_as_new(found, _REQUESTS[0], path, 3, what)
    return num_nodes


def _state() -> DecodeState:
    return DecodeState(draws=KeyedDraws(seed=0), clock=MeasuredClock(), meter=Meter())


def _request(request_id: int, prompt: IntArray, sampling: SamplingParams) -> RequestState:
    stop = StopRules(max_new_tokens=200)
    return Case(request_id, "", tuple(prompt.tolist()), sampling, stop).request()


def open_request(state: DecodeState, source: TokenSource, request: RequestState) -> RequestState:
    request.prefill_sent = request.num_prefill  # the target has seen the prompt
    state.requests[request.id] = request
    source.open(request)
    return request


def expand(
    state: DecodeState, source: TokenSource, slots: Mapping[int, Sequence[int]], k: int
) -> Candidates:
    """Expands nodes (``slots``: request id -> indices in its tree) and stores their candidates."""
    nodes = Nodes(tuple((i, state.requests[i].tree.ids[list(own)]) for i, own in slots.items()))
    candidates, num = source.expand(state, nodes, k), len(nodes)
    sizes = {len(candidates.tokens), len(candidates.counts)}
    assert sizes == {num}, f"{num} nodes must give {num} rows"
    state.set_candidates(nodes, candidates)
    return candidates


def commit(
    state: DecodeState,
    sources: Sequence[TokenSource],
    request_id: int,
    path: Sequence[int],
    token: int,
) -> Commit:
    """Commits nodes at tree indices ``path`` (without root), and ``token`` as the next token."""
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
    """Returns tree indices of a path below the root, and a next token, often in the tree."""
    path, children = list[int](), tree.children(0)
    while len(children) and rng.random() < 0.6:
        path.append(int(rng.choice(children)))
        children = tree.children(path[-1])
    if len(children) and rng.random() < 0.6:
        return path, int(tree.tokens[rng.choice(children)])
    return path, int(rng.integers(vocab_size))


def _grow(tree: TokenTree, rng: np.random.Generator, vocab_size: int) -> None:
    """Turns random candidates into nodes, and sometimes adds a child below an unexpanded node."""
    slots, columns = np.nonzero(tree.candidate_logprobs > -np.inf)
    chosen = rng.permutation(len(slots))[: rng.integers(0, 5)]
    tree.take(slots[chosen], columns[chosen])
    free = np.flatnonzero(~tree.expanded)
    if len(free) and rng.random() < 0.5:
        parent = rng.choice(free, 1)
        if not len(tree.children(int(parent[0]))):
            tree.append(parent, rng.integers(0, vocab_size, 1), np.array([-1.0]))


def expansions(
    state: DecodeState, source: TokenSource, rng: np.random.Generator, vocab_size: int
) -> Iterator[tuple[dict[int, list[int]], int, Candidates]]:
    """Yields random expansions (request -> tree indices, k, candidates); commits between rounds."""
    for _ in range(5):
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
        for request_id, request in state.requests.items():
            commit(state, [source], request_id, *random_path(request.tree, rng, vocab_size))


@cache
def _table_pair() -> TablePair:
    """Returns a target whose best token has 2/3 of the probability; its draft is not used."""
    probs = np.random.default_rng(0).dirichlet(np.full(_TABLE_VOCAB, 0.04), _TABLE_VOCAB)
    table = np.log(probs + 1e-6).tolist()
    return TablePair(target=table, draft=table)


@cache
def table_children(context: Context, salt: int = 0) -> tuple[tuple[int, float], ...]:
    """Returns a draft's (token, logprob) pairs, best first; ``salt`` seeds its deviation."""
    noise = np.random.default_rng((salt, *context)).normal(size=_TABLE_VOCAB)
    logits = _table_pair().target_table[context[-1] % _TABLE_VOCAB].numpy() / 2 + noise
    logprobs = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-logprobs, kind="stable")
    return tuple((int(t), float(logprobs[t])) for t in order)


def _contexts(request: RequestState, ids: IntArray) -> list[Context]:
    slots = request.tree.slots(ids).tolist()
    return [tuple(request.path_tokens(slot).tolist()) for slot in slots]


def tree_contexts(request: RequestState) -> dict[Context, bool]:
    """Maps each node of a request's tree, as the tokens up to it, to whether it is expanded."""
    contexts = _contexts(request, request.tree.ids)
    return dict(zip(contexts, request.tree.expanded.tolist(), strict=True))


class TableSource(TokenSource):
    """A source that proposes the entries of ``table`` (context -> [(token, logprob)]).

    It proposes nothing for ``silent`` contexts. For each call of ``expand``, ``calls`` has
    {request: contexts of its nodes} and ``widths`` has ``k``. ``expand`` raises AssertionError for
    no nodes, a request named twice, or a node that got candidates before.
    """

    def __init__(
        self,
        *,
        silent: Callable[[Context], bool] = lambda _: False,
        table: Callable[[Context], Sequence[tuple[int, float]]] = table_children,
    ) -> None:
        self.vocab_size = _TABLE_VOCAB
        self.silent, self.table = silent, table
        self.calls: list[dict[int, list[Context]]] = []
        self.widths: list[int] = []
        self._answered: set[tuple[int, int]] = set()

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        assert len(nodes), "a source is called without nodes"
        assert len({r for r, _ in nodes.items}) == len(nodes.items), "a request is named twice"
        assert all(len(ids) for _, ids in nodes.items), "a request without nodes must be left out"
        call = {r: _contexts(state.requests[r], ids) for r, ids in nodes.items}
        keys = [(r, node_id) for r, ids in nodes.items for node_id in ids.tolist()]
        contexts = [context for own in call.values() for context in own]
        found = Candidates.empty(len(nodes), k)
        for row, (key, context) in enumerate(zip(keys, contexts, strict=True)):
            if self.silent(context):
                continue
            assert key not in self._answered, "a node is expanded twice"
            self._answered.add(key)
            best = self.table(context)[:k]
            found.counts[row] = len(best)
            found.tokens[row, : len(best)] = [token for token, _ in best]
            found.logprobs[row, : len(best)] = [logprob for _, logprob in best]
        self.calls.append(call)
        self.widths.append(k)
        return found


@dataclass
class Selection:
    """What one call of the policy's ``select`` did for one request."""

    request: int
    root: Context
    before: dict[Context, bool]  # nodes of the tree before it -> expanded
    chosen: list[Context]
    calls: int  # of the source, for all requests


@dataclass
class TableRun:
    requests: list[RequestState]
    log: list[Selection] = field(default_factory=list)
    overlaps: list[int] = field(default_factory=list)  # calls of the source in each ``overlap``
    steps: int = 0


def _table_cases(num: int, max_new_tokens: int) -> list[Case]:
    stop, sampling = StopRules(max_new_tokens=max_new_tokens), TEMPERATURES_AND_FILTERS["t=1"]
    return [Case(i, "", tuple(range(i, i + 1 + 3 * i)), sampling, stop) for i in range(num)]


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
    """Decodes prompts of 1, 4, 7, ... tokens with the decode loop; checks every ``select``."""
    asked = source or TableSource()
    done = TableRun([case.request() for case in _table_cases(num_requests, max_new_tokens)])
    before, num_calls = dict[int, tuple[dict[Context, bool], bool]](), 0

    def starts(state: DecodeState, *_: object) -> None:
        nonlocal num_calls
        before.update({r.id: (tree_contexts(r), r.awaiting) for r in state.requests.values()})
        num_calls = len(asked.calls)

    def selected(nodes: Nodes, state: DecodeState, _: TokenSource) -> None:
        chosen = dict(nodes.items)
        assert len(chosen) == len(nodes.items), "a request is named twice"
        for request in state.requests.values():
            contexts, awaiting = before[request.id]
            tree, ids = request.tree, chosen.get(request.id, EMPTY)
            fault = selection_fault(request, ids)
            assert not fault, fault
            assert not (len(ids) and request.finished), "the request has finished"
            waits = policy.serial and awaiting
            assert not (len(ids) and waits), "a serial policy submits while answers are awaited"
            pairs = {*zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)}
            assert len(pairs) == len(tree), "two children of a node carry the same token"
            root, calls = tuple(request.tokens.tolist()), len(asked.calls) - num_calls
            done.log.append(Selection(request.id, root, contexts, _contexts(request, ids), calls))

    def overlapped(*_: object) -> None:
        done.overlaps.append(len(asked.calls) - num_calls)

    observe(policy, "select", before=starts, after=selected)
    observe(policy, "overlap", before=starts, after=overlapped)
    parts = Workbench(_table_pair()).parts(
        source=asked, policy=policy, verifier=MatchVerifier(), stages=latency
    )
    state = parts.new_state()
    for _ in parts.decode(state, done.requests, batch_size=batch_size, prefill_chunk=prefill_chunk):
        assert state.step < _MAX_STEPS, f"no end after {state.step} steps"
    done.steps = state.step
    return done


def check_policy(
    make: Callable[[], TreePolicy],
    *,
    make_source: Callable[[bool], TableSource] | None = None,
    latencies: Sequence[int] = (1, 4),
) -> None:
    """Checks a policy with a source and a target that are fixed tables.

    - The policy chooses nodes in order, none twice, none before its parent, none beyond the
      last position, none of a request whose prompt is not yet computed or that has finished, and
      none of one that awaits answers if the policy is ``serial``. Children of a node differ, and no
      node is expanded twice.
    - The output is plain decoding's, at every latency, alone and in a batch, also with a source
      that proposes nothing after a third of the contexts.
    - The same requests get the same trees in a second run, alone or in a batch.

    Args:
        make: makes a new policy; called often.
        make_source: makes the source; with True, one that proposes nothing after some contexts.
        latencies: of the target, in steps.
    """

    source = make_source or (
        lambda silent: TableSource(silent=lambda c: silent and sum(c[-2:]) % 3 == 0)
    )
    filling, over, live = (_request(i, np.array([1, 2, 3]), GREEDY) for i in (1, 2, 3))
    state, policy, drafts = _state(), make(), source(False)
    for request in (filling, over, live):
        open_request(state, drafts, request)
        policy.open(request)
    filling.prefill_sent -= 1
    over.cancel()
    nodes = policy.select(state, drafts)
    assert [request for request, _ in nodes.items] == [3], "nodes of a request in prefill or over"
    table = _table_pair().target_table.numpy()
    plain = [plain_decode(lambda t: table[t[-1]], case, 0).output for case in _table_cases(3, 20)]
    sizes = {"num_requests": 3, "max_new_tokens": 20, "prefill_chunk": 99}
    for latency in latencies:
        logs = []
        for batch_size, silent in ((1, False), (1, False), (2, False), (2, True)):
            given = {"latency": latency, "batch_size": batch_size, **sizes}
            done = run_policy(make(), source=source(silent), **given)
            outputs = [tuple(request.output) for request in done.requests]
            assert outputs == plain, "not the target's own output"
            log = [s for s in done.log if s.chosen]
            logs.append([[s.chosen for s in log if s.request == r] for r in range(3)])
        assert logs[0] == logs[1], "the same requests get other trees again"
        assert logs[0] == logs[2], "a request's trees depend on what shares its batch"


def _check_answers(executor: Executor, state: DecodeState) -> None:
    """Makes each later ``collect`` assert the first rule of ``check_executor``."""

    def collected(output: Output, **_: bool) -> None:
        steps, answered = executor.latency, set[tuple[int, int]]()
        for answers in output.answers:
            assert len(answers.node_ids) == len(answers.tokens), "rows of answers"
            answered |= {(answers.request, node) for node in answers.node_ids.tolist()}
        num_answers = sum(len(answers.tokens) for answers in output.answers)
        assert len(answered) == num_answers, "a node is answered twice"
        waiting = dict[tuple[int, int], int]()  # (request, node) without an answer -> its step
        for request in state.requests.values():
            tree = request.tree
            for slot in np.flatnonzero((tree.submitted_at >= 0) & ~tree.answered).tolist():
                waiting[request.id, int(tree.ids[slot])] = int(tree.submitted_at[slot])
        due = {node for node, at in waiting.items() if steps in (None, state.step - at + 1)}
        early = sorted(node for _, node in answered - due)
        assert not early, f"answers of nodes {early}, which are not due"
        late = due - answered
        assert steps is None or not late, f"no answers of {late} after {steps} steps"

    observe(executor, "collect", after=collected)


def check_executor(executor: type[Executor], **keys: Any) -> int:
    """Checks an executor on a small random pair in float64.

    - With a fixed latency, every node not pruned is answered exactly once, that many steps later;
      otherwise only submitted nodes are answered that were neither answered nor pruned before.
    - Tokens equal those of plain decoding with transformers' own forward, greedy and sampled, for
      single roots, chains and (with a latency) trees submitted at every step, with two requests
      at once and prompts in chunks. Caches that keep pruned rows show here.

    ``keys`` are the executor's configuration. Returns the number of requests that were compared.
    """
    pair = RandomPair(num_layers=4, draft_layers=3, hidden_size=16, vocab_size=48, logit_scale=4.0)
    oracle = Oracle(pair.target, seed=3)
    samplings = {"greedy": GREEDY, "t=1": TEMPERATURES_AND_FILTERS["t=1"]}
    cases = parity_cases(samplings, per_sampling=3, vocab_size=48, num_tokens=14)
    policies: list[TreePolicy] = [RootOnly(), Chain(gamma=3)]
    if executor.plan(pair, **keys).latency is not None:
        policies.append(FixedWidth(width=4, children=3))
    for policy in policies:
        bench = Workbench(pair, seed=3)
        parts = bench.parts(
            source=DraftModelSource(runner=bench.draft_runner()),
            policy=policy,
            verifier=MatchVerifier(),
            executor=planned(executor, pair, **keys),
        )
        state, outputs = parts.new_state(), dict[int, Decoded]()
        _check_answers(parts.executor, state)
        sizes = {"batch_size": 2, "prefill_chunk": 4}
        try:
            for _ in decode_steps(parts, cases, outputs, state=state, **sizes):
                pass
        finally:
            parts.executor.shutdown()
        for case in cases:
            what = f"{case.label}, {type(policy).__name__}: not plain decoding's tokens"
            found = [one.text for one in oracle.differences(case, outputs.get(case.id))]
            assert not found, f"{what}: {found}"
    return len(policies) * len(cases)
