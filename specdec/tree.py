"""One request's token tree: nodes in topological order, candidates beside them.

Shape letters: N nodes, W chosen nodes, K candidates per node.

A node is named by a stable *id* (growing, never reused) and stands in a *slot* (its index now;
slots change when the tree is rerooted). Ids cross interfaces, slots stay inside one call. Slot
order is id order and topological order at once, so an id is found by bisection and a subtree by
pointer jumping: no N x N ancestor matrix is kept (SpecPipe 3.2.1 keeps one; at 1344 nodes it would
cost 1.8 MB to compact per commit), the matrix of any rows is built when asked for.

Candidates are children that a source proposed but no policy has taken yet. They stay beside their
parent, so that expanding a known node costs no forward, and a node is made only of what is taken.
"""

from __future__ import annotations

import numpy as np

from specdec.device import Probs
from specdec.sampling.top_stable import top_set, top_stable
from specdec.types import NO_NODE, BoolArray, Candidates, FloatArray, IntArray

_FRESH = 64  # capacity of a new tree


class TokenTree:
    """Tokens proposed after a root, the last verified token (slot 0).

    The arrays below are views of the live part, valid until the next call that changes the tree.
    Scores are cumulative: ``score = score(parent) + logprob``, 0 at the root of the moment.
    """

    def __init__(self, *, token: int, position: int, root_id: int = 0) -> None:
        """Starts with a root only.

        Args:
            token: token of the root.
            position: its absolute position in the sequence (= committed tokens before it).
            root_id: its id; all later nodes get larger ones.
        """
        self._ints = np.zeros((6, _FRESH), np.int64)
        self._floats = np.zeros((2, _FRESH))
        self._flags = np.zeros((2, _FRESH), np.bool_)
        self._cand_tokens = np.zeros((_FRESH, 0), np.int64)
        self._cand_logprobs = np.zeros((_FRESH, 0))
        self._cand_origins = np.zeros((_FRESH, 0), np.int64)
        self._mixed = False  # whether any candidate had an origin; until then the table is all 0
        self.draft_probs: dict[int, Probs] = {}
        """Node id -> float64[V] that its candidates were sampled from, where needed."""
        self._next_id = root_id
        self._size = 0
        self.reset(token=token, position=position)

    # ------------------------------------------------------------------ views

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> IntArray:
        """int64[N], increasing."""
        return self._ints[0, : self._size]

    @property
    def tokens(self) -> IntArray:
        """int64[N]."""
        return self._ints[1, : self._size]

    @property
    def parents(self) -> IntArray:
        """int64[N], parent slots, ``parents[i] < i``; ``NO_NODE`` at the root."""
        return self._ints[2, : self._size]

    @property
    def positions(self) -> IntArray:
        """int64[N], absolute positions."""
        return self._ints[3, : self._size]

    @property
    def submitted_at(self) -> IntArray:
        """int64[N], step of submission to the target, -1 before."""
        return self._ints[4, : self._size]

    @property
    def origins(self) -> IntArray:
        """int64[N], which source proposed the node (``Candidates.origins``)."""
        return self._ints[5, : self._size]

    @property
    def logprobs(self) -> FloatArray:
        """float64[N], log draft probability given the parent."""
        return self._floats[0, : self._size]

    @property
    def scores(self) -> FloatArray:
        """float64[N], sum of ``logprobs`` from the root (0) down."""
        return self._floats[1, : self._size]

    @property
    def expanded(self) -> BoolArray:
        """bool[N], whether a source has answered for the node."""
        return self._flags[0, : self._size]

    @property
    def answered(self) -> BoolArray:
        """bool[N], whether the target has answered for the node."""
        return self._flags[1, : self._size]

    @property
    def depths(self) -> IntArray:
        """int64[N], below the root."""
        return self.positions - self._ints[3, 0]

    @property
    def candidate_tokens(self) -> IntArray:
        """int64[N, K]."""
        return self._cand_tokens[: self._size]

    @property
    def candidate_logprobs(self) -> FloatArray:
        """float64[N, K], -inf where there is no candidate or it was taken."""
        return self._cand_logprobs[: self._size]

    @property
    def root_id(self) -> int:
        """Id of the root."""
        return int(self._ints[0, 0])

    # ------------------------------------------------------------------ growing

    def reset(self, *, token: int, position: int) -> int:
        """Discards everything and starts again from a fresh root; returns its id."""
        self._size = 0
        self.draft_probs.clear()
        self._claim(1)
        self._ints[:, 0] = (self._next_id, token, NO_NODE, position, -1, 0)
        self._floats[:, 0] = 0.0
        self._flags[:, 0] = False
        self._cand_logprobs[0] = -np.inf
        self._next_id += 1
        return self.root_id

    def append(
        self,
        parents: IntArray,
        tokens: IntArray,
        logprobs: FloatArray,
        origins: IntArray | None = None,
    ) -> IntArray:
        """Adds W nodes (layer appending, SpecPipe 3.2.1; any depth is allowed).

        Args:
            parents: int64[W], slots of nodes that are in the tree already.
            tokens: int64[W]; the caller sees to it that siblings differ.
            logprobs: float64[W].
            origins: int64[W], 0 where omitted.

        Returns:
            int64[W], their slots.
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
        ints[4, new] = -1
        ints[5, new] = 0 if origins is None else origins
        floats[0, new] = logprobs
        floats[1, new] = floats[1].take(parents) + logprobs
        self._flags[:, new] = False
        self._cand_logprobs[new] = -np.inf
        self._next_id += num
        return slots

    def set_candidates(self, slots: IntArray, candidates: Candidates, rows: slice) -> None:
        """Stores a source's answer for W nodes and marks them expanded.

        Args:
            slots: int64[W].
            candidates: the source's packed answer.
            rows: the W rows of it that belong to these nodes. A row of count 0 leaves its node
                unexpanded: the source may have an answer later.
        """
        tokens, logprobs = candidates.tokens[rows], candidates.logprobs[rows]
        counts = candidates.counts[rows]
        num = tokens.shape[1]
        self._widen(num)
        self._cand_tokens[slots, :num] = tokens
        if int(counts.min(initial=num)) < num:
            logprobs = np.where(np.arange(num) < counts[:, None], logprobs, -np.inf)
        self._cand_logprobs[slots, :num] = logprobs
        if num < self._cand_logprobs.shape[1]:
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

    def take(self, slots: IntArray, columns: IntArray) -> IntArray:
        """Makes nodes of candidates; returns their slots, int64[W], in the given order.

        Args:
            slots: int64[W], parents.
            columns: int64[W], which candidate of each; none may have been taken before.
        """
        flat = slots * self._cand_tokens.shape[1] + columns
        waiting = self._cand_logprobs.reshape(-1)  # views: the tables are contiguous
        logprobs = waiting.take(flat)
        waiting[flat] = -np.inf
        tokens = self._cand_tokens.reshape(-1).take(flat)
        origins = self._cand_origins.reshape(-1).take(flat) if self._mixed else None
        return self.append(slots, tokens, logprobs, origins)

    # ------------------------------------------------------------------ asking

    def slots(self, ids: IntArray) -> IntArray:
        """int64[W], slots of live ids; ``NO_NODE`` for an id that is not in the tree."""
        live = self.ids
        at = np.minimum(live.searchsorted(ids), self._size - 1)
        return np.where(live.take(at) == ids, at, NO_NODE)

    def child(self, slot: int, token: int) -> int:
        """Slot of the child of ``slot`` that carries ``token``, or ``NO_NODE``."""
        found = np.flatnonzero((self.parents == slot) & (self.tokens == token))
        return int(found[0]) if len(found) else NO_NODE

    def children(self, slot: int) -> IntArray:
        """int64[C], slots of the children, in the order in which they were made."""
        return np.flatnonzero(self.parents == slot)

    def path(self, slot: int) -> IntArray:
        """int64[D + 1], slots from the root down to ``slot``, both included."""
        path = [slot]
        parents = self._ints[2]
        while (slot := int(parents[slot])) != NO_NODE:
            path.append(slot)
        return np.array(path[::-1])

    def subtree(self, slot: int) -> BoolArray:
        """bool[N]: the nodes at or under ``slot``."""
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
        """bool[W, N]: entry (i, j) says that slot j is row i's node or an ancestor of it.

        The tree mask of SpecPipe 3.2.1, for any rows: it need not be square (SwiftSpec 3.1).
        """
        mask = np.zeros((len(rows), self._size), np.bool_)
        if not len(rows):
            return mask
        flat = mask.reshape(-1)
        line = np.arange(0, flat.size, self._size)
        above = np.maximum(self.parents, 0)  # short paths wait at the root, which all rows see
        here = rows
        for _ in range(int(self._ints[3].take(rows).max() - self._ints[3, 0])):
            flat[line + here] = True
            here = above.take(here)
        flat[line] = True
        return mask

    def best_candidates(self, num: int) -> tuple[IntArray, IntArray, FloatArray]:
        """The ``num`` most probable untaken candidates of the whole tree.

        Returns:
            (parent slots, candidate columns, scores), best first, ties in slot order.
        """
        flat = (self.candidate_logprobs + self.scores[:, None]).ravel()
        best = top_stable(flat, num)
        scores = flat.take(best)
        if len(scores) and scores[-1] == -np.inf:
            valid = scores > -np.inf
            best, scores = best[valid], scores[valid]
        slots, columns = np.divmod(best, max(self._cand_tokens.shape[1], 1))
        return slots, columns, scores

    def best_unsubmitted(self, num: int) -> IntArray:
        """int64[<= num]: the most probable nodes not yet submitted, as slots in slot order.

        Never a node without its parent: scores do not rise downwards and ties fall in slot order.
        """
        waiting = np.flatnonzero(self.submitted_at < 0)
        if len(waiting) <= num:
            return waiting
        return waiting[top_set(self.scores.take(waiting), num)]

    def best_subgraph(self, num: int) -> IntArray:
        """int64[<= num]: slots of the most probable connected subgraph that holds the root.

        SwiftSpec Alg. 1: since scores do not rise downwards, the ``num`` best nodes are connected.
        """
        return top_set(self.scores, num)

    # ------------------------------------------------------------------ moving the root

    def reroot(self, slot: int) -> None:
        """Keeps the subtree of ``slot`` and makes it the root (to-subtree pruning, SpecPipe 3.2.1).

        Scores become relative to the new root; ids, candidates and submission steps stay.
        """
        if slot == 0:
            return
        keep = np.flatnonzero(self.subtree(slot))
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
        self._floats[1, :num] -= base
        self._size = num
        if self.draft_probs:
            live = set(self.ids.tolist())
            self.draft_probs = {i: p for i, p in self.draft_probs.items() if i in live}

    # ------------------------------------------------------------------ storage

    def _claim(self, num: int) -> None:
        """Makes room for ``num`` more nodes and counts them in."""
        need = self._size + num
        capacity = self._ints.shape[1]
        if need > capacity:
            extra = max(need, 2 * capacity) - capacity
            self._ints = np.pad(self._ints, ((0, 0), (0, extra)))
            self._floats = np.pad(self._floats, ((0, 0), (0, extra)))
            self._flags = np.pad(self._flags, ((0, 0), (0, extra)))
            self._cand_tokens = np.pad(self._cand_tokens, ((0, extra), (0, 0)))
            self._cand_logprobs = np.pad(self._cand_logprobs, ((0, extra), (0, 0)))
            self._cand_origins = np.pad(self._cand_origins, ((0, extra), (0, 0)))
        self._size = need

    def _widen(self, num: int) -> None:
        """Makes room for ``num`` candidates per node."""
        extra = num - self._cand_tokens.shape[1]
        if extra > 0:
            pad = ((0, 0), (0, extra))
            self._cand_tokens = np.pad(self._cand_tokens, pad)
            self._cand_logprobs = np.pad(self._cand_logprobs, pad, constant_values=-np.inf)
            self._cand_origins = np.pad(self._cand_origins, pad)
