"""A source's own forest beside the real one: same committed tokens, other nodes.

A *scratch tree* holds the nodes that a wrapped source has seen: those of the real tree that were
asked for, and guesses that no policy knows of. Real and scratch nodes are matched by their token
path from the root, so a guess becomes the real node's answer when a policy makes that node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.sampling.transform import SamplingParams
from specdec.tree import TokenTree
from specdec.types import NO_NODE, Commit, CommitKind, IntArray

if TYPE_CHECKING:
    from specdec.state import RequestState, StopRules


class ScratchRequest:
    """A request as the wrapped sources see it: the real one's tokens, its own tree.

    Has what sources read of a ``RequestState``.
    """

    def __init__(self, request: RequestState) -> None:
        """Starts with the real root."""
        self._real = request
        tree = request.tree
        self.tree = TokenTree(token=int(tree.tokens[0]), position=int(tree.positions[0]))
        self._scratch_of = {tree.root_id: self.tree.root_id}  # real id -> scratch id
        self._children: dict[tuple[int, int], int] = {}  # (scratch id, token) -> scratch id
        self._last_step = -1

    @property
    def id(self) -> int:
        """The request's id."""
        return self._real.id

    @property
    def sampling(self) -> SamplingParams:
        """The target's sampling transform."""
        return self._real.sampling

    @property
    def stop(self) -> StopRules:
        """When the request is complete."""
        return self._real.stop

    @property
    def tokens(self) -> IntArray:
        """int64[T]: prompt and emitted tokens; the last one is the root."""
        return self._real.tokens

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self._real.num_prompt

    @property
    def prefix_len(self) -> int:
        """Committed tokens before the root."""
        return self._real.prefix_len

    def path_tokens(self, slot: int) -> IntArray:
        """int64[T + depth]: committed tokens and the path of a scratch node, both ends included."""
        return np.concatenate([self.tokens, self.tree.tokens[self.tree.path(slot)[1:]]])

    def slots(self, real_ids: IntArray) -> IntArray:
        """int64[W], scratch slots of real nodes, made where they are new."""
        known = self._scratch_of
        ids = [known.get(i, NO_NODE) for i in real_ids.tolist()]
        if NO_NODE in ids:
            real = self._real.tree
            for at, slot in enumerate(real.slots(real_ids).tolist()):
                if ids[at] == NO_NODE:
                    ids[at] = self._follow(slot)
        return self.tree.slots(np.array(ids, np.int64))

    def child(self, slot: int, token: int) -> int:
        """Slot of the child of a scratch node that carries ``token``, made where it is new."""
        return self.children([slot], [token])[0]

    def children(self, parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Slots of the children that carry ``tokens``, made where they are new.

        Args:
            parents: their parents' slots.
            tokens: as many; no (parent, token) occurs twice.
        """
        tree, known = self.tree, self._children
        ids = tree.ids
        keys = [(int(ids[slot]), token) for slot, token in zip(parents, tokens, strict=True)]
        found = [known.get(key, NO_NODE) for key in keys]
        new = [at for at, node_id in enumerate(found) if node_id == NO_NODE]
        if new:
            above = np.array([parents[at] for at in new])
            made = tree.append(above, np.array([tokens[at] for at in new]), np.zeros(len(new)))
            ids = tree.ids
            for at, slot in zip(new, made.tolist(), strict=True):
                found[at] = known[keys[at]] = int(ids[slot])
        return ids.searchsorted(found).tolist()  # type: ignore[no-any-return]

    def commit(self, commit: Commit) -> Commit | None:
        """Follows a decision; the same in scratch ids, or None where it was seen before."""
        if commit.kind is CommitKind.NONE or commit.step <= self._last_step:
            return None
        self._last_step = commit.step
        tree = self.tree
        path = [0]
        for token in commit.retired_tokens[1:].tolist():
            path.append(self.child(path[-1], token))
        retired = tree.ids[path]
        last = path[-1]
        position = int(tree.positions[last]) + 1
        root = self._children.get((int(tree.ids[last]), commit.next_token))
        if root is None:
            kind = CommitKind.MISS
            tree.reset(token=commit.next_token, position=position)
        else:
            kind = CommitKind.HIT
            tree.reroot(int(np.searchsorted(tree.ids, root)))
        kept = tree.ids.copy()
        self._forget(set(kept.tolist()))
        self._scratch_of[commit.root_id] = tree.root_id
        return Commit(
            request=commit.request,
            step=commit.step,
            kind=kind,
            retired_ids=retired,
            retired_tokens=commit.retired_tokens,
            next_token=commit.next_token,
            root_id=tree.root_id,
            prefix_len=commit.prefix_len,
            kept_ids=kept,
            finished=commit.finished,
        )

    def _follow(self, real_slot: int) -> int:
        """Scratch id of a real node that is not known yet, by its path."""
        real = self._real.tree
        real_id = int(real.ids[real_slot])
        known = self._scratch_of.get(real_id)
        if known is None:
            parent = self._follow(int(real.parents[real_slot]))
            slot = int(np.searchsorted(self.tree.ids, parent))
            slot = self.child(slot, int(real.tokens[real_slot]))
            known = int(self.tree.ids[slot])
            self._scratch_of[real_id] = known
        return known

    def _forget(self, kept: set[int]) -> None:
        self._scratch_of = {r: s for r, s in self._scratch_of.items() if s in kept}
        self._children = {key: s for key, s in self._children.items() if s in kept}
