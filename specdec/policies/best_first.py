import itertools
from math import exp
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import Count, Share, expects, validated
from specdec.policies.tree_growth import (
    NO_SLOTS,
    as_nodes,
    best_leaves,
    best_unsubmitted,
    expand,
    live_requests,
    ready_requests,
)
from specdec.state import DecodeState, RequestState
from specdec.tree import TokenTree
from specdec.types import IntArray, Nodes

_FROM_TWO = expects("it must be a whole number of at least 2; the root alone is policy=root_only")

UNTIL_READY = "until_ready"
"""Value of ``d`` in ``BestFirst``: expand leaves until the target's pass has ended."""

COMPLETE = "complete"
"""Value of ``d`` in ``BestFirst``: expand until the nodes to submit can no longer change."""


class BestFirst(TreePolicy):
    """Expands the most probable leaves and verifies the most probable connected subgraph.

    SwiftSpec, section 3.1, Alg. 1. A leaf is an unexpanded node or a candidate (``best_leaves``);
    only expanded or submitted candidates become nodes. With the default number of children no
    omitted child can be among the ``bs`` best nodes or the ``w`` best leaves.

    *Serial form* (SwiftSpec-base, the paper's ablation): ``select`` expands the ``w`` best leaves
    ``d`` times, continues while fewer than ``bs`` nodes are available, and submits the ``bs`` best.

    *Asynchronous form* (SwiftSpec, Alg. 1): the ``d`` expansions run in ``overlap``, while the
    target verifies; ``select`` expands only while fewer than ``bs`` nodes are available, as after a
    miss (lines 13-15), and, with ``min_mass``, as long as that pays.

    *Complete trees* (``d="complete"``, serial): leaves are expanded only if they are among the
    ``bs`` best nodes and candidates, until there are none. The result is the best ``bs`` nodes of
    the source's infinite tree. For a source that proposes for all positions at once (Medusa heads,
    block drafters) this is DDTree's tree of products of marginals (arXiv 2604.12989).

    Args:
        bs: nodes per target pass, including the root, at least 2 (the paper: 8).
        w: leaves per expansion (the paper: 8).
        d: number of expansions per target pass. "complete" (serial form only) is described above;
            "until_ready" or None (asynchronous form only) expands until the target is ready. The
            configuration replaces "ratio" and "ratio_plus_one" by a number for the latency profile.
        children: candidates per expanded leaf; the paper does not state it. Default: max(bs, w).
        asynchronous: expand in ``overlap`` instead of in ``select``.
        min_mass: minimum total probability of the ``w`` best leaves, an upper bound on the tokens
            gained, for an expansion to pay. A useful value is (time of a draft pass / time of a
            target pass) x tokens per pass. In the serial form a lower total ends a request's
            expansions; in the asynchronous form ``select`` expands until then. 0 disables it.
        min_prob: nodes whose draft probability of being on the target's path is lower are neither
            expanded nor submitted; a useful value is at most (time that a row adds / time of a
            target pass) x tokens per pass.

    Attributes:
        expansions: number of source calls, "between" target passes and "beside" (during) them.
    """

    value_dependent = True

    @validated
    def __init__(
        self,
        *,
        bs: Annotated[int, Field(ge=2), _FROM_TWO],
        w: Count,
        d: Count | Literal["until_ready", "complete", "ratio", "ratio_plus_one"] | None,
        children: Count | None = None,
        asynchronous: bool = False,
        min_mass: Share = 0.0,
        min_prob: Share = 0.0,
    ) -> None:
        d = None if d == UNTIL_READY else d
        if d is None and not asynchronous:
            raise ValueError(
                f"policy.d={UNTIL_READY} (expand until the target is ready) needs"
                " policy.asynchronous=true; set policy.d to a number of expansions"
            )
        self._complete = d == COMPLETE
        if self._complete and asynchronous:
            raise ValueError(
                "policy.d=complete drafts the whole tree before it is submitted: use"
                " policy.asynchronous=false, or a number of expansions"
            )
        if isinstance(d, str) and not self._complete:
            raise ValueError(f"policy.d={d} needs a latency profile; set a number in Python")
        self.bs = bs
        self.w = w
        self.d = None if isinstance(d, str) else d
        self.asynchronous = asynchronous
        self.min_mass = min_mass
        self.min_prob = min_prob
        self._min_score = float(np.log(min_prob)) if min_prob else -np.inf
        self._children = children or max(bs, w)
        self.expansions = {"between": 0, "beside": 0}

    def max_cached_nodes(self, in_flight: int) -> int:
        return self.bs

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests = ready_requests(state, serial=True)
        unanswered: dict[int, IntArray] = {}
        if not self.asynchronous:
            growing = requests
            rounds = itertools.count() if self._complete else range(self.d or 0)
            for _ in rounds:
                if not (growing := self._grow(state, source, growing, unanswered, paying=True)):
                    break
        short = requests
        while short := [r for r in short if _num_available(r.tree) < self.bs]:
            short = self._grow(state, source, short, unanswered)
        late = requests if self.asynchronous and self.min_mass else []
        for _ in range(self.bs - 1):  # deeper nodes could not be submitted
            if not (late := self._grow(state, source, late, unanswered, paying=True)):
                break
        return as_nodes((r, best_unsubmitted(r.tree, self.bs, self._min_score)) for r in requests)

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        if not self.asynchronous:
            return False
        growing = live_requests(state)
        unanswered: dict[int, IntArray] = {}
        rounds = 0
        while growing and (rounds < self.d if self.d is not None else not events.ready()):
            growing = self._grow(state, source, growing, unanswered, when="beside")
            rounds += 1
        return False

    def _grow(
        self,
        state: DecodeState,
        source: TokenSource,
        requests: list[RequestState],
        unanswered: dict[int, IntArray],
        *,
        paying: bool = False,
        when: Literal["between", "beside"] = "between",
    ) -> list[RequestState]:
        """Expands the ``w`` most probable leaves of each request in one call of the source; if
        ``paying``, only of requests for which ``_pays`` is true.

        Leaves in ``unanswered`` (request id -> slots) are skipped; leaves without candidates from
        the source are added to it. Returns the requests whose leaves were expanded.
        """
        leaves = []
        for request in requests:
            excluded = unanswered.get(request.id, NO_SLOTS)
            least = self._least_score(request)
            slots = best_leaves(request, self.w, excluded=excluded, min_score=least)
            if len(slots) and (not paying or self._pays(request, slots)):
                leaves.append((request, slots))
        if not leaves:
            return []
        self.expansions[when] += 1
        expand(state, source, leaves, self._children)
        for request, slots in leaves:
            silent = slots[~request.tree.expanded.take(slots)]
            if len(silent):
                excluded = unanswered.get(request.id, NO_SLOTS)
                unanswered[request.id] = np.concatenate([excluded, silent])
        return [request for request, _ in leaves]

    def _pays(self, request: RequestState, leaves: IntArray) -> bool:
        """Returns whether expanding these leaves (slots) is worth a pass of the source."""
        return not self.min_mass or mass(request.tree, leaves) >= self.min_mass

    def _least_score(self, request: RequestState) -> float:
        tree = request.tree
        if not self._complete or _num_available(tree) < self.bs:
            return self._min_score
        # Children of the last of the bs best score no more than it does, so it needs none.
        scores = np.concatenate(
            [tree.scores, (tree.candidate_logprobs + tree.scores[:, None]).ravel()]
        )
        last = np.partition(scores, -self.bs)[-self.bs]
        return max(float(np.nextafter(last, np.inf)), self._min_score)


def mass(tree: TokenTree, slots: IntArray) -> float:
    """Returns the sum of the nodes' probabilities; a node's is that of its path below the root."""
    return sum(map(exp, tree.scores.take(slots).tolist()))


def _num_available(tree: TokenTree) -> int:
    """Returns the number of nodes and untaken candidates (what SwiftSpec calls the tree's size)."""
    return len(tree) + int(np.count_nonzero(tree.candidate_logprobs > -np.inf))
