"""Records what the models of a strategy compute, and checks caches and trees after every step.

All models come from the strategy's pair of models, so wrapping the pair reaches every cache, also
in parts of other packages. The token and the parent of each entry are recorded when its row is
computed, independently of the cache's own bookkeeping.

Shape letters: P paths, L layers, H heads, D head size, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from specdec.attention.tree_attention import TreeCache
from specdec.certify.cases import MIXED_RULES, parity_cases
from specdec.certify.oracle import forward
from specdec.certify.report import Outcome, Skipped, outcome
from specdec.certify.subject import WINDOW, Subject, decode_steps, observe
from specdec.clocks import ClockKind
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts
from specdec.models.config_values import config_value
from specdec.models.runner import ModelRunner
from specdec.models.slicing import cache_argument, hidden_states
from specdec.pairs import RandomPair, build_pair
from specdec.sampling.keyed_draws import Purpose
from specdec.state import DecodeState, RequestState
from specdec.tensor_parallel.collective import Collective
from specdec.tensor_parallel.cuts import HeadSplit
from specdec.types import (
    NO_NODE,
    Candidates,
    Commit,
    CommitKind,
    HiddenName,
    IntArray,
    Nodes,
    TreeRows,
)

TOLERANCE = 1e-6
"""Allowed error in float64, relative to the largest cache entry if that is above 1; transformers'
norms and Gemma's attention compute in float32.
"""

Snapshot = dict[int, tuple[int, int, int]]
"""Node id of a tree -> parent id, token, position."""

_NUM_TOKENS = 12
_SIZES = {"batch_size": 2, "prefill_chunk": 4}


@dataclass(slots=True)
class Shadow:
    """A record of the rows computed into one cache, independent of the cache."""

    cache: TreeCache
    runner: ModelRunner  # the model that fills the cache
    request: RequestState | None  # None if unknown
    heads: tuple[int, ...] | None = None  # a rank's key/value heads, -1 for padding; None: all
    # tree rows by node id: token, parent id, position
    nodes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    real: bool = True  # all node ids were those of the request's tree (not of a source's own)

    def record(self, *, tree: TreeRows | None = None, **_: Any) -> None:
        """Records the rows of nodes that are about to be computed."""
        if tree is None:
            return
        if self.request is None:
            self.real = False
        elif self.real:
            slots = self.request.tree.slots(tree.node_ids)
            same = self.request.tree.tokens[slots] == tree.tokens
            self.real = bool(((slots >= 0) & same).all())
        columns = (tree.node_ids, tree.tokens, tree.parent_ids, tree.positions)
        for node_id, *row in zip(*(column.tolist() for column in columns), strict=True):
            self.nodes[node_id] = tuple(row)

    def path(self, node_id: int, cached_len: int, committed: IntArray) -> tuple[int, ...]:
        """Returns the tokens up to a node: the cached prefix, the node's ancestors and the node."""
        chain = []
        while node_id in self.nodes and self.nodes[node_id][2] >= cached_len:
            token, node_id, _ = self.nodes[node_id]
            chain.append(token)
        return (*committed[:cached_len].tolist(), *reversed(chain))


@dataclass(slots=True)
class Watch:
    """What one run has computed, submitted and proposed; ``proposed`` is by (request, node id)."""

    shadows: list[Shadow] = field(default_factory=list)
    # each request's tree when last submitted, see ``_snapshot``
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    # candidates that an asynchronous source has returned
    proposed: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    is_asynchronous: bool = False
    # the source's passes run in a thread, so its caches change while they would be inspected
    in_thread: bool = False
    _state: DecodeState | None = None

    @property
    def drafts(self) -> list[Shadow]:
        """The caches of draft models that can be inspected between steps."""
        return [s for s in self.shadows if s.runner.name != "target" and not self.in_thread]

    def pair(self, pair: RandomPair) -> None:
        """Observes the model runners that ``pair`` creates from now on."""

        def runner(
            made: ModelRunner, _name: str, _meter: Meter, group: Collective | None = None
        ) -> None:
            self.model(made, None if group is None else _heads(made, pair.draft, group))

        observe(pair, "runner", after=runner)
        observe(pair, "stage", after=lambda stage, *_, **__: self.model(stage.runner))

    def model(self, runner: ModelRunner, heads: tuple[int, ...] | None = None) -> None:
        """Observes the caches that a model creates from now on; ``heads`` is as in ``Shadow``."""

        def cache(cache: TreeCache, *_: Any) -> None:
            # Parts create caches in `open`, for the request that was admitted last.
            requests = [] if self._state is None else list(self._state.requests.values())
            shadow = Shadow(cache, runner, requests[-1] if requests else None, heads)
            self.shadows.append(shadow)
            observe(cache, "rows", before=shadow.record)

        observe(runner, "new_cache", after=cache)

    def parts(self, parts: Parts, state: DecodeState) -> None:
        self._state, levels = state, parts.source.levels
        self.is_asynchronous = levels[0].asynchronous or levels[0] is not parts.source
        self.in_thread = self.is_asynchronous and parts.clock.kind is ClockKind.MEASURED

        def proposes(nodes: Nodes, found: Candidates | None) -> None:
            if found is None:
                return
            for request_id, ids, rows in nodes.packed():
                part = zip(found.tokens[rows].tolist(), found.counts[rows].tolist(), strict=True)
                for node_id, (tokens, count) in zip(ids.tolist(), part, strict=True):
                    self.proposed[request_id, node_id] = tokens[:count]

        def submits(_: Any) -> None:
            for request in state.requests.values():
                self.snapshots[request.id] = _snapshot(request)

        observe(parts.executor, "submit", before=submits)
        if self.is_asynchronous:
            observe(
                parts.source, "expand", after=lambda found, _, nodes, _k: proposes(nodes, found)
            )
            # The candidates of the other levels stay inside them.
            observe(levels[0], "poll", after=lambda found, ticket: proposes(ticket.nodes, found))


def _heads(
    runner: ModelRunner, model: PreTrainedModel, group: Collective
) -> tuple[int, ...] | None:
    """Returns a rank's key/value heads, -1 for padding; None if these heads are not split."""
    config = model.config.get_text_config()
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(config_value(config, "num_key_value_heads", num_heads))
    share = HeadSplit.of(num_heads, num_kv_heads, rank=group.rank, size=group.size).key_value
    if runner.spec.num_kv_heads != len(share):
        return None
    return tuple(-1 if piece.pad else piece.start for piece in share)


def _snapshot(request: RequestState) -> Snapshot:
    tree = request.tree
    parents = np.where(tree.parents == NO_NODE, NO_NODE, tree.ids[tree.parents])
    nodes = zip(parents.tolist(), tree.tokens.tolist(), tree.positions.tolist(), strict=True)
    return dict(zip(tree.ids.tolist(), nodes, strict=True))


class Fresh:
    """Computes keys, values and hidden states by transformers' own forward over whole sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._entries: dict[tuple[int, ...], torch.Tensor] = {}
        self._states: dict[tuple[HiddenName, tuple[int, ...]], torch.Tensor] = {}

    def entries(self, paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Returns [P, L, 2, H, D]: keys and values of the last token of each path."""
        for path in sorted(paths, key=len, reverse=True):
            if path not in self._entries:
                # Made without the config, by which layers with a window drop their first entries.
                cache = DynamicCache()
                forward(self._model, path, use_cache=True, **{cache_argument(self._model): cache})
                both = torch.stack([torch.stack([at.keys, at.values]) for at in cache.layers])
                for length in range(1, len(path) + 1):  # both: [L, 2, 1, H, T, D]
                    self._entries.setdefault(path[:length], both[:, :, 0, :, length - 1])
        return torch.stack([self._entries[path] for path in paths])

    def state(self, tokens: IntArray, name: HiddenName) -> torch.Tensor:
        """Returns [hidden size]: the hidden state ``name`` at the last of ``tokens``."""
        key = name, tuple(tokens.tolist())
        if key not in self._states:
            path = torch.from_numpy(tokens).to(self._model.device)[None]
            self._states[key] = hidden_states(self._model, path, [name])[0][0, -1]
        return self._states[key]


@dataclass(slots=True)
class Observation:
    """Results of the observed runs; ``error`` is the exception that ended them."""

    caches: list[str] = field(default_factory=list)  # problems of caches and hidden states
    trees: list[str] = field(default_factory=list)  # problems
    num_caches: int = 0
    num_entries: int = 0  # cache entries compared
    num_states: int = 0  # hidden states compared
    num_nodes: int = 0  # tree nodes inspected
    error: Exception | None = None

    def outcome(self, problems: list[str], detail: str) -> Outcome:
        if self.error is not None and not problems:
            raise self.error
        return outcome(problems, detail)


def cache_invariant(subject: Subject) -> Outcome:
    seen = subject.once(observation)
    if not (seen.num_entries or seen.num_states or seen.error or seen.caches):
        raise Skipped("no cache in this process to compare")
    states = f" and {seen.num_states} hidden states" if seen.num_states else ""
    windows = f", also with a sliding window of {WINDOW}" if subject.windowed else ""
    detail = f"{seen.num_entries} entries of {seen.num_caches} caches{states} equal fresh forwards"
    return seen.outcome(seen.caches, detail + windows)


def tree_invariant(subject: Subject) -> Outcome:
    seen = subject.once(observation)
    detail = f"{seen.num_nodes} nodes under the right parents after every step"
    return seen.outcome(seen.trees, detail)


def observation(subject: Subject) -> Observation:
    """Decodes a few requests for each kind of pair, and checks caches and trees after each step."""
    seen = Observation()
    try:
        _run(subject, "mixed", seen)
        for kind in subject.windowed:
            _run(subject, kind, seen, f"with a sliding window of {WINDOW}, ")
    except Exception as error:  # keeps the problems of the steps before it
        seen.error = error
    return seen


def _run(subject: Subject, kind: str, seen: Observation, how: str = "") -> None:
    cases = parity_cases(MIXED_RULES, per_sampling=2, num_tokens=_NUM_TOKENS)
    pair = build_pair(subject.model(kind))
    assert isinstance(pair, RandomPair)
    watch = Watch()
    watch.pair(pair)
    fresh = {name: Fresh(pair.model(name)) for name in pair.names}
    with subject.composed(kind, pair=pair) as parts:
        state = parts.new_state()
        watch.parts(parts, state)
        observe(state.draws, "uniform", before=partial(_examine_draw, state, seen.trees))
        for commits in decode_steps(parts, cases, {}, state=state, **_SIZES):
            decided, problems = {commit.request: commit for commit in commits}, list[str]()
            for request in state.requests.values():
                commit = decided.get(request.id)
                if commit is not None:
                    before = watch.snapshots.get(request.id, {})
                    seen.trees += _commit_problems(commit, request, before)
                problems += _state_problems(request, commit, fresh["target"], seen)
                if not request.finished:
                    seen.num_nodes += len(request.tree)
                    seen.trees += _tree_problems(request, watch)
            targets = [s for s in watch.shadows if s.runner.name == "target"]
            for shadow in targets + watch.drafts:
                live = any(r is shadow.request and not r.finished for r in state.requests.values())
                if live and shadow.runner.name in fresh:
                    problems += _cache_problems(shadow, fresh[shadow.runner.name], seen)
            seen.caches += [f"{how}{problem}" for problem in problems]
        seen.num_caches += len(watch.shadows)


def _examine_draw(
    state: DecodeState,
    problems: list[str],
    prompt_id: int,
    positions: IntArray,
    purpose: Purpose,
    *_: Any,
) -> None:
    """Adds a problem if a random number is drawn for a token that is decided already, which may
    depend on it. Passes in other threads are left out, as they may end after the decision.
    """
    request, first = state.requests.get(prompt_id), int(np.min(positions))
    decided = request is not None and first <= request.prefix_len
    if decided and current_thread() is main_thread():
        name = f"a {purpose.name.lower()} draw of position {first}"
        problems.append(f"request {prompt_id}: {name}, whose token is decided already")


def _cache_problems(shadow: Shadow, fresh: Fresh, seen: Observation) -> Iterator[str]:
    """Yields differences of a cache from transformers' forward over the tokens of each entry."""
    cache, request, runner = shadow.cache, shadow.request, shadow.runner
    assert request is not None
    where, tokens = f"{runner.name}'s cache of request {request.id}", request.tokens
    num = cache.cached_len
    if num > request.prefix_len:
        yield f"{where} has {num} prefix tokens, committed are {request.prefix_len}"
        return
    paths = [tuple(tokens[: at + 1].tolist()) for at in range(num)]
    ids = cache.node_ids.tolist()
    slots = request.tree.slots(cache.node_ids).tolist()
    for node_id, slot, position in zip(ids, slots, cache.node_positions.tolist(), strict=True):
        paths.append(shadow.path(node_id, num, tokens))
        if shadow.real and slot < 0:
            yield f"{where} has an entry of node {node_id}, which has left the tree"
            return
        if shadow.real and paths[-1] != tuple(request.path_tokens(slot).tolist()):
            yield f"{where}: node {node_id} was computed on another path than the tree's"
            return
        if position != (right := len(paths[-1]) - 1):
            yield f"{where}: node {node_id} is at position {position} instead of {right}"
            return
    if not paths:
        return
    layers = slice(runner.first_layer, runner.first_layer + runner.num_layers)
    expected = fresh.entries(paths)[:, layers].permute(1, 2, 3, 0, 4)
    entries = cache.storage[:, :, :, : len(paths)]
    if shadow.heads is not None:  # a rank's share, with padding at the end
        heads = [head for head in shadow.heads if head >= 0]
        entries, expected = entries[:, :, : len(heads)], expected[:, :, heads]
    size = expected.abs().amax().clamp(min=1.0)  # rounding is relative to it
    error = (entries - expected).abs().amax(dim=(0, 1, 2, 4)) / size
    seen.num_entries += len(paths)
    at = int(error.argmax())
    if not float(error[at]) <= TOLERANCE:
        entry = f"position {at} of the prefix" if at < num else f"node {ids[at - num]}"
        yield f"{where}: {entry} differs from a fresh forward by {float(error[at]):.1e}"


def _commit_problems(commit: Commit, request: RequestState, before: Snapshot) -> Iterator[str]:
    """Yields faults of the tree before a commit (``before``), and of the nodes that a hit kept."""
    where = f"request {commit.request}, step {commit.step}"
    last = request.num_prompt - 1 + request.stop.max_new_tokens
    for node_id, (_, _, position) in before.items():
        if position > last:
            what = f"node {node_id} is proposed at position {position}, beyond the last that the"
            yield f"{where}: {what} request can emit (last_position)"
    if len(set(before.values())) < len(before):  # no output shows it: rejection skips the second
        yield f"{where}: two children of a node of the submitted tree carry the same token"
    if commit.kind is not CommitKind.HIT or commit.root_id not in before:
        return
    below, kept = {commit.root_id}, {*commit.kept_ids.tolist()}
    for node_id in sorted(before):
        if before[node_id][0] in below:
            below.add(node_id)
    if lost := below - kept:
        yield f"{where}: nodes {sorted(lost)[:3]} under the new root were dropped"
    if stray := (kept & before.keys()) - below:
        yield f"{where}: nodes {sorted(stray)[:3]} were kept, which are not under the new root"
    token = before[commit.root_id][1]
    if token != commit.next_token:
        yield f"{where}: the new root carries token {token} instead of {commit.next_token}"


def _tree_problems(request: RequestState, watch: Watch) -> Iterator[str]:
    """Yields contradictions within a tree, with its state when it was last submitted, and with the
    candidates that an asynchronous source proposed.
    """
    tree, where = request.tree, f"tree of request {request.id}"
    parents, positions = tree.parents, tree.positions
    if int(tree.tokens[0]) != int(request.tokens[-1]) or int(positions[0]) != request.prefix_len:
        yield f"{where}: the root is not the last committed token"
    if int(parents[0]) != NO_NODE:
        yield f"{where}: the root has a parent"
    below = np.arange(1, len(tree))
    orphans = below[(parents[1:] < 0) | (parents[1:] >= below)]
    if len(orphans):
        yield f"{where}: nodes {tree.ids[orphans][:3].tolist()} are not under the root"
        return
    if (positions[1:] != positions[parents[1:]] + 1).any():
        yield f"{where}: a node's position is not its parent's plus one"
    nodes, before = _snapshot(request), watch.snapshots.get(request.id, {})
    if len(set(nodes.values())) != len(nodes):
        yield f"{where}: two children of a node carry the same token"
    for node_id, (parent, token, _) in nodes.items():
        old = before.get(node_id)
        if old is not None and (old[1] != token or (old[0] != parent and parent != NO_NODE)):
            yield f"{where}: node {node_id} has changed its parent or token"
    for slot in np.flatnonzero(tree.expanded).tolist() if watch.is_asynchronous else ():
        node_id = int(tree.ids[slot])
        proposed = watch.proposed.get((request.id, node_id))
        num = None if proposed is None else len(proposed)
        stored = tree.candidate_tokens[slot, :num].tolist()
        if stored != proposed:
            what = f"node {node_id} has the candidates {stored}, the source proposed {proposed}"
            yield f"{where}: {what}"


def _state_problems(
    request: RequestState, commit: Commit | None, fresh: Fresh, seen: Observation
) -> Iterator[str]:
    """Yields a text per hidden state of a live or committed node that ``fresh`` contradicts."""
    tree = request.tree
    stored = [
        (node_id, request.path_tokens(slot), name, state)
        for slot, node_id in enumerate(tree.ids.tolist())
        for name, state in tree.hidden.get(node_id, {}).items()
    ]
    if commit is not None:
        first = commit.prefix_len - len(commit.retired_ids) + 1
        stored += [
            (node_id, request.tokens[:length], name, states[row])
            for name, states in commit.hidden.items()
            for row, node_id in enumerate(commit.retired_ids.tolist())
            if (length := first + row) <= len(request.tokens)  # the others were cut
        ]
    seen.num_states += len(stored)
    for node_id, tokens, name, state in stored:
        expected = fresh.state(tokens, name)
        error = float((state.to(expected.device) - expected).abs().max())
        if not error <= TOLERANCE:
            which = f"tree of request {request.id}: the state of node {node_id}"
            how = f"differs from a fresh forward by {error:.1e}"
            yield f"{which} after layer {name.layer} {how}"
