"""Fakes for the tests of events and of draft passes that run beside the loop.

Passes of the fake source take 3 ms; the fake target is due when the tests say so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from specdec.clocks import CONTROLLER, Clock, CostCurve, LatencyProfile, SimulatedClock, Work
from specdec.clocks.meter import Meter
from specdec.interfaces import Executor, TokenSource
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams
from specdec.sources.background import Background
from specdec.sources.events import LoopEvents
from specdec.state import DecodeState, RequestState, StopRules
from specdec.types import (
    Candidates,
    Commit,
    EarlyHidden,
    EventKind,
    Exits,
    HiddenName,
    Nodes,
    Output,
)

PASS_S = 0.003
DRAFT_RANK = 5
PROFILE = LatencyProfile(name="test", costs={"draft": CostCurve(tokens=(1,), ms=(1000 * PASS_S,))})
NAME = HiddenName(2)
TIMEOUT_S = 30.0


class Source(TokenSource):
    """Proposes the tokens 10, 11, ... for every node, and records its calls in ``log``."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.outputs: list[Output] = []
        self.threads: set[int] = set()

    def open(self, request: RequestState) -> None:
        self.log.append(f"open {request.id}")

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        self.threads.add(threading.get_ident())
        state.clock.start(CONTROLLER)
        state.clock.charge(CONTROLLER, Work.DRAFT, len(nodes))
        self.log.append(tuple((i, *ids.tolist()) for i, ids in nodes.items))
        shape = (len(nodes), k)
        tokens = np.broadcast_to(np.arange(10, 10 + k), shape).copy()
        counts = np.full(len(nodes), k)
        return Candidates(tokens=tokens, logprobs=np.full(shape, -1.0), counts=counts)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        self.log.append(f"commit {[c.request for c in commits]}")
        self.outputs.append(output)

    def close(self, request_id: int) -> None:
        self.log.append(f"close {request_id}")


class Held(Source):
    """A source whose passes wait until they are let go, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.contexts: list[list[int]] = []

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        self.began.release()
        assert self.go.acquire(timeout=TIMEOUT_S)
        request = state.requests[nodes.items[0][0]]
        self.contexts.append(request.path_tokens(len(request.tree) - 1).tolist())
        return super().expand(state, nodes, k)


class Target(Executor):
    """The executor's part in events: ready at ``at``, with outputs that arrive before."""

    can_poll = True
    submit = collect = lambda *given, **keys: None  # type: ignore[assignment]

    def __init__(self, clock: Clock, at: float, early: Iterable[tuple[float, Output]] = ()) -> None:
        self._clock = clock
        self._at = at
        self._early = list(early)

    def ready(self) -> bool:
        return self._clock.now() >= self._at

    def due_s(self) -> float | None:
        return min([self._at, *(at for at, _ in self._early)])

    def poll(self) -> Output | None:
        if not self._early or self._early[0][0] > self._clock.now():
            return None
        return self._early.pop(0)[1]


class Silent(Executor):
    """An executor without a time, which cannot be polled."""

    submit = collect = lambda *given, **keys: None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.is_ready = False

    def ready(self) -> bool:
        return self.is_ready


def new_state(clock: Clock, num_requests: int = 1) -> DecodeState:
    """Requests 7, 8, ... with a root (id 0) and two children (ids 1 and 2)."""
    state = DecodeState(draws=KeyedDraws(seed=0), clock=clock, meter=Meter())
    for i in range(7, 7 + num_requests):
        request = RequestState(
            request_id=i,
            prompt=np.array([1, 2]),
            stop=StopRules(max_new_tokens=99),
            sampling=SamplingParams(),
        )
        request.prefill_sent = request.num_prefill
        request.tree.append(np.array([0, 0]), np.array([3, 4]), np.full(2, -1.0))
        state.requests[i] = request
    return state


def nodes(*ids: int, request: int = 7) -> Nodes:
    return Nodes(((request, np.array(ids)),))


def early_output(*ids: int, request: int = 7) -> Output:
    states = torch.tensor(ids, dtype=torch.float64)[:, None]
    early = EarlyHidden(request=request, node_ids=np.array(ids), hidden={NAME: states})
    exits = Exits(
        request=request, node_ids=np.array(ids), candidates=Candidates.empty(len(ids)), layer=2
    )
    return Output(step=0, early=(early,), exits=(exits,))


def simulated(
    at: float = 1.0, early: Iterable[tuple[float, Output]] = (), *, beside: bool = True
) -> tuple[DecodeState, Source, LoopEvents]:
    """State, source and events on a simulated clock; the draft has a device where ``beside``."""
    state, source = new_state(SimulatedClock(PROFILE)), Source()
    drafting = Background(source=source, free_rank=DRAFT_RANK) if beside else source
    return state, source, LoopEvents(state, drafting, Target(state.clock, at, early))  # type: ignore


def drain(state: DecodeState, events: LoopEvents, num: int) -> list[tuple[EventKind, float]]:
    """The next events, with their times in ms."""
    found = []
    for _ in range(num):
        kind = events.next().kind
        found.append((kind, round(1e3 * state.clock.now(), 6)))
    return found


DRAFT, EARLY, TARGET = EventKind.DRAFT, EventKind.EARLY, EventKind.TARGET
