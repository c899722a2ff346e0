"""Base classes of the parts that a run is composed of.

The loop in ``loop.py`` calls a token source, a tree policy, a verifier, an executor and a
scheduler, and nothing else. A part subclasses the base of its kind, defines the abstract methods,
and overrides what differs from the defaults; parts are composed and do not inherit from each other.

``Clock``, ``DataReader`` and ``specdec.pairs.ModelPair`` are the other bases that a class outside
this library may subclass (docs/adding.md).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.clocks.interface import Clock, ClockKind
from specdec.data.prompt import DataReader
from specdec.errors import UserError
from specdec.metrics.counters import ExecutorCounters, SourceCounters
from specdec.metrics.speedup import SpeedupLaw
from specdec.types import (
    Batch,
    Candidates,
    Commit,
    Event,
    ExecutorPlan,
    HiddenName,
    Lossless,
    Needs,
    Nodes,
    Output,
    Ticket,
    Verdict,
)

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState

__all__ = [
    "Clock",
    "DataReader",
    "Events",
    "Executor",
    "Logger",
    "Scheduler",
    "TokenSource",
    "TreePolicy",
    "Verifier",
]


class _Part:
    """What source, policy and executor have in common.

    The scheduler calls ``open`` on each part before any other call about a request, and ``close``
    after the last.
    """

    def open(self, request: RequestState) -> None:
        """A request is admitted."""

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Updates caches and what is in flight at the end of every step.

        ``DecodeState.commit`` has rerooted the trees already. A source is also called without
        commits when exits or hidden states arrive within a step (``output``).
        """

    def close(self, request_id: int) -> None:
        """A request has finished; its state is released."""


class TokenSource(_Part, ABC):
    """Proposes tokens: a draft model, an n-gram model, prompt lookup, an exit head, a mixture.

    An *asynchronous* source runs its passes in the background (``sources.Background`` makes one of
    any source): it overrides ``start``, ``poll`` and ``set_wakeup``. A pass that runs is not
    preempted: commits and closes that arrive meanwhile take effect when it has ended, and
    candidates of nodes pruned meanwhile are dropped by the caller.
    """

    needs: Needs = Needs()
    """What it reads from the target's answers and from other parts."""
    vocab_size: int | None = None
    """Size of the vocabulary it proposes from, which must be the target's; None: any."""
    gives_probs: bool = False
    """Candidates are sampled and come with ``Candidates.probs``; needed by rejection verifiers."""
    asynchronous: bool = False
    """Whether passes run in the background."""
    model: str = "draft"
    """Name of the model whose weights a pass reads, for the theoretical memory traffic."""
    members: Sequence[TokenSource] = ()
    """The sources inside, for policies that choose one per request (``policies.Adaptive``)."""
    cheap: TokenSource | None = None
    """The cheaper source inside a staged source."""

    @cached_property
    def counters(self) -> SourceCounters:
        """Model passes and rows; a source that runs no model counts none."""
        return SourceCounters()

    @property
    def levels(self) -> Sequence[TokenSource]:
        """Sources whose passes ``Events.start`` begins by number; here the source alone."""
        return (self,)

    @property
    def pass_bytes(self) -> int | None:
        """Bytes of weights that one pass reads; None: those of ``model``."""
        return None

    def speedup_law(self, policy: TreePolicy, latency: int) -> SpeedupLaw | None:
        """The theoretical speed-up over plain decoding, reported as ``speedup_law``."""
        return None

    @abstractmethod
    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Proposes up to ``k`` children for each node.

        Called once per live node: the caller keeps the answer in the tree
        (``TokenTree.set_candidates``), so a known node costs no second forward. The nodes are any
        nodes of live trees, their ancestors expanded or not. A source whose cache is behind the
        committed tokens catches up here and counts those rows.

        Returns:
            Candidates, rows in the order of ``nodes``; count 0 where there is none (yet).
        """

    def start(self, state: DecodeState, nodes: Nodes, k: int) -> Ticket:
        """Starts a pass over ``nodes``, as ``expand`` would make it; here it runs at once."""
        candidates = self.expand(state, nodes, k)
        return Ticket(nodes=nodes, due_s=state.clock.now(), candidates=candidates)

    def poll(self, ticket: Ticket) -> Candidates | None:
        """The result of a started pass, once; None while it runs."""
        return ticket.candidates

    def set_wakeup(self, event: threading.Event) -> bool:
        """Asks the source to set ``event`` when a pass has ended.

        Returns:
            Whether it will; otherwise a wait on a measured clock polls every millisecond.
        """
        return not self.asynchronous


class Events(ABC):
    """What happens while the target works; passed to ``TreePolicy.overlap``."""

    running: list[Ticket]
    """Draft passes in flight, in the order in which they began."""

    @abstractmethod
    def start(self, nodes: Nodes, k: int, level: int = 0) -> Ticket:
        """Starts a draft pass that proposes up to ``k`` children for each node.

        The nodes must be unexpanded and in no other pass of that model. A source that is not
        asynchronous runs the pass now; its event follows.

        Args:
            nodes, k: see ``TokenSource.expand``.
            level: the model of a source that has several (``sources.ModelChain``). Candidates of
                level 0 are stored in the trees; those of others come with their event. Default: 0.
        """

    @abstractmethod
    def ready(self) -> bool:
        """Whether the target's work of the step has ended."""

    @abstractmethod
    def next(self) -> Event:
        """Waits for the next event.

        On a simulated or paced clock the call waits for the earliest planned event, on a measured
        clock for the first that happens. Of events that have happened already, draft passes come
        first, then early arrivals, then the target, whose event returns at every call until the
        step ends.
        """

    @abstractmethod
    def next_draft(self) -> Event:
        """Waits for the first draft pass in flight to end, at least one, whatever else happens.

        For policies whose target has nothing to do before the draft has a token.
        """


class TreePolicy(_Part, ABC):
    """Decides which nodes to propose, keep and verify."""

    value_dependent: bool = True
    """Whether the choice of a node's children depends on the candidates' probabilities. This would
    bias rejection sampling, so the two cannot be composed."""
    serial: bool = True
    """The policy feeds a request nothing while answers are awaited. A policy that feeds at every
    step must set False: turns and ``hit_rate`` depend on it."""
    asynchronous: bool = False
    """The policy drafts in ``overlap``, while the target is busy."""
    levels_per_step: int | None = None
    """1 where each batch is one level, so that an answer emits one token."""
    follows_exits: bool = False
    """Waits for ``Output.exits`` before it continues below a node (PPSD)."""
    time_dependent: bool = False
    """What is in a tree when an answer arrives depends on the times of passes. Rejection verifiers,
    whose output for a seed would depend on them too, are refused."""
    drafts_waiting: bool = False
    """Drafts for requests that wait for their turn; ``prepared`` says for which it has done so."""
    chain_length: int | None = None
    """Draft tokens per verdict of a policy that drafts chains, for the law of early exits."""

    def held_nodes(self, in_flight: int) -> int | None:
        """Largest number of nodes of one request in the target's cache, the root included.

        Counts nodes that were submitted and neither retired nor pruned, on an executor with that
        many batches ``in_flight`` (``Executor.in_flight``). Admission to a paged cache depends on
        it, and is refused where it is None.
        """
        return None

    @abstractmethod
    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """Chooses nodes to verify now, in topological order per request; may grow the forest.

        Returns no nodes of a request whose root waits for its prefill or whose answers are awaited.
        """

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        """Does draft work while the target is busy; here none.

        A policy drafts by calls of ``source.expand``, which take their time at once, or by passes
        that run free: ``events.start`` begins one, and ``events.next`` returns what happens next.
        A pass that still runs at the end of the step is reported by a later step's ``events``.

        Returns:
            Whether the next step begins without waiting for the target. An executor with a latency
            ends each step with the target's work all the same.
        """
        return False

    def prepared(self, request: RequestState) -> bool:
        """Whether the request's tree is drafted; see ``drafts_waiting`` and ``serving.Turns``."""
        return True

    def notes(self) -> Sequence[str]:
        """Lines that a run prints when it has ended."""
        return ()

    def check_source(self, source: TokenSource) -> None:
        """Raises ``UserError`` for a source that the policy cannot use."""

    def check_clock(self, clock: Clock) -> None:
        """Raises ``UserError`` for a clock that the policy cannot use."""


class Executor(_Part, ABC):
    """Runs the target: an asynchronous verification service, with or without a fixed latency.

    A class that ``executor._target_`` names is made in two phases: ``plan`` gives what follows from
    the keys of its configuration node, before sources and policies are made, which need the
    latency; ``build`` loads the models when the other parts are known.
    """

    options: type[Any] | None = None
    """Dataclass with the keys of the configuration node; None: the parameters of ``plan``."""

    @classmethod
    def check(cls, keys: Mapping[str, Any], clock: ClockKind, *, tracing: bool) -> None:
        """Raises ``UserError`` for keys that do not fit together, the clock or a trace.

        Called when a configuration is composed.
        """

    @classmethod
    def plan(cls, *models: Any, **keys: Any) -> ExecutorPlan:  # noqa: ARG003
        """First phase.

        Args:
            models: one argument, the ``specdec.pairs.ModelPair``; weights must not be loaded here.
            keys: values of the node.
        """
        raise UserError(f"{cls.__name__} has no method plan, which executor._target_ needs")

    @classmethod
    def build(cls, *plan_and_needs: Any, **runtime: Any) -> Executor:  # noqa: ARG003
        """Second phase.

        Args:
            plan_and_needs: the result of ``plan``, and the union of what source and verifier need
                (``Needs``), of which what is not delivered is refused.
            runtime: objects that its signature requests by name, see ``specdec.compose.RUNTIME``.
        """
        raise UserError(f"{cls.__name__} has no method build, which executor._target_ needs")

    latency: int | None = 1
    """A node submitted in step s is answered by the collect of step s + latency - 1. None: answers
    come when they come, in any order."""
    in_flight: int = 1
    """Largest number of batches that are submitted and not answered; the latency if it has one."""
    hidden: tuple[HiddenName, ...] = ()
    """Hidden states that its answers carry; a part that needs others is refused."""
    early_hidden: tuple[HiddenName, ...] = ()
    """Hidden states that its outputs carry before the answers."""
    can_poll: bool = False
    """Whether ``poll`` may return something."""
    distributed: bool = False
    """Whether it runs in other processes, which ``reports`` asks for their counts."""

    @cached_property
    def counters(self) -> ExecutorCounters:
        """Batches and rows submitted."""
        return ExecutorCounters()

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Hands the batch to the target without waiting. An empty batch is a step tick."""

    @abstractmethod
    def collect(self, *, wait: bool = True) -> Output:
        """Ends the step.

        With a latency: waits for the step's work, and returns the answers to the batch submitted
        ``latency`` - 1 steps ago. Without: returns the answers that have arrived, perhaps none. If
        ``wait``, and ``in_flight`` batches are being worked on or the step's batch was empty, it
        waits for the first of them. A batch that is submitted beyond ``in_flight`` is queued.

        The ``commit`` that follows prunes caches and everything in flight (PipeDec 3.4.3).
        """

    def ready(self) -> bool:
        """Whether ``collect`` has its results: the step's work is done or, without a latency,
        answers have arrived. Here always: drafting and the target's pass do not overlap.
        """
        return True

    def due_s(self) -> float | None:
        """Time of the run's clock at which ``ready`` or ``poll`` has something new.

        None where it is not known in advance: on a measured clock, or with nothing in flight.
        """
        return None

    def poll(self) -> Output | None:
        """Exits and early hidden states that have arrived within the step, each once."""
        return None

    def set_wakeup(self, event: threading.Event) -> bool:
        """Asks the executor to set ``event`` when something arrives.

        Returns:
            Whether it will; otherwise a wait on a measured clock polls every millisecond.
        """
        return False

    def shutdown(self) -> None:
        """Releases processes and memory; called once, also after an error."""

    def reports(self) -> Sequence[dict[str, Any]]:
        """Per other process: its clock report, rows computed and bytes sent."""
        return ()

    def draft_reports(self) -> Sequence[dict[str, Any]]:
        """As ``reports``, of processes that share the draft model."""
        return ()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent to others."""
        return 0

    @property
    def pids(self) -> Sequence[int] | None:
        """Its other processes; None if another launcher has started them."""
        return ()

    @property
    def stage_of_rank(self) -> Mapping[int, int] | None:
        """Clock rank -> number of its stage from 1, for traces; None without stages."""
        return None


class Verifier(ABC):
    """Turns the target's answers into accepted paths."""

    needs: Needs = Needs()
    """What answers and candidates must carry."""
    lossless: Lossless = Lossless.LOSSY
    """What it promises; printed in tables and by ``specdec verify``."""

    @abstractmethod
    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        """One verdict per request; the roots of all of them are answered.

        Answers are stored in the trees (``TokenTree.answers``, ``target_probs``, ``hidden``). A
        verifier follows them from the root as far as nodes are answered; where it stops earlier,
        the next step continues.
        """


class Scheduler(ABC):
    """Decides which requests are decoded, and adds prefill chunks to the batches.

    Made for one call of the loop; ``serving.rules.MakeScheduler`` has its constructor's arguments.
    """

    @abstractmethod
    def admit(self, state: DecodeState) -> bool:
        """Begins a step: closes finished requests and admits waiting ones.

        Admission sets ``request.admitted_s``, enters the request into ``state.requests`` and calls
        ``open`` of each part; closing calls ``close`` of each part, removes the request and calls
        ``on_finish``. Sets ``state.turn``: ids of the requests that this step may feed, None for
        all. Where no request has arrived yet, ``state.clock.wait_until`` the next arrival.

        Returns:
            False when no request is left.
        """

    @abstractmethod
    def merge(self, nodes: Nodes) -> Batch:
        """The step's batch: ``nodes``, marked as submitted, and chunks of prompt tokens.

        Prefill covers all prompt tokens but the last. Advances ``request.prefill_sent`` and counts
        ``state.load``.
        """


class Logger(ABC):
    """Receives the results of runs and comparisons, besides the run folder (``logger=``).

    Built in the main process after the results are on disk; in a sweep, once per run.
    """

    @abstractmethod
    def log(self, config: Mapping[str, Any], row: Mapping[str, Any], folder: Path) -> None:
        """Called once per strategy when a run or a comparison is complete.

        Args:
            config: the strategy's resolved configuration, plain values.
            row: every metric of docs/metrics.md by name; times in seconds unless the name says ms.
            folder: the run folder, which has ``requests.jsonl`` and the result files.
        """
