"""The rows of one pass of an EAGLE head, over the requests that share it.

Shape letters: W nodes, S feature size, E hidden size of the head, U draft vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.attention.kv_cache import Rows
from specdec.models.eagle_runner import EagleRunner, rewritten
from specdec.sources.eagle_state import Draft
from specdec.types import BoolArray, IntArray

if TYPE_CHECKING:
    from specdec.state import RequestState

_NONE: IntArray = np.zeros(0, np.int64)
_EMPTY = torch.zeros(0, 0)


class HeadPass:
    """Collects rows, runs them once and stores what they give.

    Attributes:
        num_rows: rows of the pass.
        num_nodes: those of nodes that are computed for the first time.
    """

    def __init__(self, runner: EagleRunner) -> None:
        """Begins an empty pass of ``runner``."""
        self.num_rows = self.num_nodes = 0
        self._runner = runner
        self._rows: list[Rows] = []
        self._features: list[Tensor] = []
        self._feature_rows: list[IntArray] = [_NONE]
        self._states: list[Tensor] = []
        self._nodes: list[tuple[Draft, list[int], BoolArray, int]] = []  # and their first row
        self._logits_rows: list[IntArray] = [_NONE]
        self._logits_of: list[tuple[Draft, int]] = []

    @property
    def num_logits(self) -> int:
        """Rows whose logits the pass computes."""
        return len(self._logits_of)

    def add_prefix(self, request: RequestState, draft: Draft, limit: int | None = None) -> None:
        """Adds committed tokens whose entries are missing, or were computed without features.

        Args:
            request: the request.
            draft: the head's state for it.
            limit: maximum number of rows. Default: all.
        """
        cache, start = draft.cache, draft.true_len
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

    def add_corrections(self, request: RequestState, draft: Draft) -> None:
        """Adds nodes whose entries were computed before the feature above them had arrived.

        An entry is computed again in place if the entries of its ancestors lie before it.
        """
        cache, tree = draft.cache, request.tree
        if not cache.num_nodes or (not tree.hidden and tree.root_id in draft.true_nodes):
            return
        answered = tree.slots(np.array(list(tree.hidden), np.int64))
        late = [0, *np.flatnonzero(np.isin(tree.parents, answered)).tolist()]
        ids = [int(tree.ids[slot]) for slot in late]
        held = cache.has(np.array(ids, np.int64))
        for slot, node, is_held in zip(late, ids, held.tolist(), strict=True):
            if not is_held or node in draft.true_nodes:
                continue
            feature = self._feature(request, draft, slot)
            entry = cache.cached_len + int(np.flatnonzero(cache.node_ids == node)[0])
            columns = tree.slots(cache.node_ids[: entry + 1 - cache.cached_len])
            visible = tree.ancestor_mask(np.array([slot]))[:, columns]
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
            self._append(rows, nodes=(draft, [node], np.ones(1, np.bool_)), wants=wants)
            self._add_features(feature, np.array([-1]))

    def add_nodes(self, request: RequestState, draft: Draft, pending: IntArray) -> IntArray:
        """Adds the nodes of ``pending`` whose parents' states are known.

        Args:
            request: the request.
            draft: the head's state for it.
            pending: int64[C], slots, sorted.

        Returns:
            The others, which a later pass computes.
        """
        if not len(pending):
            return pending
        tree, cache = request.tree, draft.cache
        parent_ids = tree.rows_of(pending)[2]
        features = {
            row: feature
            for row, slot in enumerate(pending.tolist())
            if (not slot or tree.hidden)
            and (feature := self._feature(request, draft, slot)) is not None
        }
        above = parent_ids.tolist()
        now = [row for row in range(len(above)) if row in features or above[row] in draft.states]
        if not now:
            return pending
        slots, late = pending, _NONE
        if len(now) < len(pending):
            slots, late = pending[now], np.delete(pending, now)
        node_ids, tokens, parent_ids, positions = tree.rows_of(slots)
        rows = cache.rows(
            node_ids=node_ids,
            node_tokens=tokens,
            parent_ids=parent_ids,
            node_positions=positions - 1,
        )
        ids = node_ids.tolist()
        is_true = np.array([row in features for row in now])
        self._append(rows, nodes=(draft, ids, is_true), wants=ids)
        if features:
            at = np.flatnonzero(is_true) - len(ids)
            self._add_features(torch.cat([features[r] for r in now if r in features]), at)
        if not is_true.all():
            self._states.append(draft.states.get([above[r] for r in now if r not in features]))
        self.num_nodes += len(ids)
        return late

    def run(self, *, keep: bool) -> Tensor:
        """[.., U]: logits of all nodes of the pass, in the order in which they were added.

        Args:
            keep: also store them with the drafts.
        """
        out = self._runner.forward(
            self._rows,
            features=_joined(self._features),
            feature_rows=np.concatenate(self._feature_rows),
            states=_joined(self._states),
            logits_rows=np.concatenate(self._logits_rows),
        )
        for draft, ids, is_true, start in self._nodes:
            draft.states.put(ids, out.states[start : start + len(ids)])
            draft.true_nodes.update(node for node, t in zip(ids, is_true, strict=True) if t)
        for row, (draft, node) in enumerate(self._logits_of):
            if keep or node in draft.logits:
                draft.logits[node] = out.logits[row]
        return out.logits

    def _append(
        self,
        rows: Rows,
        *,
        nodes: tuple[Draft, list[int], BoolArray] | None = None,
        wants: list[int] | None = None,
    ) -> None:
        """Adds rows, which are ``nodes`` (draft, ids, computed from a feature).

        ``wants``: none or all of the nodes, whose logits are needed.
        """
        start = self.num_rows
        self.num_rows += len(rows)
        self._rows.append(rows)
        if nodes is not None:
            self._nodes.append((*nodes, start))
            if wants:
                self._logits_rows.append(np.arange(start, self.num_rows))
                self._logits_of += [(nodes[0], node) for node in wants]

    def _add_features(self, features: Tensor, from_end: IntArray) -> None:
        """Sets the features [F, S] of rows, counted from the end of the rows added so far."""
        self._features.append(features)
        self._feature_rows.append(self.num_rows + from_end)

    def _feature(self, request: RequestState, draft: Draft, slot: int) -> Tensor | None:
        """[1, S]: the target's feature of the position before a node; None if it is not there."""
        tree = request.tree
        if slot == 0:
            return draft.features.rows(request.prefix_len - 1, request.prefix_len)
        found = tree.hidden.get(int(tree.ids[tree.parents[slot]]))
        if found is None or any(name not in found for name in draft.features.names):
            return None
        return torch.cat([found[name] for name in draft.features.names])[None]


def _joined(parts: list[Tensor]) -> Tensor:
    """The rows of all parts; no rows of any size without parts."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else _EMPTY
