"""The token tree of one request: nodes in topological order, with their untaken candidates.

A node has a stable *id* (increasing, never reused) and a *slot* (its current array index, which
changes when the tree is rerooted). Interfaces exchange ids; slots are valid within one call. Slot
order is both id order and topological order, so an id is located by bisection and a subtree by
pointer jumping. No N x N ancestor matrix is stored (SpecPipe 3.2.1 stores one; at 1344 nodes each
commit would compact 1.8 MB); ``ancestor_mask`` builds its rows on demand.

*Candidates* are children that a source proposed and no policy has turned into nodes yet. They are
stored with their parent, so taking one later costs no draft forward.

*Answers* of the target stay with their nodes too, whenever they arrive, until a verifier's walk
from the root reaches them or the node is pruned.

Shape letters: N nodes, W selected nodes, K candidates per node, C children, D depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from specdec.sampling.top_stable import top_stable
from specdec.tree.storage import NOWHERE, NodeTable, StateRow
from specdec.types import (
    NO_NODE,
    Answers,
    BoolArray,
    Candidates,
    FloatArray,
    HiddenName,
    IntArray,
)

_FRESH = np.array([[-1], [0], [-1]])  # submission step, origin and answer of a new node


class TokenTree(NodeTable):
    """Proposed continuations of a root, the last committed token (slot 0).

    The array properties are views, valid until the next call that changes the tree. Scores are
    cumulative: ``score = score(parent) + logprob``, with 0 at the current root.
    """

    # ------------------------------------------------------------------ growth

    def append(
        self,
        parents: IntArray,
        tokens: IntArray,
        logprobs: FloatArray,
        origins: IntArray | None = None,
    ) -> IntArray:
        """Adds W nodes of any depth (layer appending, SpecPipe 3.2.1).

        Args:
            parents: int64[W], slots of existing nodes.
            tokens: int64[W]; siblings must differ (not checked).
            logprobs: float64[W].
            origins: int64[W]. Default: 0 for all.

        Returns:
            int64[W], slots of the new nodes.
        """
        num = len(tokens)
        start = self._size
        self._claim(num)
        slots = np.arange(start, start + num)
        new = slice(start, start + num)
        ints, floats = self._ints, self._floats
        ints[0, new] = slots + (self._next_id - start)
        ints[1, new] = tokens
        ints[2, new] = parents
        ints[3, new] = ints[3].take(parents) + 1
        ints[4:7, new] = _FRESH
        if origins is not None:
            ints[5, new] = origins
        ints[7, new] = ints[0].take(parents)
        floats[0, new] = logprobs
        floats[1, new] = floats[1].take(parents) + logprobs
        self._flags[:, new] = False
        self._cand_logprobs[new] = -np.inf
        self._next_id += num
        return slots

    def set_candidates(self, slots: IntArray, candidates: Candidates, rows: slice) -> None:
        """Stores the candidates of W nodes and marks the nodes as expanded.

        Args:
            slots: int64[W].
            candidates: packed candidates of the source.
            rows: their W rows for these nodes. A row of count 0 leaves its node unexpanded, since
                the source may have a proposal later.
        """
        tokens, logprobs = candidates.tokens[rows], candidates.logprobs[rows]
        counts = candidates.counts[rows]
        num = tokens.shape[1]
        self._widen(num)
        if min(counts.tolist(), default=num) < num:
            logprobs = np.where(np.arange(num) < counts[:, None], logprobs, -np.inf)
        if num == self._cand_tokens.shape[1]:
            self._cand_tokens[slots] = tokens
            self._cand_logprobs[slots] = logprobs
        else:
            self._cand_tokens[slots, :num] = tokens
            self._cand_logprobs[slots, :num] = logprobs
            self._cand_logprobs[slots, num:] = -np.inf
        if self._mixed or candidates.origins is not None:
            self._mixed = True
            self._cand_origins[slots, :num] = (
                0 if candidates.origins is None else candidates.origins[rows]
            )
        self._flags[0, slots] = counts > 0
        if candidates.probs is not None:
            probs = candidates.probs[rows]
            for node_id, row in zip(self._ints[0, slots].tolist(), probs, strict=True):
                self.draft_probs[node_id] = row

    def drop_known_children(self, slots: IntArray) -> None:
        """Marks candidates as taken if a child of the node already has their token.

        A node may have children before it is expanded; siblings must differ.
        """
        if len(slots) == 1 and slots[0] == self._size - 1:  # the last node has no children
            return
        if int(self.parents.max()) < int(slots.min()):
            return
        is_parent = np.zeros(self._size, np.bool_)
        is_parent[self.parents[1:]] = True
        for slot in slots[is_parent.take(slots)].tolist():
            known = np.isin(self.candidate_tokens[slot], self.tokens[self.children(slot)])
            self.candidate_logprobs[slot, known] = -np.inf

    def set_answers(self, answers: Answers) -> None:
        """Stores the target's answers with their nodes; those of pruned nodes are dropped."""
        slots, tokens = self.slots(answers.node_ids), answers.tokens
        if answers.probs is not None:
            rows = zip(answers.node_ids.tolist(), answers.probs, slots.tolist(), strict=True)
            self.target_probs.update((node_id, row) for node_id, row, slot in rows if slot >= 0)
        if slots is not self._located[1]:  # some have been pruned
            live = slots >= 0
            slots, tokens = slots[live], tokens[live]
        self._ints[6, slots] = tokens
        self._flags[1, slots] = True
        if answers.hidden:
            self.set_hidden(answers.node_ids, answers.hidden)

    def set_hidden(self, ids: IntArray, hidden: Mapping[HiddenName, torch.Tensor]) -> None:
        """Stores hidden states of nodes; those of pruned nodes are dropped.

        Args:
            ids: int64[W].
            hidden: name -> [W, E].
        """
        for row, (node_id, slot) in enumerate(
            zip(ids.tolist(), self.slots(ids).tolist(), strict=True)
        ):
            if slot >= 0:
                states, earlier = StateRow(hidden, row), self.hidden.get(node_id)
                self.hidden[node_id] = states if earlier is None else {**earlier, **states}

    def hidden_rows(self, ids: IntArray) -> dict[HiddenName, torch.Tensor]:
        """Name -> [W, E], copies of the states that all nodes ``ids``, int64[W], have."""
        if not self.hidden:
            return {}
        rows = [self.hidden.get(node_id, {}) for node_id in ids.tolist()]
        return {
            name: torch.stack([row[name] for row in rows])
            for name in rows[0]
            if all(name in row for row in rows)
        }

    def take(self, slots: IntArray, columns: IntArray) -> IntArray:
        """Turns candidates into nodes.

        Args:
            slots: int64[W], parents.
            columns: int64[W], candidate column of each parent; not taken before.

        Returns:
            int64[W], slots of the new nodes, in the given order.
        """
        flat = slots * self._cand_tokens.shape[1] + columns
        untaken = self._cand_logprobs.reshape(-1)  # views: the tables are contiguous
        logprobs = untaken.take(flat)
        untaken[flat] = -np.inf
        tokens = self._cand_tokens.reshape(-1).take(flat)
        origins = self._cand_origins.reshape(-1).take(flat) if self._mixed else None
        return self.append(slots, tokens, logprobs, origins)

    # ------------------------------------------------------------------ queries

    def slots(self, ids: IntArray) -> IntArray:
        """int64[W], slots of ``ids``; ``NO_NODE`` for an id that is not in the tree."""
        last_ids, last_slots = self._located
        if ids is last_ids and last_slots is not None:
            return last_slots
        live = self._ints[0, : self._size]
        at = live.searchsorted(ids)
        known = live.take(at, mode="clip") == ids
        if np.count_nonzero(known) < len(known):
            return np.where(known, at, NO_NODE)
        self._located = ids, at
        return at

    def live_slots(self, ids: IntArray) -> IntArray:
        """int64[W], slots of nodes that are all in the tree."""
        slots = self.slots(ids)
        assert slots is self._located[1], f"nodes {ids} are not in the tree"
        return slots

    def ids_of(self, slots: IntArray) -> IntArray:
        """int64[W], ids of ``slots``; a copy, which ``slots`` finds again at once.

        The parts of a step pass the same array of ids on, each to look up the same slots.
        """
        ids = self._ints[0].take(slots)
        self._located = ids, slots
        return ids

    def rows_of(self, slots: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Ids, tokens, parent ids (``NO_NODE`` for the root) and positions of ``slots``[W]."""
        table = self._ints.take(slots, axis=1)
        ids = table[0]
        self._located = ids, slots
        return ids, table[1], table[7], table[3]

    def child(self, slot: int, token: int) -> int:
        """Slot of the child of ``slot`` with ``token``, or ``NO_NODE``."""
        if self._size == 1:
            return NO_NODE
        matches = (self.parents == slot) & (self.tokens == token)
        first = int(matches.argmax())
        return first if matches[first] else NO_NODE

    def children(self, slot: int) -> IntArray:
        """int64[C], slots of the children in order of creation."""
        return (self.parents == slot).nonzero()[0]

    def path(self, slot: int) -> IntArray:
        """int64[D + 1], slots from the root down to ``slot``, both included."""
        path = [slot]
        parents = self._ints[2]
        while (slot := int(parents[slot])) != NO_NODE:
            path.append(slot)
        return np.array(path[::-1])

    def subtree(self, slot: int) -> BoolArray:
        """bool[N]: ``slot`` and its descendants."""
        if slot == 0:
            return np.ones(self._size, np.bool_)
        inside = np.zeros(self._size, np.bool_)
        inside[slot] = True
        jump = np.maximum(self.parents, 0)  # the ancestor 2^i levels up; the root is outside
        for _ in range(int(self.positions.max() - self.positions[slot]).bit_length()):
            inside |= inside.take(jump)
            jump = jump.take(jump)
        return inside

    def ancestor_mask(self, rows: IntArray) -> BoolArray:
        """bool[W, N]: whether slot j is row i's node or one of its ancestors.

        Args:
            rows: int64[W], slots; any subset, so the mask need not be square (SwiftSpec 3.1). With
                all slots it is the tree mask of SpecPipe 3.2.1.
        """
        mask = np.zeros((len(rows), self._size), np.bool_)
        if not len(rows):
            return mask
        flat = mask.reshape(-1)
        line = np.arange(0, flat.size, self._size)
        above = np.maximum(self.parents, 0)  # short paths stay at the root, which all rows see
        current = rows
        for _ in range(int(self._ints[3].take(rows).max() - self._ints[3, 0])):
            flat[line + current] = True
            current = above.take(current)
        flat[line] = True
        return mask

    def with_missing_ancestors(
        self, slots: IntArray, has: Callable[[IntArray], BoolArray]
    ) -> IntArray:
        """int64[M], sorted: ``slots`` and all their ancestors that a cache does not have.

        Args:
            slots: int64[W]; returned unchanged if sorted and no ancestor is missing.
            has: node ids int64[n] -> bool[n], whether the cache has them.
        """
        rows = level = slots
        if len(slots) == 1 and not slots[0]:
            return slots  # the root
        while len(level):
            above = self.parents.take(level)
            if (above < 0).any():
                above = above[above != NO_NODE]
            present = has(self.ids.take(above))
            if present.all():
                break
            above = above[~present]
            level = np.setdiff1d(above, rows)
            rows = np.concatenate([level, rows])
        if len(rows) > 1 and (rows[1:] < rows[:-1]).any():
            rows = np.unique(rows)
        return rows

    def best_candidates(self, num: int) -> tuple[IntArray, IntArray, FloatArray]:
        """The ``num`` candidates of the whole tree with the highest score.

        Returns:
            (parent slots int64, candidate columns int64, scores float64), at most ``num`` each,
            best first, ties in slot order.
        """
        flat = (self.candidate_logprobs + self.scores[:, None]).ravel()
        best = top_stable(flat, num)
        scores = flat.take(best)
        if len(scores) and scores[-1] == -np.inf:
            valid = scores > -np.inf
            best, scores = best[valid], scores[valid]
        slots, columns = np.divmod(best, max(self._cand_tokens.shape[1], 1))
        return slots, columns, scores

    # ------------------------------------------------------------------ rerooting

    def reroot(self, slot: int) -> None:
        """Makes ``slot`` the root and drops all nodes outside its subtree (SpecPipe 3.2.1).

        Scores become relative to the new root; ids, candidates and submission steps do not change.
        """
        if slot == 0:
            return
        keep = self.subtree(slot).nonzero()[0]
        num = len(keep)
        renumber = np.full(self._size, NO_NODE, np.int64)
        renumber[keep] = np.arange(num)
        base = self._floats[1, slot]
        for table in (self._ints, self._floats, self._flags):
            table[:, :num] = table.take(keep, axis=1)
        self._cand_tokens[:num] = self._cand_tokens.take(keep, axis=0)
        self._cand_logprobs[:num] = self._cand_logprobs.take(keep, axis=0)
        if self._mixed:
            self._cand_origins[:num] = self._cand_origins.take(keep, axis=0)
        self._ints[2, :num] = renumber.take(self._ints[2, :num])  # the root's parent is gone
        self._ints[7, 0] = NO_NODE
        self._floats[1, :num] -= base
        self._size = num
        self._located = NOWHERE
        if self.draft_probs or self.target_probs or self.hidden:
            live = set(self.ids.tolist())
            self.draft_probs = {i: p for i, p in self.draft_probs.items() if i in live}
            self.target_probs = {i: p for i, p in self.target_probs.items() if i in live}
            self.hidden = {i: h for i, h in self.hidden.items() if i in live}
