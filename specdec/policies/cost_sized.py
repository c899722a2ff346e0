"""A policy that sets the numbers of nodes and draft passes by their measured cost and gain."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from specdec.interfaces import TokenSource
from specdec.parts.fields import Count, validated
from specdec.policies.best_first import BestFirst, mass
from specdec.policies.fading_mean import FadingLine, FadingMean
from specdec.policies.tree_growth import as_nodes, best_unsubmitted, ready_requests
from specdec.state import DecodeState, RequestState
from specdec.types import IntArray, Nodes

_FADE = 0.9  # factor by which each round lowers the weight of a request's older ones
_FADE_ALL = 0.98  # likewise for the means over all requests
_PRIOR = 4.0  # weight of other requests, in expected tokens or draft passes
_TRUST = 1.0  # weight of the draft's own probabilities in the means over all requests
_RETRY = 32  # rounds without drafts after which two are drafted again
_SMALL = (1, 4)  # draft passes and nodes


@dataclass(slots=True)
class _Round:
    """Times and sizes of one round (draft, then verify) of a request."""

    answers: int  # answers of the request before the round
    began_s: float
    submitted_s: float
    num_tokens: int  # output tokens before the round
    rows: int  # rows of all requests in the target pass
    node_mass: float  # total probability of the submitted nodes below the root
    leaf_mass: list[float]  # total probability of the leaves of each expansion


@dataclass(slots=True)
class _Record:
    nodes: FadingMean  # accepted tokens / total probability of submitted nodes
    leaves: list[FadingMean]  # likewise for leaves, by number of the expansion in its round
    last: _Round | None = None
    expanded: list[float] = field(default_factory=list)  # ``leaf_mass`` of the coming round
    undrafted: int = 0  # consecutive rounds without drafts
    caught_up: bool = False  # whether the round before the coming one has drafted
    again: bool = False  # whether the coming round repeats a trial


class CostSized(BestFirst):
    """Submits the most probable subgraph, sized in each round by its cost; possibly the root alone.

    The rate of tokens per second is greatest if a tree has exactly the nodes and expansions whose
    gain in tokens exceeds the rate times their cost in seconds (Dinkelbach's rule for ratios). A
    node of probability p gains p tokens, and costs the time that a further row adds to a target
    pass. The k-th expansion gains a token if at least k drafted tokens are accepted, which is taken
    as proportional to the total probability of its leaves; it costs a pass of the source and the
    rows that it adds. The draft's probabilities are not the target's, so both gains are multiplied
    by the request's ratio of accepted to expected tokens so far. Its prior, with the weight of 4
    expected tokens, is the ratio of all requests, whose prior is 1 with the weight of 1 token.

    Times are those of ended rounds, on the run's clock. Drafting is timed only in rounds that
    follow a round with drafting, since otherwise the source first has to catch up. The first four
    rounds have fixed sizes, from which the cost of a row is estimated (in a measured run they are
    in the warm-up). After 32 rounds without drafting, a request drafts in the next two. The rule is
    meant for one request at a time: requests in one pass share its time.

    Args:
        bs, w, d, children: as in ``BestFirst``; they limit the size of the tree.
    """

    includes_plain = True

    @validated
    def __init__(
        self, *, bs: Annotated[int, Field(ge=2)], w: Count, d: Count, children: Count | None = None
    ) -> None:
        super().__init__(bs=bs, w=w, d=d, children=children)
        # Small sizes, so that the first rounds cost little.
        self._first = [_SMALL, (2, 6), (3, 8), (0, 1)]
        self._records = defaultdict[int, _Record](
            lambda: _Record(FadingMean(_FADE), [FadingMean(_FADE) for _ in range(d)])
        )
        self._nodes = FadingMean(_FADE_ALL)
        self._leaves = [FadingMean(_FADE_ALL) for _ in range(d)]
        self._pass = FadingLine(_FADE_ALL)  # seconds over rows
        self._draft = FadingLine(_FADE_ALL)  # seconds over expansions
        self._rate = FadingMean(_FADE_ALL)  # tokens per second
        self._added = FadingMean(_FADE_ALL)  # rows per expansion
        self._given = True

    def close(self, request_id: int) -> None:
        self._records.pop(request_id, None)

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        requests, began = ready_requests(state, serial=True), state.clock.now()
        if not requests:
            return Nodes(())
        self._learn(requests, began)
        growing, unanswered, passes = requests, dict[int, IntArray](), 0
        depth, size = self._size(requests)
        for request in requests:
            self._records[request.id].expanded = []
        while passes < depth and growing:
            growing = self._grow(state, source, growing, unanswered, paying=True)
            passes += bool(growing)
        drafted = state.clock.now()
        chosen = [(r, best_unsubmitted(r.tree, size, self._least_score(r))) for r in requests]
        rows = sum(len(slots) for _, slots in chosen)
        if passes:
            if all(self._records[request.id].caught_up for request in requests):
                self._draft.add(passes, drafted - began)
            self._added.add(rows - len(requests), passes)
        for request, slots in chosen:
            record = self._records[request.id]
            record.undrafted = 0 if len(slots) > 1 else record.undrafted + 1
            total = mass(request.tree, slots) - 1.0  # the root's is 1
            used = (rows, total, record.expanded)
            record.last = _Round(
                request.counters.answers, began, drafted, len(request.output), *used
            )
        return as_nodes(chosen)

    def notes(self) -> list[str]:
        if not self._pass.sums[0]:
            return []
        first, row = 1e3 * self._pass.at(1), 1e3 * self._pass.slope
        text = f"cost_sized: a pass {first:.2f} ms, each further row {row:.2f} ms"
        if self._draft.sums[0]:
            text += f", a draft pass {1e3 * self._draft.at(1):.2f} ms,"
            text += f" a further one {1e3 * self._draft.slope:.2f} ms"
            text += f"; {self._added.value:.1f} rows per draft pass"
        return [text]

    def _size(self, requests: list[RequestState]) -> tuple[int, int]:
        """Returns the largest (draft passes, nodes) of a round; a trial uses them at any cost."""
        depth, size = len(self._leaves), self.bs
        self._given = True
        records = [self._records[request.id] for request in requests]
        if self._first:
            given = self._first.pop(0)
        elif any(record.undrafted >= _RETRY or record.again for record in records):
            given = _SMALL
            for record in records:
                record.again = record.undrafted >= _RETRY
        else:
            self._given = False
            return depth, size
        return min(given[0], depth), min(given[1], size)

    def _pays(self, request: RequestState, leaves: IntArray) -> bool:
        record, total = self._records[request.id], mass(request.tree, leaves)
        number = len(record.expanded)
        gain = total * record.leaves[number].with_prior(
            self._leaves[number].with_prior(1.0, _TRUST), _PRIOR
        )
        cost = self._added.with_prior(1.0, _PRIOR) * self._pass.slope
        if self._draft.sums[0]:  # the first expansion includes work done once per round
            cost += self._draft.slope if number else self._draft.at(1)
        if self._given or gain >= self._rate.value * cost:
            record.expanded.append(total)
            return True
        return False

    def _least_score(self, request: RequestState) -> float:
        if self._given:
            return -np.inf
        share = self._records[request.id].nodes.with_prior(
            self._nodes.with_prior(1.0, _TRUST), _PRIOR
        )
        least = self._rate.value * self._pass.slope / max(share, 1e-9)
        return min(0.0, float(np.log(least))) if least > 0.0 else -np.inf

    def _learn(self, requests: list[RequestState], now: float) -> None:
        for request in requests:
            record = self._records[request.id]
            used, record.last, record.caught_up = record.last, None, False
            if used is None or request.counters.answers != used.answers + 1:  # of another policy
                continue
            record.caught_up = bool(used.leaf_mass)
            tokens = len(request.output) - used.num_tokens
            for share in (record.nodes, self._nodes):
                share.add(tokens - 1, used.node_mass)
            for number in range(len(self._leaves)):
                tried = number < len(used.leaf_mass)
                total, gained = (used.leaf_mass[number], tokens - 1 > number) if tried else (0, 0)
                record.leaves[number].add(gained, total)
                self._leaves[number].add(gained, total)
            self._rate.add(tokens, now - used.began_s)
            if request is requests[0]:
                self._pass.add(used.rows, now - used.submitted_s)
