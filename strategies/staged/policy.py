from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from specdec.errors import UserError
from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import expects, validated
from specdec.policies.tree_growth import NO_SLOTS, as_nodes, last_position
from specdec.sampling.top_stable import top_stable
from specdec.tree import TokenTree
from specdec.types import Candidates, Commit, IntArray, Nodes, Output

if TYPE_CHECKING:
    from specdec.clocks.interface import Clock
    from specdec.state import DecodeState, RequestState

CHEAP_ORIGIN = 1
"""The origin of nodes that the cheaper source proposed; those of the main source have 0."""

_Extension = Annotated[
    int,
    Field(ge=1),
    expects("it must be a whole number of at least 1, or use the inner policy alone"),
]


class StagedTree(TreePolicy):
    """Extends an inner policy's tree by chains of a cheaper source below its most probable leaves.

    The paper's draft2 (an n-gram model) serves the draft inside a staged source (3.2). Here its
    guesses also reach the target directly, since tokens such as whitespace need no draft model
    (Figure 3). To extend a leaf, the draft would need one more forward pass; ``source.cheap`` does
    without.

    Args:
        inner: a serial policy (chain, static, best-first, serial fixed width).
        extend_leaves: number of leaves to extend per request, the most probable ones.
        extend_depth: length of the chain below each leaf.
    """

    value_dependent = True  # the guesses are not samples of the draft's distribution

    @validated
    def __init__(
        self,
        *,
        inner: TreePolicy,
        extend_leaves: _Extension,
        extend_depth: _Extension,
    ) -> None:
        if not inner.serial:
            raise ValueError(
                f"policy.inner={type(inner).__name__} submits at every step, but a staged tree is"
                " submitted whole: set policy.inner._target_ to Chain, Static, BestFirst (of"
                " specdec.policies), or FixedWidth with policy.inner.levels_per_step=null"
            )
        self.inner = inner
        self.extend_leaves = extend_leaves
        self.extend_depth = extend_depth

    def open(self, request: RequestState) -> None:
        self.inner.open(request)

    def held_nodes(self, in_flight: int) -> int | None:
        inner = self.inner.held_nodes(in_flight)
        return None if inner is None else inner + self.extend_leaves * self.extend_depth

    def check_clock(self, clock: Clock) -> None:
        self.inner.check_clock(clock)

    def check_source(self, source: TokenSource) -> None:
        cheap_source(source)

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        cheap = cheap_source(source)
        selected = self.inner.select(state, source)
        tails = []
        for request_id, ids in selected.items:
            request = state.requests[request_id]
            slots = request.tree.slots(ids)
            tails.append((request, _best_leaves(request.tree, slots, self.extend_leaves)))
        chains: dict[int, list[IntArray]] = {}
        for _ in range(self.extend_depth):
            tails = [
                (request, inside)
                for request, slots in tails
                if len(inside := slots[request.tree.positions[slots] < last_position(request)])
            ]
            if not tails:
                break
            tails = _extend(state, cheap, tails)
            for request, slots in tails:
                chains.setdefault(request.id, []).append(request.tree.ids[slots])
        return Nodes(
            tuple((i, np.concatenate([ids, *chains.get(i, [])])) for i, ids in selected.items)
        )

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        return self.inner.overlap(state, source, events)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        self.inner.commit(commits, output)

    def close(self, request_id: int) -> None:
        self.inner.close(request_id)


def cheap_source(source: TokenSource) -> TokenSource:
    """Returns the cheaper source inside a staged source; raises ``UserError`` if there is none."""
    if source.cheap is None:
        raise UserError(
            "policy=staged_tree needs the cheaper source of a staged source;"
            f" {type(source).__name__} has none: use source=staged (its key source.cheap), or the"
            " inner policy alone (policy=chain, policy=static, ...)"
        )
    return source.cheap


def _best_leaves(tree: TokenTree, slots: IntArray, num: int) -> IntArray:
    """Returns the most probable of ``slots`` without children and candidates, int64[<= num].

    An expanded leaf has candidates that the inner policy did not select, so it is skipped.
    """
    is_leaf = ~tree.expanded
    is_leaf[tree.parents[1:]] = False
    leaves = slots[is_leaf.take(slots)]
    leaves = leaves[top_stable(tree.scores.take(leaves), num)]
    leaves.sort()
    return leaves


def _extend(
    state: DecodeState, cheap: TokenSource, tails: list[tuple[RequestState, IntArray]]
) -> list[tuple[RequestState, IntArray]]:
    """Appends the cheaper source's first guess to every tail; returns the new tails.

    The guesses bypass ``TokenTree.set_candidates``: their parents stay unexpanded, since the main
    source has not proposed candidates for them.
    """
    with state.drafting():
        candidates = cheap.expand(state, as_nodes(tails), 1)
    longer, start = [], 0
    for request, slots in tails:
        rows = slice(start, start + len(slots))
        start = rows.stop
        longer.append((request, _append_guesses(request.tree, slots, candidates, rows)))
    return longer


def _append_guesses(
    tree: TokenTree, slots: IntArray, candidates: Candidates, rows: slice
) -> IntArray:
    """Returns int64[<= W]: slots of the new nodes below those ``slots`` that have a candidate."""
    proposed = np.flatnonzero(candidates.counts[rows])
    if not len(proposed):
        return NO_SLOTS
    parents = slots[proposed]
    lines = proposed + rows.start
    if candidates.probs is not None:
        for node_id, line in zip(tree.ids[parents].tolist(), lines.tolist(), strict=True):
            tree.draft_probs[node_id] = candidates.probs[line]
    return tree.append(
        parents,
        candidates.tokens[lines, 0],
        candidates.logprobs[lines, 0],
        np.full(len(parents), CHEAP_ORIGIN),
    )
