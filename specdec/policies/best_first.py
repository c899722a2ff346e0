"""Maximum-likelihood trees of any shape (SwiftSpec 3.1, Alg. 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from specdec.parts.fields import Count, Share, expects, validated
from specdec.policies.growing import (
    NO_SLOTS,
    Stateless,
    best_leaves,
    expand,
    most_probable,
    ready_requests,
)
from specdec.tree import TokenTree
from specdec.types import IntArray, Nodes

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState

_FROM_TWO = expects("it must be a whole number of at least 2; the root alone is policy=root_only")

UNTIL_READY = "until_ready"
"""Value of ``d`` that stands for as many expansions as fit beside the target's pass."""


class BestFirst(Stateless):
    """Expands the most probable leaves and verifies the most probable connected subgraph.

    Leaves are those of ``best_leaves``; nodes are made only of what is expanded or submitted. An
    expansion asks for ``max(bs, w)`` children, so no child left out could be among the ``bs`` best
    nodes or the ``w`` best leaves. The paper does not say how many it asks for. With fewer the
    subgraph is the best one of a smaller tree, and a root that stands alone takes several serial
    expansions to ``bs`` nodes: a deeper tree, later.

    *Serial* form (SwiftSpec-base, the paper's ablation): ``select`` expands the ``w`` best leaves
    ``d`` times, goes on while fewer than ``bs`` nodes are available, and submits the ``bs`` best
    ones, root included; then nothing until they are answered.

    *Asynchronous* form (SwiftSpec, Alg. 1): the ``d`` expansions run in ``overlap``, while the
    target verifies; ``select`` only makes good what is missing to ``bs`` nodes (lines 13-15).

    Either waits for its answers; ``PipelineBestFirst`` is the form that feeds at every step.
    """

    value_dependent = True
    serial = True

    @validated
    def __init__(
        self,
        *,
        bs: Annotated[int, Field(ge=2), _FROM_TWO],
        w: Count,
        d: Count | Literal["until_ready", "ratio", "ratio_plus_one"] | None,
        children: Count | None = None,
        asynchronous: bool = False,
        min_mass: Share = 0.0,
        min_prob: Share = 0.0,
    ) -> None:
        """Sets the sizes, by the paper's names.

        Args:
            bs: nodes per target pass, root included, at least 2 (the paper: 8).
            w: leaves per expansion (the paper: 8).
            d: expansions per round; "until_ready" (or None): until the target is (asynchronous).
                The command line turns "ratio" and "ratio_plus_one" into a number (``cli.fitting``).
            children: candidates per expanded leaf; None: max(bs, w).
            asynchronous: expand in ``overlap`` instead of in ``select``.
            min_mass: serial form: a request's ``d`` expansions end early once the ``w`` best leaves
                hold less than this probability together, since no expansion gains more tokens than
                that. Worth it below (draft pass / target pass) x tokens per pass; 0 never stops.
            min_prob: nodes that the draft finds less likely to be on the target's path are neither
                expanded nor submitted: worth it below (cost of a row / target pass) x tokens per
                pass, where rows cost anything (CPUs, large batches). 0 keeps all.

        Raises:
            ValueError: for a size out of range.
        """
        d = None if d == UNTIL_READY else d
        if d is None and not asynchronous:
            raise ValueError(
                f"policy.d={UNTIL_READY} (expand until the target is ready) needs"
                " policy.asynchronous=true; give a number of expansions"
            )
        if isinstance(d, str):
            raise ValueError(f"policy.d={d} follows from a latency profile; here give the number")
        self.bs = bs
        self.w = w
        self.d = d
        self.asynchronous = asynchronous
        self.min_mass = min_mass
        self.min_prob = min_prob
        self._least = float(np.log(min_prob)) if min_prob else -np.inf
        self._children = children or max(bs, w)
        self.expansions = {"between": 0, "beside": 0}

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time; see ``TreePolicy``."""
        return self.bs

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """The ``bs`` most probable nodes of every idle request."""
        requests = ready_requests(state, serial=True)
        silent: dict[int, IntArray] = {}
        if not self.asynchronous:
            growing = requests
            for _ in range(self.d or 0):
                growing = self._grow(state, source, growing, silent, self.min_mass)
                if not growing:
                    break
                self.expansions["between"] += 1
        short = requests
        while short := [r for r in short if _num_available(r.tree) < self.bs]:
            short = self._grow(state, source, short, silent)
            self.expansions["between"] += bool(short)
        items = []
        for request in requests:
            slots = self._best_unsubmitted(request.tree)
            if len(slots):
                items.append((request.id, request.tree.ids[slots]))
        return Nodes(tuple(items))

    def overlap(self, state: DecodeState, source: TokenSource, ready: Callable[[], bool]) -> None:
        """Asynchronous form: ``d`` expansions, or as many as fit before the target is ready."""
        if not self.asynchronous:
            return
        growing = [request for request in state.requests.values() if not request.finished]
        silent: dict[int, IntArray] = {}
        rounds = 0
        while growing and (rounds < self.d if self.d is not None else not ready()):
            growing = self._grow(state, source, growing, silent)
            self.expansions["beside"] += bool(growing)
            rounds += 1

    def _grow(
        self,
        state: DecodeState,
        source: TokenSource,
        requests: list[RequestState],
        silent: dict[int, IntArray],
        min_mass: float = 0.0,
    ) -> list[RequestState]:
        """One growth round: expands the ``w`` most probable leaves of each request.

        Args:
            state: the forest.
            source: asked once for all of them.
            requests: whose trees grow.
            silent: request id -> slots that had no answer in this call of the policy; they are not
                asked again before the next, and are added to here.
            min_mass: leaves that hold less probability together are not worth a pass.

        Returns:
            The requests that had leaves to expand.
        """
        wanted = []
        for request in requests:
            unanswered = silent.get(request.id, NO_SLOTS)
            slots = best_leaves(request, self.w, silent=unanswered, least=self._least)
            if len(slots) and (not min_mass or _mass(request.tree, slots) >= min_mass):
                wanted.append((request, slots))
        answers = expand(state, source, wanted, self._children)
        for (request, slots), counts in zip(wanted, answers, strict=True):
            if not counts.all():
                known = silent.get(request.id, NO_SLOTS)
                silent[request.id] = np.concatenate([known, slots[counts == 0]])
        return [request for request, _ in wanted]

    def _best_unsubmitted(self, tree: TokenTree) -> IntArray:
        """int64[<= bs]: slots of the most probable nodes not yet submitted, parents first.

        Together with the submitted ones they are connected: scores do not rise downwards, and of
        equals the made node, hence the parent, comes first.
        """
        nodes = np.where(tree.submitted_at < 0, tree.scores, -np.inf)
        return most_probable(tree, nodes, tree.scores, self.bs, self._least)


def _mass(tree: TokenTree, slots: IntArray) -> float:
    """Probability, by the draft, that the target's path runs through one of the leaves."""
    return float(np.exp(tree.scores.take(slots)).sum())


def _num_available(tree: TokenTree) -> int:
    """Nodes and candidates: the size of the tree in SwiftSpec's sense."""
    return len(tree) + int(np.count_nonzero(tree.candidate_logprobs > -np.inf))
