"""The token tree of one request: nodes in topological order, and candidates for further nodes.

A node has a stable *id* (increasing, never reused) and a *slot* (its current array index, which
changes when another node becomes the root). Data for other modules contains ids, not slots. Slot
order is both id order and topological order, so bisection finds an id, and pointer jumping finds a
subtree. No N x N ancestor matrix is stored (SpecPipe 3.2.1 stores one; at 1344 nodes each commit
would compact 1.8 MB). Instead, ``TokenTree.paths`` computes the ancestors of a batch's nodes.

*Candidates* are children that a token source (such as a draft model) has proposed but that are not
nodes yet. They are stored with their parent, so adding one as a node later needs no draft forward.

Shape letters: N nodes, W selected nodes, K candidates per node, C children, D depth, V vocabulary,
E hidden size.
"""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Self

import numpy as np
import torch

from specdec.device import Probs
from specdec.types import (
    NO_NODE,
    Answers,
    BoolArray,
    Candidates,
    FloatArray,
    HiddenName,
    IntArray,
)

_CAPACITY = 64  # slots of a new tree
_IDS, _PARENTS, _ANSWERS = 0, 2, 6  # indices of integer columns
_ANSWERED = 1  # index of a flag column
_NEW_NODE = np.array([[0], [0], [-1], [0], [-1], [0], [-1]])  # values of the integer columns
_NO_CANDIDATE = np.array([0.0, -np.inf, 0.0]).view(np.int64)  # 0.0 has the bits of the integer 0
_TOKEN, _LOGPROB, _ORIGIN = range(3)  # indices of a candidate's entries


class TokenTree:
    """Proposed continuations of a root, which is the last committed token (slot 0).

    The arrays are views, valid until the next call that changes the tree.

    Attributes:
        ids: int64[N], increasing.
        tokens: int64[N].
        parents: int64[N], parent slots, ``parents[i] < i``; ``NO_NODE`` at the root.
        positions: int64[N], absolute positions.
        submitted_at: int64[N], step of submission to the target; -1 if not submitted.
        origins: int64[N], index of the source that proposed the node (``Candidates.origins``).
        answers: int64[N], the target's own next token after each node; -1 if it is not known.
        logprobs: float64[N], log draft probability given the parent.
        scores: float64[N], sum of ``logprobs`` along the path from the current root, which has 0.
        expanded: bool[N], whether the source has proposed candidates for the node.
        answered: bool[N], whether the target's result for the node has arrived.
        draft_probs: node id -> float64[V], the distribution from which the node's candidates were
            sampled; only for sources that sample.
        target_probs: node id -> float64[V], the target's distribution after the node; only if the
            source or the verifier needs it (``Needs.target_probs``).
        hidden: node id -> name -> [E], the target's hidden states of the node; only those that the
            source or the verifier needs (``Needs.hidden`` and ``Needs.early_hidden``).
        next_id: id of the next new node.
    """

    ids: IntArray
    tokens: IntArray
    parents: IntArray
    positions: IntArray
    submitted_at: IntArray
    origins: IntArray
    answers: IntArray
    logprobs: FloatArray
    scores: FloatArray
    expanded: BoolArray
    answered: BoolArray

    def __init__(self, *, token: int, position: int, root_id: int = 0) -> None:
        """Creates a tree with only a root, at absolute position ``position``."""
        self._ints = np.zeros((len(_NEW_NODE), 0), np.int64)
        self._floats = np.zeros((2, 0))
        self._flags = np.zeros((2, 0), np.bool_)
        self._candidates = np.zeros((0, 0, len(_NO_CANDIDATE)), np.int64)
        self._size = 0
        self.draft_probs: dict[int, Probs] = {}
        self.target_probs: dict[int, Probs] = {}
        self.hidden: dict[int, Mapping[HiddenName, torch.Tensor]] = {}
        self.next_id = root_id
        self.reset(token=token, position=position)

    def __len__(self) -> int:
        return self._size

    @property
    def root_id(self) -> int:
        return int(self.ids[0])

    @property
    def depths(self) -> IntArray:
        """int64[N], distance of each node from the root."""
        return self.positions - self.positions[0]

    @property
    def candidate_tokens(self) -> IntArray:
        """int64[N, K], a view: tokens of the candidates of each node."""
        return self._candidates[: self._size, :, _TOKEN]

    @property
    def candidate_logprobs(self) -> FloatArray:
        """float64[N, K], a view: log probabilities; -inf: no candidate, or it is a node."""
        return self._candidates.view(np.float64)[: self._size, :, _LOGPROB]

    def copy(self) -> Self:
        tree = copy(self)
        tree._ints, tree._floats = self._ints.copy(), self._floats.copy()
        tree._flags, tree._candidates = self._flags.copy(), self._candidates.copy()
        tree._resize(self._size)
        tree.draft_probs, tree.target_probs = dict(self.draft_probs), dict(self.target_probs)
        tree.hidden = dict(self.hidden)
        return tree

    # Growth.

    def reset(self, *, token: int, position: int) -> int:
        for rows in (self.draft_probs, self.target_probs, self.hidden):
            rows.clear()
        self._claim(0, 1)
        self.tokens[0], self.positions[0] = token, position
        return self.root_id

    def append(
        self,
        parents: IntArray,
        tokens: IntArray,
        logprobs: FloatArray,
        origins: IntArray | None = None,
    ) -> IntArray:
        """Adds W nodes as children of the slots ``parents``; returns the new slots, int64[W]. Nodes
        may have different depths (SpecPipe 3.2.1); siblings' tokens must differ (not checked).
        """
        new = slice(self._size, self._size + len(tokens))
        self._claim(new.start, new.stop)
        self.tokens[new], self.parents[new], self.logprobs[new] = tokens, parents, logprobs
        self.positions[new] = self.positions[parents] + 1
        self.scores[new] = self.scores[parents] + logprobs
        if origins is not None:
            self.origins[new] = origins
        return np.arange(new.start, new.stop)

    def set_candidates(self, slots: IntArray, candidates: Candidates, rows: slice) -> None:
        """Stores the candidates of the nodes ``slots``, int64[W], which are the ``rows`` of
        ``candidates``, and marks the nodes as expanded; a node without candidates stays unexpanded.
        """
        tokens, counts = candidates.tokens[rows], candidates.counts[rows]
        num = tokens.shape[1]
        if (extra := num - self._candidates.shape[1]) > 0:
            columns = np.tile(_NO_CANDIDATE, (len(self._candidates), extra, 1))
            self._candidates = np.concatenate([self._candidates, columns], axis=1)
        new = np.empty((len(slots), *self._candidates.shape[1:]), np.int64)
        new[:] = _NO_CANDIDATE
        new[:, :num, _TOKEN] = tokens
        is_valid = np.arange(num) < counts[:, None]
        logprobs = np.where(is_valid, candidates.logprobs[rows], -np.inf)
        new.view(np.float64)[:, :num, _LOGPROB] = logprobs
        if candidates.origins is not None:
            new[:, :num, _ORIGIN] = candidates.origins[rows]
        self._candidates[slots] = new
        self.expanded[slots] = counts > 0
        if candidates.probs is not None:
            ids = self.ids[slots].tolist()
            self.draft_probs.update(zip(ids, candidates.probs[rows], strict=True))

    def drop_known_children(self, slots: IntArray) -> None:
        """Removes candidates of the nodes ``slots``, int64[W], whose token a child of the same node
        already has. Such children exist if they were added before the node was expanded.
        """
        if slots[0] == self._size - 1 and len(slots) == 1:
            return  # the last node
        chosen = np.zeros(self._size, np.bool_)
        chosen[slots] = True
        children = 1 + chosen.take(self.parents[1:]).nonzero()[0]
        if not len(children):
            return
        pairs = _pairs(self.parents[children], self.tokens[children])
        known = np.isin(_pairs(slots[:, None], self.candidate_tokens[slots]), pairs)
        self.candidate_logprobs[slots] = np.where(known, -np.inf, self.candidate_logprobs[slots])

    def take(self, slots: IntArray, columns: IntArray) -> IntArray:
        """Turns candidate ``columns[i]`` of node ``slots[i]`` into a node, for each i < W; returns
        the slots of the new nodes, int64[W]. The candidates must exist and not be nodes yet.
        """
        taken = self._candidates[slots, columns]
        self.candidate_logprobs[slots, columns] = -np.inf
        logprobs = taken.view(np.float64)[:, _LOGPROB]
        return self.append(slots, taken[:, _TOKEN], logprobs, taken[:, _ORIGIN])

    def set_answers(self, answers: Answers) -> None:
        """Stores the target's answers at their nodes; ignores answers to pruned nodes."""
        slots = self.slots(answers.node_ids)
        # Answers of pruned nodes go to the spare slot.
        self._ints[_ANSWERS, slots] = answers.tokens
        self._flags[_ANSWERED, slots] = True
        if answers.probs is not None:
            rows = zip(answers.node_ids.tolist(), answers.probs, slots.tolist(), strict=True)
            self.target_probs.update((node_id, row) for node_id, row, slot in rows if slot >= 0)
        if answers.hidden:
            self.set_hidden(answers.node_ids, answers.hidden)

    def set_hidden(self, ids: IntArray, hidden: Mapping[HiddenName, torch.Tensor]) -> None:
        """Stores hidden states, name -> [W, E], of nodes ``ids``, int64[W]; skips pruned nodes."""
        for row, (node_id, slot) in enumerate(
            zip(ids.tolist(), self.slots(ids).tolist(), strict=True)
        ):
            if slot >= 0:
                states = {name: rows[row] for name, rows in hidden.items()}
                self.hidden[node_id] = {**self.hidden.get(node_id, {}), **states}

    # Queries.

    def slots(self, ids: IntArray) -> IntArray:
        """Returns int64[W], the slots of ``ids``; ``NO_NODE`` for an id that is not in the tree."""
        known = self.ids
        slots: IntArray = known.searchsorted(ids)
        slots[known.take(slots, mode="clip") != ids] = NO_NODE
        return slots

    def live_slots(self, ids: IntArray) -> IntArray:
        """Returns int64[W], the slots of ``ids``, which must all be in the tree."""
        slots = self.slots(ids)
        assert NO_NODE not in slots, f"nodes {ids} are not in the tree"
        return slots

    def hidden_rows(self, ids: IntArray) -> dict[HiddenName, torch.Tensor]:
        """Returns copies [W, E], by name, of the hidden states that all nodes ``ids`` have."""
        if not self.hidden:
            return {}
        rows = [self.hidden.get(node_id, {}) for node_id in ids.tolist()]
        return {
            name: torch.stack([row[name] for row in rows])
            for name in rows[0]
            if all(name in row for row in rows)
        }

    def child(self, slot: int, token: int) -> int:
        """Returns the slot of the child of ``slot`` with this token, or ``NO_NODE``."""
        if self._size == 1:
            return NO_NODE
        matches = (self.parents == slot) & (self.tokens == token)
        first = int(matches.argmax())
        return first if matches[first] else NO_NODE

    def children(self, slot: int) -> IntArray:
        return (self.parents == slot).nonzero()[0]

    def path(self, slot: int) -> IntArray:
        """Returns int64[D + 1], the slots from the root down to ``slot``, both included."""
        path = [slot]
        parents = self.parents
        while (slot := int(parents[slot])) != NO_NODE:
            path.append(slot)
        return np.array(path[::-1])

    def subtree(self, slot: int) -> BoolArray:
        """Returns bool[N], true for ``slot`` and its descendants."""
        inside = np.zeros(self._size, np.bool_)
        inside[slot] = True
        jump = np.maximum(self.parents, 0)  # the ancestor 2^i levels up; the root is outside
        for _ in range(int(self.positions.max() - self.positions[slot]).bit_length()):
            inside |= inside.take(jump)
            jump = jump.take(jump)
        return inside

    def paths(self, slots: IntArray) -> IntArray:
        """Returns int64[D, W]: row i has the ids of the nodes' ancestors i levels above (row 0:
        their own), ``NO_NODE`` above the root.
        """
        root, levels = int(self.positions[0]), [slots]
        for _ in range(max(self.positions[slots].tolist(), default=root) - root):
            levels.append(self._ints[_PARENTS].take(levels[-1]))  # of ``NO_NODE``: ``NO_NODE``
        return self._ints[_IDS].take(np.array(levels))

    def with_missing_ancestors(
        self, slots: IntArray, has: Callable[[IntArray], BoolArray]
    ) -> IntArray:
        """Returns ``slots`` and the slots of their ancestors that a cache lacks, in order. ``has``
        maps node ids to whether the cache has them; if it has a node, it has all its ancestors.
        """
        inside = np.zeros(self._size, np.bool_)
        inside[slots] = True
        level = slots
        while len(level):
            above = self.parents[level]
            level = above[(above != NO_NODE) & ~inside.take(above)]
            if len(level):
                level = level[~has(self.ids[level])]
                inside[level] = True
        return inside.nonzero()[0]

    # Rerooting.

    def reroot(self, slot: int) -> None:
        """Makes ``slot`` the root and drops all nodes outside its subtree (SpecPipe 3.2.1).

        Scores become relative to the new root; ids, candidates and submission steps do not change.
        """
        keep = self.subtree(slot).nonzero()[0]
        renumber = np.full(self._size, NO_NODE, np.int64)
        renumber[keep] = np.arange(len(keep))
        base = float(self.scores[slot])
        for columns in (self._ints, self._floats, self._flags):
            columns[:, : len(keep)] = columns.take(keep, axis=1)
        self._candidates[: len(keep)] = self._candidates.take(keep, axis=0)
        self._resize(len(keep))
        self.parents[:] = renumber.take(self.parents)
        self.parents[0] = NO_NODE
        self.scores[:] -= base
        live = set(self.ids.tolist())
        self.draft_probs = {i: p for i, p in self.draft_probs.items() if i in live}
        self.target_probs = {i: p for i, p in self.target_probs.items() if i in live}
        self.hidden = {i: h for i, h in self.hidden.items() if i in live}

    def _claim(self, start: int, stop: int) -> None:
        """Initialises slots ``start`` .. ``stop`` - 1 for new nodes; the caller sets their tokens.
        The arrays' last entry, index ``NO_NODE`` (-1), is spare; its id and parent are ``NO_NODE``.
        """
        if (extra := stop + 1 - self._ints.shape[1]) > 0:
            more = (0, max(extra, self._ints.shape[1], _CAPACITY))
            self._ints = np.pad(self._ints, ((0, 0), more))
            self._floats = np.pad(self._floats, ((0, 0), more))
            self._flags = np.pad(self._flags, ((0, 0), more))
            self._candidates = np.pad(self._candidates, (more, (0, 0), (0, 0)))
            self._ints[[_IDS, _PARENTS], -1] = NO_NODE
            self._size = 0
        self._ints[:, start:stop] = _NEW_NODE
        self._floats[:, start:stop] = 0.0
        self._flags[:, start:stop] = False
        self._candidates[start:stop] = _NO_CANDIDATE
        if stop != self._size:
            self._resize(stop)
        self.ids[start:] = np.arange(self.next_id, self.next_id + stop - start)
        self.next_id += stop - start

    def _resize(self, size: int) -> None:
        """Sets the number of nodes to ``size`` and makes the array attributes views of them."""
        self._size = size
        ints = self._ints[:, :size]
        self.ids, self.tokens, self.parents, self.positions = ints[:4]
        self.submitted_at, self.origins, self.answers = ints[4:]
        self.logprobs, self.scores = self._floats[:, :size]
        self.expanded, self.answered = self._flags[:, :size]


def _pairs(slots: IntArray, tokens: IntArray) -> IntArray:
    """Returns a number per (slot, token) pair; different pairs have different numbers."""
    return (slots << 32) + tokens
