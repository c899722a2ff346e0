"""Rows of the target's forward passes.

Shape letters: W nodes, D nodes of the longest path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdec.types.arrays import NO_NODE, BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRows:
    """Tree nodes of one request as rows of a forward pass, parents before children.

    Every cache derives its attention mask from the rows' paths.

    Attributes:
        prefix_len: number of committed tokens before the root at submission.
        tokens: int64[W].
        paths: int64[D, W]. Row i has the ids of the nodes' ancestors i levels above (row 0: their
            own), up to the root at submission; ``NO_NODE`` beyond it.
    """

    request: int
    prefix_len: int
    tokens: IntArray
    paths: IntArray

    @staticmethod
    def within(
        *,
        prefix_len: int,
        node_ids: IntArray,
        tokens: IntArray,
        parent_ids: IntArray,
        request: int = 0,
    ) -> TreeRows:
        """Builds rows of W nodes; a node whose parent is not in ``node_ids`` is a root."""
        parent_of = dict(zip(node_ids.tolist(), parent_ids.tolist(), strict=True))
        paths, level = list[list[int]](), node_ids.tolist()
        while not paths or any(node_id != NO_NODE for node_id in level):
            assert len(paths) <= len(level), "a node is its own ancestor"
            paths.append(level)
            parents = [parent_of.get(node_id, NO_NODE) for node_id in level]
            level = [node_id if node_id in parent_of else NO_NODE for node_id in parents]
        return TreeRows(
            request=request, prefix_len=prefix_len, tokens=tokens, paths=np.array(paths, np.int64)
        )

    @property
    def node_ids(self) -> IntArray:
        return self.paths[0]

    @property
    def parent_ids(self) -> IntArray:
        """int64[W]; ``NO_NODE`` for the root."""
        return self.paths[1] if len(self.paths) > 1 else np.full_like(self.tokens, NO_NODE)

    @property
    def depths(self) -> IntArray:
        """int64[W], distance from the root at submission."""
        return np.count_nonzero(self.paths != NO_NODE, axis=0) - 1

    @property
    def positions(self) -> IntArray:
        """int64[W], absolute positions, which no later commit changes."""
        return self.prefix_len + self.depths

    def keep(self, mask: BoolArray) -> TreeRows:
        return self.take(mask.nonzero()[0])

    def take(self, rows: IntArray) -> TreeRows:
        """Returns the rows with the increasing indices ``rows``, int64[K] (used for pruning)."""
        return TreeRows(
            request=self.request,
            prefix_len=self.prefix_len,
            tokens=self.tokens.take(rows),
            paths=self.paths.take(rows, axis=1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt tokens of one request from position ``start`` on, under a causal mask.

    Prefill covers all prompt tokens except the last, which is the first root.
    """

    request: int
    start: int
    tokens: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows submitted to the target in one step; an empty batch only advances the step.

    A request's prefill chunk and its first root may share a batch; the chunk comes first.
    ``num_tokens`` counts the rows of the target's forward pass: tree nodes and prefill tokens.
    """

    step: int
    trees: tuple[TreeRows, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    num_nodes: int = field(init=False, repr=False, compare=False)
    num_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Counted once: every part of a step reads them.
        nodes = sum([len(rows.node_ids) for rows in self.trees])
        object.__setattr__(self, "num_nodes", nodes)
        tokens = nodes + sum([len(chunk.tokens) for chunk in self.prefills])
        object.__setattr__(self, "num_tokens", tokens)
