"""Inspects caches, trees and the rows that the draft computes, after every step.

Shape letters: P paths, L layers, H heads, D head size, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from specdec.certify.cases import MIXED_RULES, parity_cases
from specdec.certify.observing import Shadow, Watch, snapshot
from specdec.certify.report import Check, joined_details
from specdec.certify.subject import WINDOW, Subject, decode_steps
from specdec.models.slicing import cache_argument, hidden_states
from specdec.pairs import RandomPair, build_pair
from specdec.state import RequestState
from specdec.types import NO_NODE, Commit, CommitKind, HiddenName, IntArray

TOLERANCE = 1e-6
"""Allowed error in float64, relative to the largest cache entry if that is above 1; transformers'
norms and Gemma's attention compute in float32.
"""

_NUM_TOKENS = 12
_BATCH = 2
_SMALL_CHUNK = 4


@dataclass(slots=True)
class Observation:
    """Results of the observed runs; ``error`` is the exception that ended them."""

    caches: list[str] = field(default_factory=list)  # problems of caches and hidden states
    trees: list[str] = field(default_factory=list)  # problems
    rows: list[str] = field(default_factory=list)  # problems of the run without a sliding window
    watch: Watch = field(default_factory=Watch)  # of that run
    num_caches: int = 0
    num_entries: int = 0  # cache entries compared
    num_states: int = 0  # hidden states compared
    num_nodes: int = 0  # tree nodes inspected
    error: Exception | None = None

    def check(self, name: str, problems: list[str], detail: str) -> Check:
        if problems:
            return Check(name, False, joined_details(problems))
        if self.error is not None:
            raise self.error
        return Check(name, True, detail)


def cache_invariant(subject: Subject) -> Check:
    seen = observation(subject)
    if not (seen.num_entries or seen.num_states or seen.error or seen.caches):
        return Check("cache_invariant", None, "no cache in this process to compare")
    states = f" and {seen.num_states} hidden states" if seen.num_states else ""
    windows = f", also with a sliding window of {WINDOW}" if subject.windowed else ""
    detail = f"{seen.num_entries} entries of {seen.num_caches} caches{states} equal fresh forwards"
    return seen.check("cache_invariant", seen.caches, detail + windows)


def tree_invariant(subject: Subject) -> Check:
    seen = observation(subject)
    detail = f"{seen.num_nodes} nodes under the right parents after every step"
    return seen.check("tree_invariant", seen.trees, detail)


def draft_rows(subject: Subject) -> Check:
    """Rows computed twice or counted wrongly do not change the output, so they are only a note."""
    seen = observation(subject)
    drafts = seen.watch.drafts
    if not drafts and not seen.error:
        hidden = seen.watch.in_thread
        why = "the draft's passes run in a thread" if hidden else "no draft model in this process"
        return Check("draft_rows", None, why)
    if seen.rows:
        return Check("draft_rows", None, joined_details(seen.rows), note=True)
    nodes, catch_up = sum(s.node_rows for s in drafts), sum(s.catch_up_rows for s in drafts)
    kind = "nodes" if all(s.real for s in drafts) else "nodes, guesses included"
    detail = f"{nodes + catch_up} rows = {nodes} distinct {kind} + {catch_up} catch-up tokens"
    return seen.check("draft_rows", [], detail)


def observation(subject: Subject) -> Observation:
    """Decodes a few requests under observation for each kind of pair, once per subject."""
    if "observation" not in subject.notes:
        seen = subject.notes["observation"] = Observation()
        try:
            _run(subject, "mixed", seen, seen.watch)
            seen.rows += _row_problems(seen.watch)
            for kind in subject.windowed:
                _run(subject, kind, seen, Watch(), f"with a sliding window of {WINDOW}, ")
        except Exception as error:  # keeps the problems of the steps before it
            seen.error = error
    found: Observation = subject.notes["observation"]
    return found


def _run(subject: Subject, kind: str, seen: Observation, watch: Watch, how: str = "") -> None:
    cases = parity_cases(MIXED_RULES, per_sampling=2, num_tokens=_NUM_TOKENS)
    pair = build_pair(subject.model(kind))
    assert isinstance(pair, RandomPair)
    watch.pair(pair)
    fresh = {name: Fresh(pair.model(name)) for name in pair.names}
    with subject.composed(kind, pair=pair) as parts:
        state = parts.new_state()
        watch.parts(parts, state)
        for commits in decode_steps(
            parts, cases, {}, batch_size=_BATCH, prefill_chunk=_SMALL_CHUNK, state=state
        ):
            watch.step(commits)
            decided = {commit.request: commit for commit in commits}
            for commit in commits:
                seen.trees += _commit_problems(commit, watch.snapshots.get(commit.request, {}))
            problems = list[str]()
            for request in state.requests.values():
                last = decided.get(request.id)
                problems += _state_problems(request, last, fresh["target"], seen)
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
        seen.trees += [
            f"tree of request {request}: node {node_id} is proposed at position {position}, beyond"
            " the last that the request can emit (last_position)"
            for (request, node_id), position in watch.beyond.items()
        ]
        watch.counted_rows = parts.source.counters.rows


class Fresh:
    """Computes keys, values and hidden states by transformers' own forward over whole sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._device = model, next(model.parameters()).device
        self._entries: dict[tuple[int, ...], torch.Tensor] = {}
        self._states: dict[tuple[HiddenName, tuple[int, ...]], torch.Tensor] = {}

    def entries(self, paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Returns [P, L, 2, H, D]: keys and values of the last token of each path."""
        for path in sorted(paths, key=len, reverse=True):
            if path not in self._entries:
                # Made without the config, by which layers with a window drop their first entries.
                cache = DynamicCache()
                row = torch.tensor([path], device=self._device)
                with torch.inference_mode():
                    self._model(row, use_cache=True, **{cache_argument(self._model): cache})
                both = torch.stack([torch.stack([at.keys, at.values]) for at in cache.layers])
                for length in range(1, len(path) + 1):  # both: [L, 2, 1, H, T, D]
                    self._entries.setdefault(path[:length], both[:, :, 0, :, length - 1])
        return torch.stack([self._entries[path] for path in paths])

    def state(self, tokens: IntArray, name: HiddenName) -> torch.Tensor:
        """Returns [E]: the hidden state after ``tokens``."""
        key = name, tuple(tokens.tolist())
        if key not in self._states:
            path = torch.from_numpy(tokens).to(self._device)[None]
            self._states[key] = hidden_states(self._model, path, [name])[0][0, -1]
        return self._states[key]


def _cache_problems(shadow: Shadow, fresh: Fresh, seen: Observation) -> Iterator[str]:
    """Yields differences of a cache from fresh forwards over the paths of its entries."""
    cache, request = shadow.cache, shadow.request
    assert request is not None
    where = f"{shadow.runner.name}'s cache of request {request.id}"
    tokens = request.tokens
    if cache.cached_len > request.prefix_len:
        yield f"{where} has {cache.cached_len} prefix tokens, committed are {request.prefix_len}"
        return
    paths = [tuple(tokens[: at + 1].tolist()) for at in range(cache.cached_len)]
    ids = cache.node_ids
    slots = request.tree.slots(ids)
    nodes = zip(ids.tolist(), slots.tolist(), cache.node_positions.tolist(), strict=True)
    for node_id, slot, position in nodes:
        path = shadow.path(node_id, cache.cached_len, tokens)
        if shadow.real and slot < 0:
            yield f"{where} has an entry of node {node_id}, which has left the tree"
            return
        if shadow.real and path != tuple(request.path_tokens(slot).tolist()):
            yield f"{where}: node {node_id} was computed on another path than the tree's"
            return
        if position != len(path) - 1:
            yield f"{where}: node {node_id} is at position {position} instead of {len(path) - 1}"
            return
        paths.append(path)
    if not paths:
        return
    runner = shadow.runner
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
        entry = f"position {at} of the prefix"
        if at >= cache.cached_len:
            entry = f"node {ids[at - cache.cached_len]}"
        yield f"{where}: {entry} differs from a fresh forward by {float(error[at]):.1e}"


def _commit_problems(commit: Commit, before: dict[int, tuple[int, int]]) -> Iterator[str]:
    """Yields faults of the submitted tree (its snapshot ``before``) and of what a hit kept."""
    where = f"request {commit.request}, step {commit.step}"
    if len(set(before.values())) < len(before):  # no output shows it: rejection skips the second
        yield f"{where}: two children of a node of the submitted tree carry the same token"
    if commit.kind is not CommitKind.HIT or commit.root_id not in before:
        return
    below = {commit.root_id}
    for node_id in sorted(before):
        if before[node_id][0] in below:
            below.add(node_id)
    kept = set(commit.kept_ids.tolist())
    if lost := below - kept:
        yield f"{where}: nodes {sorted(lost)[:3]} under the new root were dropped"
    if stray := (kept & before.keys()) - below:
        yield f"{where}: nodes {sorted(stray)[:3]} were kept, which are not under the new root"
    token = before[commit.root_id][1]
    if token != commit.next_token:
        yield f"{where}: the new root carries token {token} instead of {commit.next_token}"


def _tree_problems(request: RequestState, watch: Watch) -> Iterator[str]:
    """Yields inconsistencies of a tree, in itself and with its last snapshot.

    Candidates of an asynchronous source must be those that it proposed for their node.
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
    nodes, before = snapshot(request), watch.snapshots.get(request.id, {})
    if len(set(nodes.values())) != len(nodes):
        yield f"{where}: two children of a node carry the same token"
    for node_id, (parent, token) in nodes.items():
        old = before.get(node_id)
        if old is not None and (old[1] != token or (old[0] != parent and parent != NO_NODE)):
            yield f"{where}: node {node_id} has changed its parent or token"
    for slot in np.flatnonzero(tree.expanded).tolist() if watch.is_asynchronous else ():
        node_id = int(tree.ids[slot])
        proposed = watch.proposed.get((request.id, node_id))
        num = None if proposed is None else len(proposed)
        stored = tree.candidate_tokens[slot, :num].tolist()
        if stored != proposed:
            yield (
                f"{where}: node {node_id} has the candidates {stored}, the source proposed"
                f" {proposed}"
            )


def _row_problems(watch: Watch) -> Iterator[str]:
    """Yields draft rows that were computed in vain, or that the source's count does not match."""
    drafts = watch.drafts
    if not drafts:
        return
    for shadow in drafts:
        if shadow.repeated:
            yield (
                f"{len(shadow.repeated)} node rows of {shadow.runner.name} were computed more than"
                f" once (nodes {sorted(set(shadow.repeated))[:3]})"
            )
        if shadow.real and shadow.repeated_catch_up:
            yield (
                f"{shadow.repeated_catch_up} of {shadow.catch_up_rows} catch-up rows of"
                f" {shadow.runner.name} are of committed tokens computed before"
            )
    rows = sum(watch.num_rows[name] for name in {s.runner.name for s in drafts})
    recorded = sum(s.node_rows + s.catch_up_rows for s in drafts)
    if rows != recorded:
        yield f"the draft's passes have {rows} rows, its caches were given {recorded}"
    if rows != watch.counted_rows:
        yield f"the source counts {watch.counted_rows} rows, its model computed {rows}"
    in_vain = {
        (s.request.id, node_id)
        for s in drafts
        if s.real and s.request is not None
        for node_id in s.nodes
    } - watch.expanded
    if in_vain:
        yield f"{len(in_vain)} computed nodes were not asked for: {sorted(in_vain)[:3]}"


def _state_problems(
    request: RequestState, commit: Commit | None, fresh: Fresh, seen: Observation
) -> Iterator[str]:
    """Yields wrong hidden states of live nodes, and of the nodes that a commit has retired."""
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
            yield (
                f"tree of request {request.id}: the state of node {node_id} after layer"
                f" {name.layer} differs from a fresh forward by {error:.1e}"
            )
