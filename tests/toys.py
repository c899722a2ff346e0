"""Small parts that use what no preset uses yet: free-running drafts and early hidden states.

Shape letters: W nodes, V vocabulary, E hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.certify.cases import GREEDY, TEMPERATURES_AND_FILTERS, WITH_HISTORY, Case, parity_cases
from specdec.certify.oracle import Oracle
from specdec.clocks import Clock, CostCurve, LatencyProfile, SimulatedClock
from specdec.interfaces import TokenSource, TreePolicy
from specdec.models.slicing import final_norm
from specdec.pairs import RandomPair
from specdec.policies.tree_growth import (
    append_best,
    expand,
    live_requests,
    open_bottom,
    ready_requests,
    unsubmitted,
)
from specdec.state import DecodeState, RequestState
from specdec.types import (
    Candidates,
    Commit,
    Event,
    EventKind,
    HiddenName,
    Needs,
    Nodes,
    Output,
    PromptHidden,
    Ticket,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))  # an outside package
from replicas import Replicas

__all__ = ["SEED", "EarlyLens", "FreeRunning", "LevelWhenKnown", "Replicas"]

SEED = 3
VOCAB = 48
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "draft_layers": 3,
    "hidden_size": 16,
    "vocab_size": VOCAB,
    "logit_scale": 4.0,
}
SAMPLINGS = {
    "greedy": GREEDY,
    "t=1": TEMPERATURES_AND_FILTERS["t=1"],
    "t=0.9 no_repeat_ngram=2": TEMPERATURES_AND_FILTERS["t=0.9 no_repeat_ngram=2"],
    "repetition penalty": WITH_HISTORY["repetition penalty"],
}


@cache
def pair(draft_layers: int = 3) -> RandomPair:
    """A target of four layers; a draft of four is perfect, one of three agrees often."""
    return RandomPair(**{**MODEL, "draft_layers": draft_layers})


@cache
def oracle() -> Oracle:
    """Plain decoding without this library's loop, trees and caches."""
    return Oracle(pair().target, seed=SEED)


@cache
def cases(num_tokens: int = 16) -> tuple[Case, ...]:
    """Greedy and sampled requests, two of four samplings with a history."""
    return tuple(parity_cases(SAMPLINGS, per_sampling=2, vocab_size=VOCAB, num_tokens=num_tokens))


@cache
def plain(case: Case) -> tuple[int, ...]:
    """The target's own output for a case."""
    return (
        oracle()
        .decode(prompt_id=case.id, prompt=case.prompt, sampling=case.sampling, stop=case.stop)
        .output
    )


def assert_plain(outputs: dict[int, Any], wanted: Sequence[Case]) -> None:
    assert sorted(outputs) == sorted(case.id for case in wanted)
    wrong = [case.label for case in wanted if outputs[case.id].output != plain(case)]
    assert not wrong, f"not the output of plain decoding: {wrong}"


def profile(target_ms: float, draft_ms: float) -> LatencyProfile:
    """Constant costs: a stage and a draft pass; everything else costs nothing."""
    costs = {"stage": target_ms, "draft": draft_ms}
    curves = {kind: CostCurve(tokens=(1,), ms=(ms,)) for kind, ms in costs.items()}
    return LatencyProfile(name="toy", costs=curves)  # type: ignore[arg-type]


def simulated(target_ms: float, draft_ms: float) -> Clock:
    return SimulatedClock(profile(target_ms, draft_ms))


class FreeRunning(TreePolicy):
    """A draft that never waits for the target (AMUSD), or a target that waits for no draft (DSI).

    Each request has one draft pass at a time, which is followed by the next at once, on the best
    path that is left. A pass in flight goes on over the end of a step. The target gets whatever is
    in the tree.

    Attributes:
        log: kind of each event, in order.
        outlived: steps at whose end a pass was in flight.
        dropped: ended passes of which every node had left the tree.
        misplaced: those of them whose candidates were stored somewhere.
    """

    value_dependent = False
    serial = False

    def __init__(
        self, *, feed_at_once: bool = False, ahead: int = 12, outstanding: int | None = None
    ) -> None:
        """Sets the schedule.

        Args:
            feed_at_once: a new node begins the next step, whatever the target works on (DSI).
            ahead: maximum depth of the drafted path.
            outstanding: batches of a request that await answers, above which none but its root is
                fed. Default: no limit.
        """
        self.log: list[EventKind] = []
        self.outlived = 0
        self.dropped = 0
        self.misplaced = 0
        self._feed_at_once = feed_at_once
        self._ahead = ahead
        self._outstanding = outstanding
        self._batches: dict[int, int] = {}  # without an answer, pruned ones included

    def open(self, request: RequestState) -> None:
        self._batches[request.id] = 0

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self._ahead

    def select(self, state: DecodeState, source: Any) -> Nodes:
        requests = [
            request
            for request in ready_requests(state, serial=False)
            if self._outstanding is None
            or self._batches[request.id] < self._outstanding
            or request.tree.submitted_at[0] < 0
        ]
        nodes = unsubmitted(requests)
        for request_id, _ in nodes.items:
            self._batches[request_id] += 1
        return nodes

    def overlap(self, state: DecodeState, source: Any, events: Any) -> bool:
        while True:
            self._start_passes(state, events)
            event = self._next(state, events)
            self.log.append(event.kind)
            if event.kind is EventKind.TARGET:
                self.outlived += bool(events.running)
                return False
            if self._grow(state, event) and self._feed_at_once:
                self._start_passes(state, events)
                self.outlived += bool(events.running)
                return True

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for answers in output.answers:
            if answers.request in self._batches:
                self._batches[answers.request] -= 1

    def close(self, request_id: int) -> None:
        del self._batches[request_id]

    def _start_passes(self, state: DecodeState, events: Any) -> None:
        busy = {i for ticket in events.running for i, _ in ticket.nodes.items}
        for request in live_requests(state):
            slots = open_bottom(request)
            if request.id not in busy and len(slots) and len(request.tree) <= self._ahead:
                events.start(Nodes(((request.id, request.tree.ids[slots]),)), 1)

    def _next(self, state: DecodeState, events: Any) -> Event:
        """The next event; counts changes of trees by candidates of pruned nodes."""
        before = {r.id: r.tree.expanded.copy() for r in state.requests.values()}
        event: Event = events.next()
        if event.ticket is not None and not any(_live(state, event.ticket)):
            self.dropped += 1
            self.misplaced += any(
                (r.tree.expanded != before[r.id]).any() for r in state.requests.values()
            )
        return event

    def _grow(self, state: DecodeState, event: Event) -> bool:
        """Whether a candidate of the ended pass became a node."""
        assert event.ticket is not None
        grown = False
        for request_id, ids in event.ticket.nodes.items:
            if (request := state.requests.get(request_id)) is not None:
                slots = request.tree.slots(ids)
                grown |= len(append_best(request.tree, slots[slots >= 0], 1, 1)) > 0
        return grown


def _live(state: DecodeState, ticket: Ticket) -> list[bool]:
    return [
        bool((state.requests[i].tree.slots(ids) >= 0).any())
        for i, ids in ticket.nodes.items
        if i in state.requests
    ]


class LevelWhenKnown(TreePolicy):
    """Submits a level as soon as the source has proposals for the one above.

    Attributes:
        early_events: arrivals within a step.
    """

    value_dependent = True
    serial = False

    def __init__(self, *, width: int, children: int) -> None:
        """Sets the shape: nodes per level, and candidates per node."""
        self.width = width
        self.children = children
        self.early_events = 0

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self.width * in_flight

    def select(self, state: DecodeState, source: Any) -> Nodes:
        requests = ready_requests(state, serial=False)
        expand(state, source, [(r, open_bottom(r)) for r in requests], self.children)
        for request in requests:
            append_best(request.tree, _bottom(request), self.width, self.children)
        return unsubmitted(requests)

    def overlap(self, state: DecodeState, source: Any, events: Any) -> bool:
        while events.next().kind is EventKind.EARLY:
            self.early_events += 1
            requests = live_requests(state)
            expand(state, source, [(r, open_bottom(r)) for r in requests], self.children)
        return False


def _bottom(request: RequestState) -> Any:
    tree = request.tree
    slots = np.flatnonzero(tree.positions == tree.positions.max())
    return slots[tree.expanded[slots]]


class EarlyLens(TokenSource):
    """Proposes from the output of a layer, by the target's own final norm and output matrix.

    Attributes:
        prompts: hidden states of prompt positions, as they arrived, by request.
        proposed: (request, node id, step) of each node with proposals.
    """

    def __init__(self, models: RandomPair, *, name: HiddenName) -> None:
        """Reads the states ``name`` of ``models``."""
        self.needs = Needs(early_hidden=(name,))
        self.vocab_size: int | None = models.vocab_size
        self.prompts: dict[int, list[PromptHidden]] = {}
        self.proposed: list[tuple[int, int, int]] = []
        self._name = name
        norm = final_norm(models.target)
        self._norm = torch.nn.Identity() if name.normed else norm
        self._head = models.target.get_output_embeddings()

    def open(self, request: RequestState) -> None:
        self.prompts[request.id] = []

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        found: list[torch.Tensor] = []
        known = np.zeros(len(nodes), np.bool_)
        for request_id, ids, rows in nodes.packed():
            states = [state.requests[request_id].tree.hidden.get(i, {}) for i in ids.tolist()]
            known[rows] = [self._name in row for row in states]
            found += [row[self._name] for row in states if self._name in row]
            self.proposed += [
                (request_id, node_id, state.step)
                for node_id, row in zip(ids.tolist(), states, strict=True)
                if self._name in row
            ]
        if not found:
            return Candidates.empty(len(nodes), k)
        logits = self._head(self._norm(torch.stack(found))).log_softmax(-1)
        best = logits.topk(k)
        return Candidates(
            tokens=best.indices.numpy(),
            logprobs=best.values.double().numpy(),
            counts=np.full(len(found), k, np.int64),
        ).spread(known)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for chunk in output.prompts:
            self.prompts[chunk.request].append(chunk)
