"""Rows that are fed to the target.

Shape letters: W nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.types.arrays import BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRows:
    """Tree nodes of one request as rows of the target's forward, parents before children.

    Attributes:
        request: request id.
        prefix_len: committed tokens before the root at submission.
        node_ids: int64[W], stable ids.
        tokens: int64[W].
        parent_ids: int64[W]; ``NO_NODE`` for the root.
        depths: int64[W], below the root at submission; position = prefix_len + depth.
    """

    request: int
    prefix_len: int
    node_ids: IntArray
    tokens: IntArray
    parent_ids: IntArray
    depths: IntArray

    @property
    def positions(self) -> IntArray:
        """int64[W]: absolute positions, which no later commit changes."""
        return self.prefix_len + self.depths

    def keep(self, mask: BoolArray) -> TreeRows:
        """The rows where ``mask``, bool[W], is true."""
        return self.take(mask.nonzero()[0])

    def take(self, rows: IntArray) -> TreeRows:
        """Some rows, int64[K], in increasing order (pruning in flight, SpecPipe Alg. 1)."""
        return TreeRows(
            request=self.request,
            prefix_len=self.prefix_len,
            node_ids=self.node_ids.take(rows),
            tokens=self.tokens.take(rows),
            parent_ids=self.parent_ids.take(rows),
            depths=self.depths.take(rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt tokens ``start .. start + len(tokens)`` of one request, under a causal mask.

    Prefill covers all prompt tokens but the last, which is the first root.
    """

    request: int
    start: int
    tokens: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows submitted to the target in one step; an empty batch is only a step tick.

    A request's prefill chunk and its first root may share a batch; the chunk comes first.

    Attributes:
        step: of the loop.
        trees, prefills: the rows.
        num_nodes: tree nodes of all requests.
        num_tokens: rows of the target's forward: tree nodes and prefill tokens.
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
