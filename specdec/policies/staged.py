"""Trees whose easy tails come from a cheaper source (Staged Speculative Decoding, 3.1-3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, cast

import numpy as np
from pydantic import Field

from specdec.interfaces import TreePolicy
from specdec.parts.fields import expects, validated
from specdec.policies.growing import NO_SLOTS, last_position
from specdec.sampling.top_stable import top_stable
from specdec.tree import TokenTree
from specdec.types import Candidates, Commit, IntArray, Nodes, Output

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState

CHEAP_ORIGIN = 1
"""Origin of nodes that the cheaper source proposed; the main source's are 0."""

_Extension = Annotated[
    int,
    Field(ge=1),
    expects("it must be a whole number of at least 1, or use the inner policy alone"),
]


class StagedTree:
    """An inner policy's tree, extended at its most probable leaves by the cheaper source.

    The paper's draft2 (an n-gram model) serves the draft inside a staged source; here its guesses
    also reach the target directly: whitespace and the like needs no draft at all (Figure 3, token
    origins). The leaves of the tree that the inner policy submits would cost the draft a forward
    each; the cheaper source, ``source.cheap``, continues the best of them as chains.
    """

    serial = True
    value_dependent = True  # the guesses are no samples of the draft's distribution

    @validated
    def __init__(
        self,
        *,
        inner: TreePolicy,
        extend_leaves: _Extension,
        extend_depth: _Extension,
    ) -> None:
        """Wraps a policy.

        Args:
            inner: any policy that grows its tree in ``select`` and then waits for the answer
                (chain, static, serial fixed width, best-first).
            extend_leaves: leaves per request that are extended, the most probable ones.
            extend_depth: guesses below each.

        Raises:
            ValueError: for a size below 1 or an inner policy that feeds without waiting.
        """
        if not getattr(inner, "serial", True):
            raise ValueError(
                f"policy.inner={type(inner).__name__} feeds the target at every step; a staged tree"
                " is submitted whole: set policy.inner._target_ to Chain, Static, BestFirst (of"
                " specdec.policies), or FixedWidth with policy.inner.levels_per_step=null"
            )
        self.inner = inner
        self.extend_leaves = extend_leaves
        self.extend_depth = extend_depth

    def open(self, request: RequestState) -> None:
        """Passed on."""
        self.inner.open(request)

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time; see ``TreePolicy``."""
        return self.inner.held_nodes(latency) + self.extend_leaves * self.extend_depth

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """The inner policy's choice and the cheaper source's chains below it."""
        cheap = cheap_source(source)
        chosen = self.inner.select(state, source)
        tails = []
        for request_id, ids in chosen.items:
            request = state.requests[request_id]
            slots = request.tree.slots(ids)
            tails.append((request, _best_leaves(request.tree, slots, self.extend_leaves)))
        grown: dict[int, list[IntArray]] = {}
        for _ in range(self.extend_depth):
            tails = [(request, _with_room(request, slots)) for request, slots in tails]
            tails = [(request, slots) for request, slots in tails if len(slots)]
            if not tails:
                break
            tails = _extend(state, cheap, tails)
            for request, slots in tails:
                grown.setdefault(request.id, []).append(request.tree.ids[slots])
        return Nodes(
            tuple((i, np.concatenate([ids, *grown.get(i, [])])) for i, ids in chosen.items)
        )

    def overlap(self, state: DecodeState, source: TokenSource, ready: Callable[[], bool]) -> None:
        """Passed on."""
        self.inner.overlap(state, source, ready)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Passed on."""
        self.inner.commit(commits, output)

    def close(self, request_id: int) -> None:
        """Passed on."""
        self.inner.close(request_id)


def cheap_source(source: TokenSource) -> TokenSource:
    """The cheaper source inside a staged one; ``StagedTree`` cannot do without it.

    Raises:
        ValueError: where the source has none.
    """
    cheap = getattr(source, "cheap", None)
    if cheap is None:
        raise ValueError(
            f"policy=staged_tree extends leaves by the cheaper source inside of a staged one;"
            f" {type(source).__name__} has none: use source=staged (its key source.cheap), or the"
            " inner policy alone (policy=chain, policy=static, ...)"
        )
    return cast("TokenSource", cheap)


def _best_leaves(tree: TokenTree, slots: IntArray, num: int) -> IntArray:
    """int64[<= num]: the most probable of ``slots`` without children and without candidates.

    The main source has an opinion about an expanded leaf already; its candidates were not chosen.
    """
    is_leaf = ~tree.expanded
    is_leaf[tree.parents[1:]] = False
    leaves = slots[is_leaf.take(slots)]
    leaves = leaves[top_stable(tree.scores.take(leaves), num)]
    leaves.sort()
    return leaves


def _with_room(request: RequestState, slots: IntArray) -> IntArray:
    """The nodes below which a token could still be emitted."""
    return slots[request.tree.positions.take(slots) < last_position(request)]


def _extend(
    state: DecodeState, cheap: TokenSource, tails: list[tuple[RequestState, IntArray]]
) -> list[tuple[RequestState, IntArray]]:
    """Appends the cheaper source's first guess to every tail; the new tails.

    The guesses do not go through ``TokenTree.set_candidates``: the nodes stay unexpanded, since the
    main source has not been asked about them.
    """
    nodes = Nodes(tuple((request.id, request.tree.ids[slots]) for request, slots in tails))
    with state.drafting():
        candidates = cheap.expand(state, nodes, 1)
    longer, start = [], 0
    for request, slots in tails:
        rows = slice(start, start + len(slots))
        start = rows.stop
        longer.append((request, _append_guesses(request.tree, slots, candidates, rows)))
    return longer


def _append_guesses(
    tree: TokenTree, slots: IntArray, candidates: Candidates, rows: slice
) -> IntArray:
    answered = np.flatnonzero(candidates.counts[rows])
    if not len(answered):
        return NO_SLOTS
    parents = slots[answered]
    lines = answered + rows.start
    if candidates.probs is not None:
        for node_id, line in zip(tree.ids[parents].tolist(), lines.tolist(), strict=True):
            tree.draft_probs[node_id] = candidates.probs[line]
    return tree.append(
        parents,
        candidates.tokens[lines, 0],
        candidates.logprobs[lines, 0],
        np.full(len(parents), CHEAP_ORIGIN),
    )
