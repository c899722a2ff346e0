"""A source's own token tree beside the request's real one: same committed tokens, other nodes.

A *scratch tree* has the nodes that a wrapped source has computed: expanded nodes of the real tree,
and guesses that are not in the real tree. Real and scratch nodes are matched by their token path
from the root, so the result of a guess is available when a policy creates the real node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from specdec.tree import TokenTree
from specdec.types import NO_NODE, Commit, CommitKind, IntArray

if TYPE_CHECKING:
    from specdec.state import RequestState


class ScratchRequest:
    """A request as the wrapped sources see it: the real request's tokens with a scratch tree.

    Has the attributes of ``RequestState`` that sources read.
    """

    def __init__(self, request: RequestState) -> None:
        """Starts with the real root."""
        self._real = request
        self.id = request.id
        self.sampling = request.sampling
        self.stop = request.stop
        self.num_prompt = request.num_prompt
        tree = request.tree
        self.tree = TokenTree(token=int(tree.tokens[0]), position=int(tree.positions[0]))
        self._scratch_of = {tree.root_id: self.tree.root_id}  # real id -> scratch id
        self._children: dict[tuple[int, int], int] = {}  # (scratch id, token) -> scratch id
        self._last_step = -1

    @property
    def tokens(self) -> IntArray:
        """int64[T]: prompt and emitted tokens; the last one is the root."""
        return self._real.tokens

    @property
    def prefix_len(self) -> int:
        """Number of committed tokens before the root."""
        return self._real.prefix_len

    def path_tokens(self, slot: int) -> IntArray:
        """int64[T + depth]: committed tokens, then the path from below the root to ``slot``."""
        return np.concatenate([self.tokens, self.tree.tokens[self.tree.path(slot)[1:]]])

    def slots(self, real_ids: IntArray) -> IntArray:
        """int64[W]: scratch slots of real nodes; missing nodes are created."""
        known = self._scratch_of
        ids = [known.get(i, NO_NODE) for i in real_ids.tolist()]
        if NO_NODE in ids:
            real = self._real.tree
            for at, slot in enumerate(real.slots(real_ids).tolist()):
                if ids[at] == NO_NODE:
                    ids[at] = self._add_path(slot)
        return self.tree.slots(np.array(ids, np.int64))

    def child(self, slot: int, token: int) -> int:
        """Slot of the child of a scratch node with ``token``; created if missing."""
        return self.children([slot], [token])[0]

    def children(self, parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Slots of the children with the given tokens; missing ones are created.

        Args:
            parents: slots of the parents.
            tokens: one per parent; no (parent, token) pair occurs twice.
        """
        tree, known = self.tree, self._children
        ids = tree.ids
        keys = [(int(ids[slot]), token) for slot, token in zip(parents, tokens, strict=True)]
        child_ids = [known.get(key, NO_NODE) for key in keys]
        new = [at for at, node_id in enumerate(child_ids) if node_id == NO_NODE]
        if new:
            above = np.array([parents[at] for at in new])
            slots = tree.append(above, np.array([tokens[at] for at in new]), np.zeros(len(new)))
            ids = tree.ids
            for at, slot in zip(new, slots.tolist(), strict=True):
                child_ids[at] = known[keys[at]] = int(ids[slot])
        return ids.searchsorted(child_ids).tolist()  # type: ignore[no-any-return]

    def commit(self, commit: Commit) -> Commit | None:
        """Moves the scratch root.

        Returns:
            The commit in scratch ids; None if its step was already applied.
        """
        if commit.step <= self._last_step:
            return None
        self._last_step = commit.step
        tree = self.tree
        path = [0]
        for token in commit.retired_tokens[1:].tolist():
            path.append(self.child(path[-1], token))
        retired = tree.ids[path]
        root = self._children.get((int(retired[-1]), commit.next_token))
        if root is None:
            kind = CommitKind.MISS
            tree.reset(token=commit.next_token, position=int(tree.positions[path[-1]]) + 1)
        else:
            kind = CommitKind.HIT
            tree.reroot(int(np.searchsorted(tree.ids, root)))
        kept = tree.ids.copy()
        live = set(kept.tolist())
        self._scratch_of = {r: s for r, s in self._scratch_of.items() if s in live}
        self._children = {key: s for key, s in self._children.items() if s in live}
        self._scratch_of[commit.root_id] = tree.root_id
        return replace(commit, kind=kind, retired_ids=retired, root_id=tree.root_id, kept_ids=kept)

    def _add_path(self, real_slot: int) -> int:
        """Scratch id of a real node; creates the missing part of its path."""
        real = self._real.tree
        real_id = int(real.ids[real_slot])
        known = self._scratch_of.get(real_id)
        if known is None:
            parent = self._add_path(int(real.parents[real_slot]))
            slot = int(np.searchsorted(self.tree.ids, parent))
            slot = self.child(slot, int(real.tokens[real_slot]))
            known = int(self.tree.ids[slot])
            self._scratch_of[real_id] = known
        return known
