"""A token source that drafts with an EAGLE head from the target's hidden states (features).

The head's row for the token at position p reads the feature of position p - 1. If the target's own
feature has not arrived yet, the head reads its own output instead, for as many levels as are
drafted ahead of the target. When the feature arrives later, the row is recomputed in place, in the
pass of the next nodes; candidates that its node already has, and the outputs of rows below it, do
not change.

Shape letters: W nodes, C nodes that a pass computes, T positions, S feature size, E hidden size of
the head, U draft vocabulary, F rows that read a feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specdec.attention.tree_attention import Rows, TreeCache
from specdec.clocks.meter import Meter
from specdec.device import to_host
from specdec.executors.models import ModelPair
from specdec.models.eagle_runner import METER_NAME, EagleRunner, rewritten
from specdec.parts.fields import Count, validated
from specdec.sources.model_source import CachedModelSource
from specdec.state import DecodeState, RequestState, tree_rows
from specdec.types import BoolArray, Commit, HiddenName, IntArray, Needs, NodeMap, Output

_VERSIONS: dict[str, Literal[1, 3, "mtp"]] = {"eagle": 1, "eagle3": 3, "mtp": "mtp"}
_DROPPED = 32  # positions freed at a time, because freeing copies every stream
_NONE: IntArray = np.zeros(0, np.int64)
_EMPTY = torch.zeros(0, 0)


class EagleSource(CachedModelSource):
    """Proposes the candidates of an EAGLE head of any version, which has its own KV cache.

    A request has candidates once the hidden states of its prompt have arrived. A call of ``expand``
    makes one pass over the nodes of all requests. Further passes before it read long prompts, and
    ancestors that other sources have proposed (one pass per level). The clock counts each as a pass
    of the draft model.

    Args:
        untrained: version of the random head that is made if the pair has no trained one, "eagle"
            (EAGLE-1) or "eagle3". "mtp" instead uses the MTP layer inside the target.
        early: read hidden states when their layer has computed them, not with the answers.
        sample, prefill_chunk: see ``CachedModelSource``.

    Raises:
        UserError: the pair has no hidden states, or no head that fits its target.
    """

    @validated
    def __init__(
        self,
        *,
        pair: ModelPair,
        meter: Meter,
        untrained: Literal["eagle", "eagle3", "mtp"] = "eagle3",
        early: bool = False,
        sample: bool = False,
        prefill_chunk: Count = 512,
    ) -> None:
        runner = pair.artefact(EagleRunner, version=_VERSIONS[untrained], meter=meter)
        self._names = names = runner.names
        super().__init__(
            runner=runner,
            label=METER_NAME,
            needs=Needs(
                hidden=() if early else names, early_hidden=names if early else (), real_nodes=True
            ),
            vocab_size=runner.vocab_size,
            sample=sample,
            prefill_chunk=prefill_chunk,
        )
        if runner.target_ids is not None:
            self._token_ids = to_host(runner.target_ids)
        self._drafts: dict[int, HeadState] = {}
        self._states: NodeMap[Tensor] = NodeMap()  # [E], which the children of a node read

    @property
    def pass_bytes(self) -> int:
        return int(self._runner.weight_bytes)

    def open(self, request: RequestState) -> None:
        super().open(request)
        self._states.open(request.id)
        self._drafts[request.id] = HeadState(
            request=request,
            cache=self._caches[request.id],
            features=Features(self._names),
            states=self._states[request.id],
            logits=self._logits[request.id],
        )

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for chunk in output.prompts:
            if (draft := self._drafts.get(chunk.request)) is not None:
                draft.features.add(chunk.hidden, chunk.start)
        # The head's row for position p reads the feature of p - 1, so its positions are one less.
        super().commit([replace(c, prefix_len=c.prefix_len - 1) for c in commits], output)
        self._states.commit(commits)
        for commit in commits:
            if (draft := self._drafts.get(commit.request)) is not None:
                draft.commit(commit)

    def close(self, request_id: int) -> None:
        super().close(request_id)
        self._states.close(request_id)
        self._drafts.pop(request_id, None)

    # The head.

    def _target_logits(self, logits: Tensor) -> Tensor:
        full: Tensor = self._runner.target_logits(logits)
        return full

    def _can_expand(self, request: RequestState, ids: IntArray) -> BoolArray:
        """Returns bool[W], equal for all nodes: whether the features before the root have arrived.

        Sampled candidates begin only with the second root: in a pipeline the prompt's features
        arrive after the first root was submitted, and outputs must be the same on every executor.
        """
        has_feature = 0 < request.prefix_len <= self._drafts[request.id].features.known
        return np.full(len(ids), has_feature and bool(request.output or not self.gives_probs))

    def _compute(
        self, state: DecodeState, selected: Sequence[tuple[RequestState, IntArray]]
    ) -> Tensor:
        pending = {r.id: self._missing(r, ids) for r, ids in selected}
        drafts = [self._drafts[request.id] for request, _ in selected]
        self._catch_up_prompts(state, drafts, pending)
        current = HeadPass(self._runner)
        for draft in drafts:
            if not draft.cache.num_nodes:
                draft.true_nodes.clear()
            current.add_prefix(draft)
            current.add_corrections(draft)
        while True:
            for draft in drafts:
                slots = pending[draft.request.id]
                pending[draft.request.id] = current.add_nodes(draft, slots)
            if current.num_rows:
                current.run()
                self._charge(state, current.num_rows, current.num_rows - current.num_nodes)
            if not any(map(len, pending.values())):
                break
            current = HeadPass(self._runner)
        wanted = [(self._logits[request.id], ids.tolist()) for request, ids in selected]
        return torch.stack([stored.pop(node) for stored, ids in wanted for node in ids])

    def _catch_up_prompts(
        self, state: DecodeState, drafts: Sequence[HeadState], pending: Mapping[int, IntArray]
    ) -> None:
        """Runs passes over committed tokens until the rest and the nodes fit in one chunk."""
        while True:
            current = HeadPass(self._runner)
            for draft in drafts:
                missing = draft.request.prefix_len - 1 - draft.true_len
                if missing + len(pending[draft.request.id]) > self._chunk:
                    current.add_prefix(draft, limit=self._chunk)
            if not current.num_rows:
                return
            current.run()
            self._charge(state, current.num_rows, current.num_rows)


class Features:
    """Stores the target's hidden states at consecutive positions, from ``first`` on.

    Each name has its own sequence of rows; the rows of one position may arrive at different times.
    A feature concatenates the rows of a position in the order of ``names``, where a name may occur
    twice.
    """

    def __init__(self, names: Sequence[HiddenName]) -> None:
        self.names = tuple(names)
        self._streams: dict[HiddenName, list[Tensor]] = {name: [] for name in names}
        self._counts = dict.fromkeys(self._streams, 0)
        self.first = 0

    @property
    def known(self) -> int:
        """Number of positions, from 0, for which the states of all names have arrived."""
        return self.first + min(self._counts.values())

    def add(self, hidden: Mapping[HiddenName, Tensor], start: int) -> None:
        """Appends states [T, ..] of the positions from ``start`` on, for any of the names."""
        for name, rows in hidden.items():
            if name in self._streams:
                end = self.first + self._counts[name]
                assert start == end, f"states of position {start} follow those of {end - 1}"
                self._streams[name].append(rows)
                self._counts[name] += len(rows)

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns the features of positions ``start`` .. ``stop`` - 1, [stop - start, S]."""
        at = slice(start - self.first, stop - self.first)
        assert 0 <= at.start <= at.stop <= min(self._counts.values()), "positions not stored"
        return torch.cat([self._joined(name)[at] for name in self.names], -1)

    def drop(self, start: int) -> None:
        """Frees the rows of positions before ``start``, if there are at least 32 such positions."""
        num = min(start, self.known) - self.first
        if num < _DROPPED:
            return
        for name in self._streams:
            rest = self._joined(name)[num:]
            # A copy, because a view would keep the whole chunk or batch in memory.
            self._streams[name] = [rest.clone()]
            self._counts[name] -= num
        self.first += num

    def _joined(self, name: HiddenName) -> Tensor:
        parts = self._streams[name]
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]


@dataclass(slots=True, kw_only=True)
class HeadState:
    """What an EAGLE head stores for one request.

    Attributes:
        cache: the head's keys and values; slot s has the token at position s + 1.
        features: the target's features.
        states: node id -> [E], the head's own output at the node.
        logits: node id -> [U], for nodes computed as ancestors of others and not yet expanded.
        true_len: number of entries of the cache's prefix that were computed from the target's
            features.
        true_nodes: ids of the nodes whose entries were computed from the target's features.
    """

    request: RequestState
    cache: TreeCache
    features: Features
    states: dict[int, Tensor]
    logits: dict[int, Tensor]
    true_len: int = 0
    true_nodes: set[int] = field(default_factory=set)

    def commit(self, commit: Commit) -> None:
        """Stores features of committed nodes; ``cache`` must have applied the commit already."""
        num_retired = len(commit.retired_ids)
        self.features.add(commit.hidden, commit.prefix_len - num_retired)
        # Entries computed from features extend the part of the prefix that is final.
        position = commit.prefix_len - num_retired - 1
        for node in commit.retired_ids.tolist():
            if position == self.true_len < self.cache.cached_len and node in self.true_nodes:
                self.true_len += 1
            position += 1
        self.true_nodes &= set(self.cache.node_ids.tolist())
        # A later pass reads features from here on.
        self.features.drop(min(self.true_len, commit.prefix_len - 1))

    def feature(self, slot: int) -> Tensor | None:
        """Returns the target's feature [1, S] of the position before a node, None if missing."""
        tree = self.request.tree
        if slot == 0:
            return self.features.rows(self.request.prefix_len - 1, self.request.prefix_len)
        found = tree.hidden.get(int(tree.ids[tree.parents[slot]]))
        if found is None or any(name not in found for name in self.features.names):
            return None
        return torch.cat([found[name] for name in self.features.names])[None]


class HeadPass:
    """One pass of the head: collects rows of requests, computes them and stores the results.

    ``num_nodes`` of its ``num_rows`` rows are nodes that are computed for the first time.
    """

    def __init__(self, runner: EagleRunner) -> None:
        self.num_rows = self.num_nodes = 0
        self._runner = runner
        self._rows: list[Rows] = []
        self._features: list[Tensor] = []
        self._feature_rows: list[IntArray] = [_NONE]
        self._states: list[Tensor] = []
        self._nodes: list[tuple[HeadState, list[int], BoolArray, int]] = []  # and their first row
        self._logits_rows: list[IntArray] = [_NONE]
        self._logits_of: list[tuple[HeadState, int]] = []

    def add_prefix(self, draft: HeadState, limit: int | None = None) -> None:
        """Adds up to ``limit`` committed tokens not yet computed from the target's features."""
        request, cache, start = draft.request, draft.cache, draft.true_len
        stop = request.prefix_len - 1
        stop = stop if limit is None else min(stop, start + limit)
        if start >= stop:
            return
        tokens = request.tokens[start + 1 : stop + 1]
        num_old = min(stop, cache.cached_len) - start
        if num_old > 0:
            self._append(rewritten(cache, tokens[:num_old], start))
        if num_old < len(tokens):
            self._append(cache.rows(prefix_tokens=tokens[num_old:]))
        self._add_features(draft.features.rows(start, stop), np.arange(stop - start) - len(tokens))
        draft.true_len = stop

    def add_corrections(self, draft: HeadState) -> None:
        """Adds cached nodes that were computed before the target's feature for them had arrived.

        They are recomputed in place, except nodes with an ancestor in a later slot of the cache.
        """
        cache, tree = draft.cache, draft.request.tree
        if not cache.num_nodes or (not tree.hidden and tree.root_id in draft.true_nodes):
            return
        answered = tree.slots(np.array(list(tree.hidden), np.int64))
        late = [0, *np.flatnonzero(np.isin(tree.parents, answered)).tolist()]
        ids = [int(tree.ids[slot]) for slot in late]
        cached = cache.has(np.array(ids, np.int64))
        for slot, node, is_cached in zip(late, ids, cached.tolist(), strict=True):
            if not is_cached or node in draft.true_nodes:
                continue
            feature = draft.feature(slot)
            entry = cache.cached_len + int(np.flatnonzero(cache.node_ids == node)[0])
            before = cache.node_ids[: entry + 1 - cache.cached_len]
            visible = np.isin(before, tree.ids[tree.path(slot)])[None]
            if feature is None or int(visible.sum()) != int(tree.depths[slot]) + 1:
                continue
            rows = Rows(
                cache=cache,
                tokens=tree.tokens[[slot]],
                positions=tree.positions[[slot]] - 1,
                node_ids=np.array([node]),
                num_prefix=0,
                start=entry,
                first_masked=cache.cached_len,
                visible=visible,
            )
            wants = [node] if node in draft.logits else []
            self._append(rows, (draft, [node], np.ones(1, np.bool_)), wants)
            self._add_features(feature, np.array([-1]))

    def add_nodes(self, draft: HeadState, pending: IntArray) -> IntArray:
        """Adds those of the nodes ``pending``, int64[C] sorted slots, whose input is known.

        The input is the target's feature or the parent's output. Returns the remaining nodes.
        """
        if not len(pending):
            return pending
        tree, cache = draft.request.tree, draft.cache
        rows = tree_rows(draft.request, pending)
        above = rows.parent_ids.tolist()
        features = {
            row: feature
            for row, slot in enumerate(pending.tolist())
            if (not slot or tree.hidden) and (feature := draft.feature(slot)) is not None
        }
        now = [row for row in range(len(above)) if row in features or above[row] in draft.states]
        if not now:
            return pending
        # The head's positions are one less than the tree's.
        rows = replace(rows.take(np.array(now)), prefix_len=rows.prefix_len - 1)
        ids = rows.node_ids.tolist()
        is_true = np.array([row in features for row in now])
        self._append(cache.rows(tree=rows), (draft, ids, is_true), ids)
        if features:
            at = np.flatnonzero(is_true) - len(ids)
            self._add_features(torch.cat([features[r] for r in now if r in features]), at)
        if not is_true.all():
            parents = [above[row] for row in now if row not in features]
            self._states.append(torch.stack([draft.states[node] for node in parents]))
        self.num_nodes += len(ids)
        return np.delete(pending, now)

    def run(self) -> None:
        """Computes the rows, and stores states and logits in the nodes' ``HeadState``."""
        out = self._runner.forward(
            self._rows,
            features=_joined(self._features),
            feature_rows=np.concatenate(self._feature_rows),
            states=_joined(self._states),
            logits_rows=np.concatenate(self._logits_rows),
        )
        for draft, ids, is_true, start in self._nodes:
            draft.states.update(zip(ids, out.states[start : start + len(ids)], strict=True))
            draft.true_nodes.update(node for node, t in zip(ids, is_true, strict=True) if t)
        for (draft, node), logits in zip(self._logits_of, out.logits, strict=True):
            draft.logits[node] = logits

    def _append(
        self,
        rows: Rows,
        nodes: tuple[HeadState, list[int], BoolArray] | None = None,
        wants: Sequence[int] = (),
    ) -> None:
        """Appends rows of one request to the pass.

        For rows that are nodes, ``nodes`` has the head state, the node ids, and whether each is
        computed from a feature; ``wants`` has the ids of the nodes if their logits are needed.
        """
        start = self.num_rows
        self.num_rows += len(rows)
        self._rows.append(rows)
        if nodes is not None:
            self._nodes.append((*nodes, start))
            self._logits_of += [(nodes[0], node) for node in wants]
        if wants:
            self._logits_rows.append(np.arange(start, self.num_rows))

    def _add_features(self, features: Tensor, from_end: IntArray) -> None:
        """Sets the features [F, S] of F appended rows; ``from_end`` has their negative indices."""
        self._features.append(features)
        self._feature_rows.append(self.num_rows + from_end)


def _joined(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else _EMPTY
