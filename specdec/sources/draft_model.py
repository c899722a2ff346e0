"""A draft model of its own cache as a source.

Shape letters: W nodes, K candidates, V vocabulary, R rows of one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.attention.kv_cache import TreeCache
from specdec.clocks import CONTROLLER, Work
from specdec.metrics.counters import SourceCounters
from specdec.models import NO_ROWS, ModelRunner
from specdec.parts.fields import Count, validated
from specdec.sampling.candidates import counts_of, top_candidates
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources.draw_guesser import DrawGuesser
from specdec.sources.sampled import sampled_candidates
from specdec.types import NO_NODE, Candidates, Commit, CommitKind, IntArray, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState

_SPARE_NODES = 64  # slots of a new cache beyond the longest sequence; it grows by itself
_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(slots=True)
class _Held:
    """What is kept of one request.

    Attributes:
        cache: keys and values of committed tokens and of nodes.
        transform: the request's own sampling transform.
        logits: node id -> [V] of nodes that were computed as ancestors and not yet asked for.
    """

    cache: TreeCache
    transform: SamplingTransform
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Work:
    """The part of one expand that concerns one request.

    Attributes:
        request, held: whose.
        slots: int64[W], the nodes asked for, in the caller's order.
        prefix: committed tokens that the cache is behind by.
        compute: int64[C], slots to compute, in topological order.
        in_order: whether ``compute`` is exactly ``slots``.
    """

    request: RequestState
    held: _Held
    slots: IntArray
    prefix: IntArray
    compute: IntArray
    in_order: bool


class DraftModelSource:
    """Proposes the most probable, or sampled, next tokens of a smaller model.

    One ``expand`` is one packed forward over the nodes of all requests, plus their ancestors that
    have no entry yet, plus the committed tokens that the cache is behind by. So rows computed =
    distinct nodes expanded (or passed over on the way to one) + catch-up tokens.

    Attributes:
        gives_probs: whether candidates are sampled and come with their whole distribution.
        counters: passes, rows and catch-up rows; ``by_level`` under the runner's name.
    """

    @validated
    def __init__(
        self,
        *,
        runner: ModelRunner,
        sample: bool = False,
        guess_draw: bool = False,
        prefill_chunk: Count = 512,
    ) -> None:
        """Wraps a model.

        Args:
            runner: the draft model, all layers.
            sample: sample candidates without replacement from the draft's distribution, processed
                by the target's own transform, and give that distribution (rejection verifiers).
            guess_draw: put first the token that the target's own keyed draw picks from the draft's
                distribution (Staged Speculative Decoding, future work 1). Lossless under ``match``.
            prefill_chunk: rows per request and pass while it catches up with a long prompt.

        Raises:
            ValueError: for both ``sample`` and ``guess_draw``, or a chunk below 1.
        """
        if sample and guess_draw:
            raise ValueError(
                "guess_draw=true reads the target's draws, which would bias a rejection verifier;"
                " use verifier=match or guess_draw=false"
            )
        self.needs = Needs(target_draws=guess_draw)
        self.counters = SourceCounters(by_level={runner.name: 0})
        self.vocab_size: int | None = runner.vocab_size
        self.gives_probs = sample
        self._runner = runner
        self._prefill_chunk = prefill_chunk
        self._guesser = DrawGuesser() if guess_draw else None
        self._held: dict[int, _Held] = {}
        self._transforms: dict[SamplingParams, SamplingTransform] = {}

    def open(self, request: RequestState) -> None:
        """Allocates the request's cache; the prompt is computed by the first ``expand``."""
        params = request.sampling
        transform = self._transforms.setdefault(params, SamplingTransform(params))
        capacity = request.num_prompt + request.stop.max_new_tokens + _SPARE_NODES
        self._held[request.id] = _Held(self._runner.new_cache(capacity), transform)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Candidates of each node, in one forward where the cache is not far behind.

        Nodes beyond the model's positions get count 0.
        """
        works, skipped = [], []
        start = 0
        for request_id, ids in nodes.items:
            work = self._plan(state.requests[request_id], ids)
            if len(work.slots) < len(ids):
                reachable = self._reachable(work.request, ids)
                skipped.append(start + np.flatnonzero(~reachable))
            start += len(ids)
            works.append(work)
        if skipped:
            return self._without(state, nodes, np.concatenate(skipped), k)
        logits = self._compute(state, works)
        return self._candidates(state, nodes, works, logits, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Moves accepted entries into the prefix and drops what left the tree."""
        for commit in commits:
            held = self._held.get(commit.request)
            if held is None or commit.kind is CommitKind.NONE:
                continue
            held.cache.commit(commit)
            if held.logits:
                kept = set(commit.kept_ids.tolist())
                held.logits = {i: row for i, row in held.logits.items() if i in kept}
            if self._guesser is not None:
                self._guesser.commit(commit)

    def close(self, request_id: int) -> None:
        """Frees the request's cache."""
        self._held.pop(request_id, None)
        if self._guesser is not None:
            self._guesser.close(request_id)

    # ------------------------------------------------------------------ which rows

    def _plan(self, request: RequestState, ids: IntArray) -> _Work:
        """What has to be computed to answer for ``ids``; see ``_Work``."""
        held = self._held[request.id]
        tree, cache = request.tree, held.cache
        slots = tree.slots(ids)
        assert int(slots.min()) >= 0, f"nodes {ids} of request {request.id} left the tree"
        if int(tree.positions.max()) >= self._runner.max_positions:
            ids = ids[self._reachable(request, ids)]
            slots = tree.slots(ids)
        entered = cache.has(ids)
        if entered.any() and any(i not in held.logits for i in ids[entered].tolist()):
            # Asked for a second time: start the tree afresh, since a row's logits are not kept.
            cache.truncate(cache.cached_len)
            held.logits.clear()
            entered[:] = False
        compute = slots if not entered.any() else slots[~entered]
        missing = self._missing_above(request, cache, compute)
        if len(missing):
            compute = np.concatenate([missing, compute])
        if len(compute) > 1 and (compute[1:] < compute[:-1]).any():
            compute = np.unique(compute)
        in_order = compute is slots or (
            len(compute) == len(slots) and bool((compute == slots).all())
        )
        prefix = _NO_TOKENS
        if len(slots) and cache.cached_len < request.prefix_len:
            prefix = request.tokens[cache.cached_len : request.prefix_len]
        return _Work(request, held, slots, prefix, compute, in_order)

    def _missing_above(
        self, request: RequestState, cache: TreeCache, compute: IntArray
    ) -> IntArray:
        """int64[M]: ancestors of ``compute`` that are neither entries nor among them."""
        tree = request.tree
        parents = tree.parents
        wanted = compute
        missing = _NO_TOKENS
        while len(wanted):
            above = parents[wanted]
            above = above[above != NO_NODE]
            above = above[~cache.has(tree.ids[above])] if len(above) else above
            if not len(above):
                break
            wanted = np.setdiff1d(above, np.concatenate([compute, missing]))
            missing = np.concatenate([wanted, missing])
        return missing

    def _reachable(self, request: RequestState, ids: IntArray) -> np.ndarray:
        """bool[W]: nodes at positions that the model has."""
        tree = request.tree
        return tree.positions[tree.slots(ids)] < self._runner.max_positions

    def _without(self, state: DecodeState, nodes: Nodes, skipped: IntArray, k: int) -> Candidates:
        """Answers all nodes but the ``skipped`` rows, which get count 0."""
        keep = np.ones(len(nodes), np.bool_)
        keep[skipped] = False
        left = nodes.where(keep)
        return (
            self.expand(state, left, k).spread(keep) if left.items else Candidates.empty(len(nodes))
        )

    # ------------------------------------------------------------------ the model

    def _compute(self, state: DecodeState, works: Sequence[_Work]) -> torch.Tensor:
        """[W, V]: logits of all nodes asked for, in packed order."""
        self._catch_up(state, works)
        rows, indices, offset = [], [], 0
        for work in works:
            if not len(work.compute):
                continue
            tree = work.request.tree
            parents = tree.parents[work.compute]
            # A root has no parent entry: any id that is no entry stands for the prefix's end.
            parent_ids = np.where(parents == NO_NODE, NO_NODE, tree.ids[parents])
            rows.append(
                work.held.cache.rows(
                    prefix_tokens=work.prefix,
                    node_ids=tree.ids[work.compute],
                    node_tokens=tree.tokens[work.compute],
                    parent_ids=parent_ids,
                    node_positions=tree.positions[work.compute],
                )
            )
            first = offset + len(work.prefix)
            offset = first + len(work.compute)
            indices.append(np.arange(first, offset))
            self.counters.catch_up_rows += len(work.prefix)
        logits = None
        if rows:
            computed = sum(map(len, indices))
            wanted = None if computed == offset else np.concatenate(indices)
            logits = self._runner.forward(rows, logits_rows=wanted).logits
            self._count(state, offset)
        if logits is not None and all(work.in_order for work in works):
            return logits
        return self._gathered(works, logits)

    def _catch_up(self, state: DecodeState, works: Sequence[_Work]) -> None:
        """Computes committed tokens ahead of the nodes while one pass cannot hold both."""
        chunk = self._prefill_chunk
        while True:
            behind = [w for w in works if len(w.prefix) and len(w.prefix) + len(w.compute) > chunk]
            if not behind:
                return
            rows = [w.held.cache.rows(prefix_tokens=w.prefix[:chunk]) for w in behind]
            self._runner.forward(rows, logits_rows=NO_ROWS)
            num_rows = sum(map(len, rows))
            self.counters.catch_up_rows += num_rows
            self._count(state, num_rows)
            for work in behind:
                work.prefix = work.prefix[chunk:]

    def _count(self, state: DecodeState, num_rows: int) -> None:
        self.counters.passes += 1
        self.counters.rows += num_rows
        self.counters.by_level[self._runner.name] += 1
        state.clock.charge(CONTROLLER, Work.DRAFT, num_rows)

    def _gathered(self, works: Sequence[_Work], logits: torch.Tensor | None) -> torch.Tensor:
        """[W, V] in the caller's order; rows of ancestors are put aside for later."""
        asked: list[torch.Tensor] = []
        offset = 0
        for work in works:
            ids = work.request.tree.ids
            stored = work.held.logits
            for row, node_id in enumerate(ids[work.compute].tolist()):
                assert logits is not None
                stored[node_id] = logits[offset + row]
            offset += len(work.compute)
            asked.extend(stored.pop(node_id) for node_id in ids[work.slots].tolist())
        return torch.stack(asked)

    # ------------------------------------------------------------------ from logits to candidates

    def _candidates(
        self,
        state: DecodeState,
        nodes: Nodes,
        works: Sequence[_Work],
        logits: torch.Tensor,
        k: int,
    ) -> Candidates:
        """Applies each request's transform; requests that share one share a call."""
        transform = works[0].held.transform
        if any(work.held.transform is not transform for work in works):
            return self._per_request(state, nodes, works, logits, k)
        histories = None
        if transform.params.needs_history:
            histories = [
                work.request.path_tokens(slot) for work in works for slot in work.slots.tolist()
            ]
        if self.gives_probs:
            probs = transform.proposal_probs(logits, histories)
            return sampled_candidates(state, nodes, probs, k)
        found = top_candidates(transform, logits, k, histories)
        if self._guesser is None or transform.params.greedy:
            return found
        tokens, logprobs = self._guesser.rank(
            state, nodes, transform, logits, histories, found.tokens, found.logprobs
        )
        counts = counts_of(transform, logprobs)
        return Candidates(tokens=tokens, logprobs=logprobs, counts=counts)

    def _per_request(
        self,
        state: DecodeState,
        nodes: Nodes,
        works: Sequence[_Work],
        logits: torch.Tensor,
        k: int,
    ) -> Candidates:
        parts, start = [], 0
        for item, work in zip(nodes.items, works, strict=True):
            stop = start + len(work.slots)
            parts.append(self._candidates(state, Nodes((item,)), [work], logits[start:stop], k))
            start = stop
        return Candidates.joined(parts)
