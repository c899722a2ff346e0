"""Operations that tree policies share, and the policy that grows trees level by level.

A *growth round* is one call of ``TokenSource.expand`` for the selected nodes of all requests
together, so that all requests share one draft forward.

Shape letters: N nodes, W selected nodes, K candidates per node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.clocks import LatencyProfile, Work
from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import Count, DraftCount, validated
from specdec.sampling.transform import top_set
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import FloatArray, IntArray, Nodes

_LOWEST = float(np.finfo(np.float64).min)  # a lower bound of every score but -inf

NO_SLOTS: IntArray = np.zeros(0, np.int64)
"""An empty array of slots, int64[0], which all callers share and must not write to."""


def live_requests(state: DecodeState) -> list[RequestState]:
    return [request for request in state.requests.values() if not request.finished]


def ready_requests(state: DecodeState, *, serial: bool) -> list[RequestState]:
    """Returns the requests whose nodes may be submitted in this step, in order of admission: those
    in ``state.turn`` whose prefill is submitted and, if ``serial``, without unanswered nodes.
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
    """Returns the position of the last token that the request can emit, beyond which a model may
    have no positions.
    """
    return request.num_prompt - 1 + request.stop.max_new_tokens


def as_nodes(selected: Iterable[tuple[RequestState, IntArray]]) -> Nodes:
    return Nodes(tuple([(r.id, r.tree.ids[slots]) for r, slots in selected if len(slots)]))


def unsubmitted(requests: Iterable[RequestState]) -> Nodes:
    return as_nodes([(r, (r.tree.submitted_at < 0).nonzero()[0]) for r in requests])


def expand(
    state: DecodeState,
    source: TokenSource,
    selected: Iterable[tuple[RequestState, IntArray]],
    k: int,
) -> None:
    """Requests up to ``k`` candidates for each unexpanded node of ``selected``, pairs (request,
    int64[W_r] slots) with each request once, in one source call; stores them in the trees.
    """
    fresh = [(r, slots[~r.tree.expanded.take(slots)]) for r, slots in selected]
    nodes = as_nodes(fresh)
    if not nodes.items:
        return
    with state.drafting():
        candidates = source.expand(state, nodes, k)
    assert len(candidates.counts) == len(nodes), "a source returns one row per node"
    waiting = [(request.tree, slots) for request, slots in fresh if len(slots)]
    for (tree, slots), (_, _, rows) in zip(waiting, nodes.packed(), strict=True):
        tree.set_candidates(slots, candidates, rows)
        tree.drop_known_children(slots)


def expand_beams(
    state: DecodeState,
    source: TokenSource,
    spans: Sequence[tuple[RequestState, int, int]],
    width: int,
    k: int,
) -> None:
    """Expands the ``width`` best nodes of each level in ``spans``, triples (request, first level,
    level after the last), with one source call per level for all requests.
    """
    for step in range(max((stop - first for _, first, stop in spans), default=0)):
        growing = [(r, first + step) for r, first, stop in spans if first + step < stop]
        expand(state, source, [(r, best_of_level(r, at, width)) for r, at in growing], k)


def growable_level(request: RequestState) -> IntArray:
    """Returns int64[W]: slots of the deepest nodes; none if no child of theirs can be emitted."""
    positions = request.tree.positions
    deepest = positions.max()
    return np.flatnonzero(positions == deepest) if deepest < last_position(request) else NO_SLOTS


def append_best(tree: TokenTree, parents: IntArray, width: int, children: int) -> IntArray:
    """Turns candidates into nodes: the ``width`` most probable of all that are among the first
    ``children`` of a node in ``parents``, slots int64[W] (PipeDec 3.3.3), ties in slot order.

    Returns the new slots, int64[<= width], in the order of their parents (breadth-first, SpecPipe
    3.2.1).
    """
    logprobs = tree.candidate_logprobs.take(parents, axis=0)[:, :children]  # [W, K]
    scores = (logprobs + tree.scores.take(parents)[:, None]).ravel()
    best = top_set(scores, width)
    best = best[scores.take(best) > -np.inf]
    if not len(best):
        return NO_SLOTS
    rows, columns = np.divmod(best, logprobs.shape[1])
    return tree.take(parents.take(rows), columns)


def take_first(tree: TokenTree, slots: IntArray, num: int) -> IntArray:
    """Turns the first ``num`` untaken candidates of each node into nodes; returns their slots."""
    untaken = tree.candidate_logprobs[slots] > -np.inf
    rows, columns = np.nonzero(untaken & (untaken.cumsum(axis=1) <= num))
    return tree.take(slots[rows], columns) if len(rows) else NO_SLOTS


def most_probable(
    tree: TokenTree,
    node_scores: FloatArray,
    parent_scores: FloatArray,
    num: int,
    min_score: float = -np.inf,
) -> IntArray:
    """Selects the ``num`` highest-scoring nodes and candidates; selected candidates become nodes.

    With ``tree.scores`` for both they form the best connected subgraph (SwiftSpec Alg. 1), since a
    child's score is at most its parent's. Ties go to nodes before candidates, then in slot order.

    ``node_scores``, float64[N], are the nodes' scores; ``parent_scores``, float64[N], are added to
    the log-probabilities of each node's candidates (-inf excludes). Selected nodes score at least
    ``min_score`` (the root's score is 0). Returns int64[<= num]: slots, in slot order.
    """
    num_nodes = len(tree)
    candidate_scores = tree.candidate_logprobs + parent_scores[:, None]  # [N, K]
    scores = np.concatenate([node_scores, candidate_scores.ravel()])
    # Applying the limit first is faster: few entries remain, often no more than ``num``.
    best = (scores >= max(min_score, _LOWEST)).nonzero()[0]
    if len(best) > num:
        best = best.take(top_set(scores.take(best), num))
    split = int(best.searchsorted(num_nodes))
    if split == len(best):
        return best
    rows, columns = np.divmod(best[split:] - num_nodes, candidate_scores.shape[1])
    return np.concatenate([best[:split], tree.take(rows, columns)])


def best_unsubmitted(tree: TokenTree, num: int, min_score: float = -np.inf) -> IntArray:
    """Returns the slots of the most probable unsubmitted nodes and candidates, int64[<= num],
    parents first; the candidates become nodes. Together with submitted nodes they are connected.
    """
    node_scores = np.where(tree.submitted_at < 0, tree.scores, -np.inf)
    return most_probable(tree, node_scores, tree.scores, num, min_score)


def best_leaves(
    request: RequestState, num: int, *, excluded: IntArray = NO_SLOTS, min_score: float = -np.inf
) -> IntArray:
    """Returns the slots of the most probable leaves, int64[<= num], other than slots ``excluded``;
    returned candidates become nodes.

    A *leaf* is an unexpanded node or an untaken candidate that can have children.
    """
    tree = request.tree
    scores, closed = tree.scores, tree.expanded
    parents = scores
    limit = last_position(request)
    if int(tree.positions.max()) + 1 >= limit:
        room = limit - tree.positions  # levels that fit below each node
        closed = closed | (room < 1)
        parents = np.where(room > 1, scores, -np.inf)
    nodes = np.where(closed, -np.inf, scores)
    if len(excluded):
        nodes[excluded] = -np.inf
    return most_probable(tree, nodes, parents, num, min_score)


def best_of_level(request: RequestState, level: int, num: int) -> IntArray:
    """Returns the slots of the most probable nodes and candidates ``level`` steps below the root,
    int64[<= num]; none if no child of theirs could be emitted.
    """
    tree = request.tree
    if tree.positions[0] + level >= last_position(request):
        return NO_SLOTS
    nodes = np.where(tree.depths == level, tree.scores, -np.inf)
    above = np.where(tree.depths == level - 1, tree.scores, -np.inf)
    return most_probable(tree, nodes, above, num)


def draft_passes(profile: LatencyProfile | None, *, stages: int = 1, rows: int = 1) -> float | None:
    """Returns target pass time / time of a draft pass of ``rows`` rows; None if unknown."""
    if profile is None:
        return None
    target_ms, draft_ms = profile.ms(Work.STAGE, 1), profile.ms(Work.DRAFT, rows)
    return stages * target_ms / draft_ms if target_ms and draft_ms else None


@validated
@dataclass(eq=False, kw_only=True)
class FixedWidth(TreePolicy):
    """Gives each level the ``width`` candidates of highest cumulative probability, among the
    ``children`` best of each node of the level above (SpecPipe 3.3.3, PipeDec 3.3).

    *Pipelined form* (``levels_per_step`` set): each step submits that many levels. The draft
    forward of the newest level runs in ``overlap`` while the pipeline computes; its candidates are
    selected in the next ``select``, after the step's pruning (PipeDec 3.3.4). If pruning empties
    the deepest levels, growth continues at the deepest remaining level. Additional levels of a step
    are grown in ``overlap`` from the candidates known then. Hits need an executor of latency 2 or
    more.

    *Serial form* (``levels_per_step`` None): ``select`` grows ``depth`` levels and submits the tree
    whole.

    With a source that proposes through ``Output.exits`` (PPSD), a level is expanded once its exits
    have arrived. Width 1 with 1 child is PPSD's own chain, which grows even if its request may not
    submit: whether a node has a child when rejection tests it must not depend on the batch.

    Args:
        width: maximum number of nodes per level (SpecPipe: 64, PipeDec: 32).
        children: maximum number of candidates per node (16 in both papers).
        levels_per_step: levels submitted per step; None selects the serial form.
        depth: levels below the root; serial form only.
    """

    width: DraftCount
    children: Count
    levels_per_step: Count | None = 1
    depth: Count | None = None

    def __post_init__(self) -> None:
        if self.levels_per_step is not None and self.depth is not None:
            raise ValueError(
                f"policy.depth={self.depth} has no effect with policy.levels_per_step="
                f"{self.levels_per_step}; remove it, or set policy.levels_per_step=null"
            )
        if self.levels_per_step is None and self.depth is None:
            raise ValueError(
                "policy.levels_per_step=null submits whole trees and needs policy.depth; set it"
                " to the number of levels"
            )
        self.serial = self.levels_per_step is None
        self.follows_exits = not self.serial
        self.value_dependent = self.width > 1 or self.children > 1

    def max_cached_nodes(self, in_flight: int) -> int:
        if self.depth is not None:
            return 1 + self.depth * self.width
        return 1 + self.width * (self.levels_per_step or 1) * in_flight

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=self.serial)
        if self.depth is not None:
            growing = requests
            while growing := [r for r in growing if int(r.tree.depths.max()) < self.depth]:
                expand(state, source, [(r, growable_level(r)) for r in growing], self.children)
                growing = [r for r in growing if len(self._append_level(r))]
            return unsubmitted(requests)
        growing = requests
        if source.needs.exits:
            if not self.value_dependent:
                growing = live_requests(state)
            submitted = [r for r in growing if r.tree.submitted_at[0] >= 0]
            expand(state, source, [(r, growable_level(r)) for r in submitted], self.children)
        for request in growing:
            if request.tree.submitted_at[0] >= 0 or len(request.tree) > 1:
                self._append_level(request)
        return unsubmitted(requests)

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        """Expands the newest level and, with ``levels_per_step`` > 1, grows the further levels of
        the step. A root is expanded during its request's prefill, so that the prefills of draft and
        target run in parallel (PipeDec 3.4).
        """
        if source.needs.exits:
            return False  # no node has passed the exit since ``select``
        growing = live_requests(state)
        for extra in range(self.levels_per_step or 0):
            if extra:
                growing = [
                    request
                    for request in growing
                    if _submitting(request, state.step) and len(self._append_level(request))
                ]
            expand(state, source, [(r, growable_level(r)) for r in growing], self.children)
        return False

    def _append_level(self, request: RequestState) -> IntArray:
        return append_best(request.tree, growable_level(request), self.width, self.children)


def _submitting(request: RequestState, step: int) -> bool:
    submitted_at = request.tree.submitted_at
    return bool(submitted_at[0] >= 0) and int(submitted_at.max()) == step
