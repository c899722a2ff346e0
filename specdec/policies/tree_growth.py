"""What the policies share: asking the source for a forest at once, and who may be fed.

A *growth round* is one call of the source for the chosen nodes of all requests together, so that
many requests share one draft forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.sampling.top_stable import top_set
from specdec.tree import TokenTree
from specdec.types import Commit, FloatArray, IntArray, Nodes, Output

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState

NO_SLOTS: IntArray = np.zeros(0, np.int64)
"""int64[0], shared and never written."""


class Stateless:
    """The calls that mean nothing to a policy whose whole state is in the trees."""

    def open(self, request: RequestState) -> None:
        """Nothing to prepare."""

    def overlap(self, state: DecodeState, source: TokenSource, ready: Callable[[], bool]) -> None:
        """Nothing: a serial policy drafts in ``select``, before the target starts."""

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Nothing: the trees have already been rerooted."""

    def close(self, request_id: int) -> None:
        """Nothing to release."""


def ready_requests(state: DecodeState, *, serial: bool) -> list[RequestState]:
    """Requests that may be fed now, in order of admission.

    It is their turn, their prefill is entirely sent, they are not finished, and, for ``serial``
    policies, no answer is awaited.
    """
    return [
        request
        for request in state.requests.values()
        if (state.turn is None or request.id in state.turn)
        and request.prefill_sent >= request.num_prefill
        and not request.finished
        and not (serial and request.awaiting)
    ]


def last_position(request: RequestState) -> int:
    """Position of the last token that the request can emit.

    No node may stand beyond it: it could not be emitted, and the model may have no such position.
    """
    return request.num_prompt - 1 + request.stop.max_new_tokens


def expand(
    state: DecodeState,
    source: TokenSource,
    wanted: Sequence[tuple[RequestState, IntArray]],
    k: int,
) -> list[IntArray]:
    """One growth round: asks the source once for all requests and stores its answers in the trees.

    Args:
        state: the forest.
        source: asked for one packed batch of nodes; not at all when there is none.
        wanted: (request, int64[W_r] slots of unexpanded nodes); a request at most once.
        k: candidates per node at most.

    Returns:
        Per entry of ``wanted``, int64[W_r]: how many candidates each node got.
    """
    asked = [(request, slots) for request, slots in wanted if len(slots)]
    if not asked:
        return [NO_SLOTS for _ in wanted]
    nodes = Nodes(tuple((request.id, request.tree.ids[slots]) for request, slots in asked))
    with state.drafting():
        candidates = source.expand(state, nodes, k)
    assert len(candidates.counts) == len(nodes), "a source answers every node it is asked for"
    counts, start = [], 0
    for request, slots in wanted:
        rows = slice(start, start + len(slots))
        start = rows.stop
        counts.append(candidates.counts[rows])
        if len(slots):
            request.tree.set_candidates(slots, candidates, rows)
            _drop_known_children(request.tree, slots)
    return counts


def _drop_known_children(tree: TokenTree, slots: IntArray) -> None:
    """Marks candidates as taken whose token a child of the node carries already.

    A node may have children before it is expanded (``StagedTree``); siblings must differ.
    """
    if int(tree.parents.max()) < int(slots.min()):
        return
    is_parent = np.zeros(len(tree), np.bool_)
    is_parent[tree.parents[1:]] = True
    for slot in slots[is_parent.take(slots)].tolist():
        known = np.isin(tree.candidate_tokens[slot], tree.tokens[tree.children(slot)])
        tree.candidate_logprobs[slot, known] = -np.inf


def bottom_level(tree: TokenTree) -> IntArray:
    """int64[W]: slots of the deepest nodes."""
    positions = tree.positions
    return np.flatnonzero(positions == positions.max())


def open_bottom(request: RequestState) -> IntArray:
    """int64[W]: the nodes of the deepest level that the source has not answered for.

    None where children would stand beyond the last token that the request can emit.
    """
    tree = request.tree
    bottom = bottom_level(tree)
    if int(tree.positions[bottom[0]]) >= last_position(request):
        return NO_SLOTS
    return bottom[~tree.expanded[bottom]]


def append_best(tree: TokenTree, parents: IntArray, width: int, children: int) -> IntArray:
    """Makes nodes of the ``width`` most probable candidates of some nodes (PipeDec 3.3.3).

    Args:
        tree: the tree that grows.
        parents: int64[W], slots, one level as a rule.
        width: nodes to make at most, by cumulative probability, ties in slot order.
        children: candidates of each parent that are looked at, best first.

    Returns:
        int64[<= width]: slots of the new nodes, in the order of their parents (breadth-first,
        SpecPipe 3.2.1).
    """
    logprobs = tree.candidate_logprobs[parents, :children]  # [W, K]
    scores = (logprobs + tree.scores.take(parents)[:, None]).ravel()
    best = top_set(scores, width)
    best = best[scores.take(best) > -np.inf]
    if not len(best):
        return NO_SLOTS
    rows, columns = np.divmod(best, logprobs.shape[1])
    return tree.take(parents.take(rows), columns)


def most_probable(
    tree: TokenTree,
    node_scores: FloatArray,
    parent_scores: FloatArray,
    num: int,
    least: float = -np.inf,
) -> IntArray:
    """The ``num`` best of the nodes and of all candidates; candidates among them become nodes.

    Args:
        tree: the tree that is chosen from.
        node_scores: float64[N], what the nodes count for, -inf for those that may not be chosen.
        parent_scores: float64[N], what their candidates' log-probabilities are added to.
        num: how many at most; ties fall to nodes before candidates, then in slot order.
        least: score that a chosen one must have; the root has 0.

    Returns:
        int64[<= num]: slots, in slot order.
    """
    num_nodes = len(tree)
    candidate_scores = tree.candidate_logprobs + parent_scores[:, None]  # [N, K]
    scores = np.concatenate([node_scores, candidate_scores.ravel()])
    best = top_set(scores, num)
    chosen = scores.take(best)
    best = best[(chosen > -np.inf) & (chosen >= least)]
    split = int(best.searchsorted(num_nodes))
    if split == len(best):
        return best
    rows, columns = np.divmod(best[split:] - num_nodes, candidate_scores.shape[1])
    return np.concatenate([best[:split], tree.take(rows, columns)])


def best_leaves(
    request: RequestState, num: int, *, silent: IntArray = NO_SLOTS, least: float = -np.inf
) -> IntArray:
    """int64[<= num]: the most probable leaves, made nodes where they were candidates.

    A *leaf* is a node that was not expanded, or a candidate that was not made a node yet. Not a
    leaf: what stands where only the last token of the request could follow, so that near its end
    the whole number goes to nodes that can still be expanded.

    Args:
        request: whose tree is looked at, and grows.
        num: how many at most.
        silent: int64[S], slots that are left out.
        least: score that a leaf must have; the root has 0.
    """
    tree = request.tree
    scores, closed = tree.scores, tree.expanded
    parents = scores
    limit = last_position(request)
    if int(tree.positions.max()) + 1 >= limit:
        room = limit - tree.positions  # levels that may still follow
        closed = closed | (room < 1)
        parents = np.where(room > 1, scores, -np.inf)
    nodes = np.where(closed, -np.inf, scores)
    if len(silent):
        nodes[silent] = -np.inf
    return most_probable(tree, nodes, parents, num, least)


def unsubmitted(requests: Sequence[RequestState]) -> Nodes:
    """All nodes of the requests' trees that the target has not been given, parents first."""
    items = []
    for request in requests:
        tree = request.tree
        slots = np.flatnonzero(tree.submitted_at < 0)
        if len(slots):
            items.append((request.id, tree.ids[slots]))
    return Nodes(tuple(items))
