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
    """Common base of token source, tree policy and executor.

    The scheduler calls ``open`` on each part before any other call about a request, and ``close``
    after the last.
    """

    def open(self, request: RequestState) -> None:
        """Prepares for a request that has been admitted."""

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Applies commits to caches and to work in flight. Called at the end of every step, after
        ``DecodeState.commit``, with the step's ``output``. When exits or hidden states arrive
        within a step, a source is also called with these as ``output`` and without commits.
        """

    def close(self, request_id: int) -> None:
        """Releases the state of a request that has finished."""


class TokenSource(_Part, ABC):
    """Proposes tokens: a draft model, an n-gram model, prompt lookup, an exit head, a mixture.

    An *asynchronous* source runs passes in the background and overrides ``start``, ``poll`` and
    ``set_wakeup``; the wrapper ``sources.Background`` makes any source asynchronous. A running pass
    is never interrupted: commits and closes take effect when it has ended, and the caller drops
    candidates of nodes that were pruned meanwhile.
    """

    needs: Needs = Needs()
    """Inputs that the source requires from the target's answers and other parts. Default: none."""
    vocab_size: int | None = None
    """Vocabulary size, which must equal the target's. Default: None, for any vocabulary."""
    gives_probs: bool = False
    """Whether candidates are sampled and have ``probs``, which rejection verifiers need."""
    asynchronous: bool = False
    """Whether passes run in the background."""
    caveat: str = ""
    """Why result rows of this source are not representative, as a clause ("untrained heads")."""
    model: str = "draft"
    """Name of the model whose weights a pass reads, for the theoretical memory traffic."""
    members: Sequence[TokenSource] = ()
    """The combined sources, for policies that choose one per request (``policies.Adaptive``)."""

    @cached_property
    def counters(self) -> SourceCounters:
        """Counts of model passes and rows; they stay 0 if the source runs no model."""
        return SourceCounters()

    @property
    def levels(self) -> Sequence[TokenSource]:
        """The sources that ``Events.start`` can start, indexed by ``level``. Default: only self."""
        return (self,)

    @property
    def pass_bytes(self) -> int | None:
        """Bytes of weights that one pass reads. Default: None, which means all of ``model``."""
        return None

    def speedup_law(self, policy: TreePolicy, latency: int) -> SpeedupLaw | None:
        """Returns the theoretical speed-up formula for a policy and executor latency, if any."""
        return None

    @abstractmethod
    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Proposes up to ``k`` children for each node, in the order of ``nodes``; a node without
        a proposal (yet) has ``counts`` 0.

        Called once per live node: the caller stores the result in the tree
        (``TokenTree.set_candidates``). The nodes may be any nodes of live trees, whether or not
        their ancestors have been expanded. If the source's cache lacks committed tokens, it
        computes and counts their rows here.
        """

    def start(self, state: DecodeState, nodes: Nodes, k: int) -> Ticket:
        """Starts the pass that ``expand`` would make. Default: runs it at once."""
        candidates = self.expand(state, nodes, k)
        return Ticket(nodes=nodes, due_s=state.clock.now(), candidates=candidates)

    def poll(self, ticket: Ticket) -> Candidates | None:
        """Returns the result of a started pass, once; None while the pass is running."""
        return ticket.candidates

    def set_wakeup(self, event: threading.Event) -> bool:
        """Asks the source to set ``event`` whenever a pass has ended; returns whether it will. If
        not, a wait on a measured clock (wall time) polls every millisecond.
        """
        return not self.asynchronous


class Events(ABC):
    """Starts draft passes and reports events while the target works; see ``TreePolicy.overlap``."""

    running: list[Ticket]
    """Draft passes in flight, in the order in which they began."""

    @abstractmethod
    def start(self, nodes: Nodes, k: int, level: int = 0) -> Ticket:
        """Starts a draft pass that proposes up to ``k`` children for each node. The nodes must be
        unexpanded and in no other pass of that model. A source that is not asynchronous runs the
        pass before this returns.

        ``level`` is the model's index in a source of several (``sources.ModelChain``). Candidates
        of level 0 are stored in the trees; those of other levels come in ``Event.candidates``.
        """

    @abstractmethod
    def ready(self) -> bool:
        """Returns whether the target's work of the step has ended."""

    @abstractmethod
    def next(self) -> Event:
        """Waits for the next event and returns it: on a clock with a latency profile (simulated or
        paced) the one planned first, on a measured clock (wall time) the first that happens.

        If several have happened, ends of draft passes come first, then early exits and hidden
        states, then the target's event, which every further call returns until the step ends.
        """

    @abstractmethod
    def next_draft(self) -> Event:
        """Waits for the next end of a draft pass and leaves other events for ``next``. Used while
        the target is idle because no drafted token is available.
        """


class TreePolicy(_Part, ABC):
    """Decides which nodes to propose, keep and verify."""

    value_dependent: bool = True
    """Whether the choice of a node's children depends on the candidates' probabilities. Such a
    policy would bias rejection sampling and is refused with a rejection verifier."""
    serial: bool = True
    """Whether a request's nodes are submitted only after all its earlier ones were answered. A
    policy that submits nodes at every step must set False: scheduling and metrics depend on it."""
    asynchronous: bool = False
    """Whether the policy drafts in ``overlap``, while the target is busy."""
    levels_per_step: int | None = None
    """Number of tree levels in each batch (1: each answer emits one token); None if not fixed."""
    follows_exits: bool = False
    """Whether the policy waits for ``Output.exits`` before it continues below a node (PPSD)."""
    time_dependent: bool = False
    """Whether a tree's contents when an answer arrives depend on the duration of passes. Such a
    policy is refused with a rejection verifier, whose output would then depend on it too."""
    drafts_waiting: bool = False
    """Whether the policy drafts also for requests that may not submit nodes in this step."""
    includes_plain: bool = False
    """Whether the policy submits the root alone in rounds in which drafting does not pay."""
    chain_length: int | None = None
    """Number of draft tokens per verification if the policy drafts chains; else None."""

    def max_cached_nodes(self, in_flight: int) -> int | None:
        """Returns the maximum number of one request's nodes, root included, in the target's cache
        while ``in_flight`` batches are unanswered. A paged cache reserves room for that many when a
        request is admitted, and refuses a policy that returns None (unknown).
        """
        return None

    @abstractmethod
    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """Chooses nodes to verify now, in topological order per request; may grow the trees.

        It must not return nodes of a request whose prompt is not yet prefilled. A ``serial`` policy
        must not return nodes of a request with unanswered nodes either.
        """

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        """Does draft work while the target is busy. Default: none.

        A policy either calls ``source.expand``, which returns when the draft pass has ended, or
        starts passes with ``events.start`` and receives their ends from ``events.next``, possibly
        in a later step. Returns whether the next step begins without waiting for the target; an
        executor with a latency waits for the step's work in any case.
        """
        return False

    def prepared(self, request: RequestState) -> bool:
        """Returns whether the request's tree is completely drafted; used if ``drafts_waiting``."""
        return True

    def notes(self) -> Sequence[str]:
        """Returns lines that are printed at the end of a run."""
        return ()

    def check_source(self, source: TokenSource) -> None:
        """Raises ``UserError`` for a source that the policy cannot use."""

    def check_clock(self, clock: Clock) -> None:
        """Raises ``UserError`` for a clock that the policy cannot use."""


class Executor(_Part, ABC):
    """Runs the target: an asynchronous verification service, with or without a fixed latency.

    A class that ``executor._target_`` names is created in two phases: ``plan`` computes what
    policies and sources depend on, such as the latency; ``build`` loads the models after that.
    """

    options: type[Any] | None = None
    """Dataclass of the keys below ``executor``; None: they are the parameters of ``plan``."""

    @classmethod
    def check(cls, keys: Mapping[str, Any], clock: ClockKind, *, tracing: bool) -> None:
        """Raises ``UserError`` if ``keys``, the configuration's values below ``executor``, do not
        fit each other, the clock or tracing. Called when a configuration is composed.
        """

    @classmethod
    def plan(cls, *models: Any, **keys: Any) -> ExecutorPlan:  # noqa: ARG003
        """Plans the executor without loading weights, from a ``specdec.pairs.ModelPair`` and the
        configuration's values below ``executor``.
        """
        raise UserError(f"{cls.__name__} has no method plan, which executor._target_ needs")

    @classmethod
    def build(cls, *plan_and_needs: Any, **runtime: Any) -> Executor:  # noqa: ARG003
        """Loads the models and returns the executor.

        Args:
            plan_and_needs: the result of ``plan``, and the ``Needs`` of source and verifier. Raises
                ``UserError`` for a need that this executor does not provide.
            runtime: the objects that the parameters of ``build`` name
                (``specdec.compose.workbench.Workbench.objects``).
        """
        raise UserError(f"{cls.__name__} has no method build, which executor._target_ needs")

    latency: int | None = 1
    """A node submitted in step s is answered by the collect of step s + latency - 1. None: answers
    arrive at any time and in any order."""
    in_flight: int = 1
    """Largest number of batches processed at the same time; equals the latency if there is one."""
    hidden: tuple[HiddenName, ...] = ()
    """Hidden states that answers contain; sources that need other ones are refused."""
    early_hidden: tuple[HiddenName, ...] = ()
    """Hidden states that are delivered before the answers, in ``Output.early``."""
    can_poll: bool = False
    """Whether ``poll`` may return an output instead of None."""
    distributed: bool = False
    """Whether the target runs in other processes, whose counts ``reports`` returns."""

    @cached_property
    def counters(self) -> ExecutorCounters:
        """Counts of submitted batches and rows."""
        return ExecutorCounters()

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Hands the batch to the target without waiting; an empty batch only starts the step."""

    @abstractmethod
    def collect(self, *, wait: bool = True) -> Output:
        """Ends the step and returns its results; the ``commit`` that follows prunes caches and rows
        in flight (PipeDec 3.4.3).

        An executor with a latency waits until the step's work has ended, and returns the answers to
        the batch submitted ``latency`` - 1 steps ago. An executor without one returns the answers
        that have arrived, possibly none; with ``wait`` it first waits for an answer if
        ``in_flight`` batches are unanswered or the step's batch was empty. A batch submitted beyond
        ``in_flight`` is queued.
        """

    def ready(self) -> bool:
        """Returns whether the step's work is done or, without a latency, answers have arrived."""
        return True

    def due_s(self) -> float | None:
        """Returns the clock time at which ``ready`` or ``poll`` will have something new; None if it
        is not known in advance.
        """
        return None

    def poll(self) -> Output | None:
        """Returns exits and early hidden states that arrived in this step, each once; or None."""
        return None

    def set_wakeup(self, event: threading.Event) -> bool:
        """Asks the executor to set ``event`` whenever something arrives; returns whether it will
        (if not, waits on a measured clock, wall time, poll every millisecond).
        """
        return False

    def shutdown(self) -> None:
        """Releases processes and memory; called once, also after an error."""

    def reports(self) -> Sequence[dict[str, Any]]:
        """Returns a dict for each other process. Keys: "clock" (the fields of its ``ClockReport``),
        "rows" (number of rows that it computed), "bytes_sent", and optional ones.
        """
        return ()

    def draft_reports(self) -> Sequence[dict[str, Any]]:
        """Returns a dict as in ``reports`` for each other process that runs part of the draft."""
        return ()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent to others."""
        return 0

    @property
    def pids(self) -> Sequence[int] | None:
        """Ids of the executor's other processes; None if another launcher has started them."""
        return ()

    @property
    def stage_of_rank(self) -> Mapping[int, int] | None:
        """Maps a clock rank to its stage's number from 1, for traces; None without stages."""
        return None


class Verifier(ABC):
    """Turns the target's answers into accepted paths."""

    needs: Needs = Needs()
    """Data that answers and candidates must contain for this verifier."""
    lossless: Lossless = Lossless.LOSSY
    """The verifier's guarantee; printed in tables and by ``specdec verify``."""

    @abstractmethod
    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        """Returns one verdict per request of ``requests``, whose roots have all been answered.

        A verdict follows the target's tokens in the tree (``TokenTree.answers``, ``target_probs``,
        ``hidden``) from the root to the last answered node; a later verdict continues there.
        """


class Scheduler(ABC):
    """Decides which requests are decoded, and adds prefill chunks to the batches.

    Created for each call of the loop with the arguments of ``serving.rules.MakeScheduler``.
    """

    @abstractmethod
    def admit(self, state: DecodeState) -> bool:
        """Begins a step; returns False when no request is left.

        Closes finished requests: calls ``close`` of each part and ``on_finish``, and removes them
        from ``state.requests``. Admits waiting requests: sets ``request.admitted_s``, adds them to
        ``state.requests`` and calls ``open`` of each part. Sets ``state.turn``: ids of the requests
        whose nodes may be submitted in this step, None for all. If no request is open and none has
        arrived yet, waits for the next arrival (``state.clock.wait_until``).
        """

    @abstractmethod
    def merge(self, nodes: Nodes) -> Batch:
        """Marks ``nodes`` as submitted and returns the step's batch: these nodes, and chunks of
        prompt tokens to prefill. Advances ``request.prefill_sent`` and updates ``state.load``.
        """


class Logger(ABC):
    """Receives the results of runs and comparisons in addition to the run folder (``logger=``). It
    is called in the main process after the results are on disk; in a sweep, once per run.
    """

    def check(self) -> None:  # noqa: B027  # nothing to check is the usual case
        """Raises ``UserError`` if logging cannot work, for example without credentials; called
        before anything is decoded.
        """

    @abstractmethod
    def log(self, config: Mapping[str, Any], row: Mapping[str, Any], folder: Path) -> None:
        """Called once per strategy when a run or a comparison is complete, with its resolved
        ``config``, every metric of docs/metrics.md by name (``row``), and the run folder.
        """
