"""The Protocols of the parts that a run is composed of.

The loop in ``loop.py`` calls a token source, a tree policy, a verifier, an executor and a
scheduler, and nothing else. Implementations compose; they do not inherit from each other. The
scheduler calls ``open`` on each part before any other call about a request, and ``close`` after the
last; ``commit`` reports the decisions of every step.

``Clock``, ``DataReader`` and ``Logger`` are the other Protocols that a class outside this library
may implement; ``specdec.pairs.ModelPair`` is the one of models (docs/adding.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specdec.clocks.interface import Clock
from specdec.data.prompt import DataReader
from specdec.metrics.counters import ExecutorCounters, SourceCounters
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
    "AsynchronousSource",
    "Clock",
    "DataReader",
    "Events",
    "Executor",
    "Logger",
    "PlannedExecutor",
    "Scheduler",
    "TokenSource",
    "TreePolicy",
    "Verifier",
]


@runtime_checkable
class TokenSource(Protocol):
    """Proposes tokens: a draft model, an n-gram model, prompt lookup, an exit head, a mixture.

    Optional attributes (default in parentheses):

    levels (the source alone): asynchronous sources whose passes ``Events.start`` begins by number.
    gives_probs (False): candidates are sampled and come with ``Candidates.probs``. Required by
        rejection verifiers.
    pass_bytes (bytes of the draft model): bytes of weights that one pass of the source reads.
    speedup_law(policy, latency) -> SpeedupLaw | None (none): the theoretical speed-up over plain
        decoding, reported as ``speedup_law``.
    """

    needs: Needs
    counters: SourceCounters
    vocab_size: int | None
    """Size of the vocabulary it proposes from, which must be the target's; None: any."""

    def open(self, request: RequestState) -> None: ...

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Proposes up to ``k`` children for each node.

        Called once per live node: the caller keeps the answer in the tree
        (``TokenTree.set_candidates``), so a known node costs no second forward. The nodes are any
        nodes of live trees, their ancestors expanded or not. A source whose cache is behind the
        committed tokens catches up here and counts those rows.

        Returns:
            Candidates, rows in the order of ``nodes``; count 0 where there is none (yet).
        """
        ...

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Updates caches, and stores what ``output`` brings besides answers.

        Called at the end of every step, and without commits when exits or hidden states arrive
        within a step.
        """
        ...

    def close(self, request_id: int) -> None: ...


@runtime_checkable
class AsynchronousSource(TokenSource, Protocol):
    """A source whose passes run in the background.

    ``sources.Background`` makes one of any source. A pass that runs is not preempted: commits and
    closes that arrive meanwhile take effect when it has ended, and candidates of nodes pruned
    meanwhile are dropped by the caller.

    Optional attributes (default in parentheses):

    wakeup (none): ``threading.Event`` that the source sets when a pass has ended. Assigned by the
        decode loop.
    """

    def start(self, state: DecodeState, nodes: Nodes, k: int) -> Ticket:
        """Starts a pass over ``nodes``, as ``expand`` would make it, and does not wait."""
        ...

    def poll(self, ticket: Ticket) -> Candidates | None:
        """The result of ``expand``, once; None while the pass runs."""
        ...


class Events(Protocol):
    """What happens while the target works; passed to ``TreePolicy.overlap``."""

    running: list[Ticket]
    """Draft passes in flight, in the order in which they began."""

    def start(self, nodes: Nodes, k: int, level: int = 0) -> Ticket:
        """Starts a draft pass that proposes up to ``k`` children for each node.

        The nodes must be unexpanded and in no other pass of that model. A source that is not
        asynchronous runs the pass now; its event follows.

        Args:
            nodes, k: see ``TokenSource.expand``.
            level: the model of a source that has several (``sources.ModelChain``). Candidates of
                level 0 are stored in the trees; those of others come with their event. Default: 0.
        """
        ...

    def ready(self) -> bool:
        """Whether the target's work of the step has ended."""
        ...

    def next(self) -> Event:
        """Waits for the next event.

        On a simulated or paced clock the call waits for the earliest planned event, on a measured
        clock for the first that happens. Of events that have happened already, draft passes come
        first, then early arrivals, then the target, whose event returns at every call until the
        step ends.
        """
        ...

    def next_draft(self) -> Event:
        """Waits for the first draft pass in flight to end, at least one, whatever else happens.

        For policies whose target has nothing to do before the draft has a token.
        """
        ...


@runtime_checkable
class TreePolicy(Protocol):
    """Decides which nodes to propose, keep and verify.

    Optional attributes (default in parentheses):

    serial (True): the policy feeds a request nothing while answers are awaited. A policy that feeds
        at every step must set False: turns and ``hit_rate`` depend on it.
    levels_per_step (None): 1 where each batch is one level, so that an answer emits one token.
    follows_exits (False): waits for ``Output.exits`` before it continues below a node (PPSD).
    prepared(request) -> bool (none): whether the request's tree is drafted; see ``serving.Turns``.
    time_dependent (False): what is in a tree when an answer arrives depends on the times of passes.
        Rejection verifiers, whose output for a seed would depend on them too, are refused.
    inner (none): the policy whose tree this one extends.
    notes() -> Sequence[str] (none): lines that a run prints when it has ended.
    check_source(source), check_clock(clock) (none): raise ``UserError`` for a source or clock that
        the policy cannot use.
    """

    value_dependent: bool
    """Whether the choice of a node's children depends on the candidates' probabilities. This would
    bias rejection sampling, so the two cannot be composed."""

    def open(self, request: RequestState) -> None: ...

    def held_nodes(self, in_flight: int) -> int:
        """Largest number of nodes of one request in the target's cache, the root included.

        Counts nodes that were submitted and neither retired nor pruned, on an executor with that
        many batches ``in_flight`` (``Executor.in_flight``). Admission to a paged cache depends on
        it.
        """
        ...

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """Chooses nodes to verify now, in topological order per request; may grow the forest.

        Returns no nodes of a request whose root waits for its prefill or whose answers are awaited.
        """
        ...

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        """Does draft work while the target is busy.

        A policy drafts by calls of ``source.expand``, which take their time at once, or by passes
        that run free: ``events.start`` begins one, and ``events.next`` returns what happens next.
        A pass that still runs at the end of the step is reported by a later step's ``events``.

        Returns:
            Whether the next step begins without waiting for the target. An executor with a latency
            ends each step with the target's work all the same.
        """
        ...

    def commit(self, commits: Sequence[Commit], output: Output) -> None: ...

    def close(self, request_id: int) -> None: ...


@runtime_checkable
class Executor(Protocol):
    """Runs the target: an asynchronous verification service, with or without a fixed latency.

    Optional attributes (default in parentheses):

    early_hidden (()): hidden states that its outputs carry before the answers.
    poll() -> Output | None (none): exits and early hidden states that have arrived within the step,
        each once; None if there are no new ones.
    wakeup (none): ``threading.Event`` that it sets when something arrives. Assigned by the decode
        loop; without it a wait on a measured clock looks every millisecond.
    """

    latency: int | None
    """A node submitted in step s is answered by the collect of step s + latency - 1. None: answers
    come when they come, in any order."""
    in_flight: int
    """Largest number of batches that are submitted and not answered; the latency if it has one."""
    counters: ExecutorCounters
    hidden: tuple[HiddenName, ...]
    """Hidden states that its answers carry; a part that needs others is refused."""

    def open(self, request: RequestState) -> None: ...

    def submit(self, batch: Batch) -> None:
        """Hands the batch to the target without waiting. An empty batch is a step tick."""
        ...

    def ready(self) -> bool:
        """Whether ``collect`` has its results: the step's work is done or, without a latency,
        answers have arrived.
        """
        ...

    def due_s(self) -> float | None:
        """Time of the run's clock at which ``ready`` or ``poll`` has something new.

        None where it is not known in advance: on a measured clock, or with nothing in flight.
        """
        ...

    def collect(self, *, wait: bool = True) -> Output:
        """Ends the step.

        With a latency: waits for the step's work, and returns the answers to the batch submitted
        ``latency`` - 1 steps ago. Without: returns the answers that have arrived, perhaps none. If
        ``wait``, and ``in_flight`` batches are being worked on or the step's batch was empty, it
        waits for the first of them. A batch that is submitted beyond ``in_flight`` is queued.
        """
        ...

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Prunes caches and everything in flight, then ends the step (PipeDec 3.4.3)."""
        ...

    def close(self, request_id: int) -> None: ...

    def shutdown(self) -> None:
        """Releases processes and memory; called once, also after an error."""
        ...


@runtime_checkable
class PlannedExecutor(Executor, Protocol):
    """A class that ``executor._target_`` can name: an executor that is made in two phases.

    Optional attributes of the class (default in parentheses):

    options (the parameters of ``plan``): dataclass with the keys of the configuration node.
    check(keys, clock: ClockKind, *, tracing: bool) (none): raises ``UserError`` for keys that do
        not fit together, the clock or a trace; called when a configuration is composed.
    """

    @classmethod
    def plan(cls, models: Any, **keys: Any) -> ExecutorPlan:
        """First phase, before sources and policies are made, which need the latency.

        Its keyword arguments are the keys of the configuration node.

        Args:
            models: ``specdec.pairs.ModelPair``; weights must not be loaded here.
            keys: values of the node.
        """
        ...

    @classmethod
    def build(cls, plan: Any, needs: Needs, **runtime: Any) -> Executor:
        """Second phase, when the parts are known.

        Args:
            plan: the result of ``plan``.
            needs: union of what source and verifier need; what is not delivered is refused.
            runtime: objects that its signature requests by name, see ``specdec.compose.RUNTIME``.
        """
        ...


@runtime_checkable
class Verifier(Protocol):
    """Turns the target's answers into accepted paths."""

    needs: Needs
    lossless: Lossless

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        """One verdict per request; the roots of all of them are answered.

        Answers are stored in the trees (``TokenTree.answers``, ``target_probs``, ``hidden``). A
        verifier follows them from the root as far as nodes are answered; where it stops earlier,
        the next step continues.
        """
        ...


@runtime_checkable
class Scheduler(Protocol):
    """Decides which requests are decoded, and adds prefill chunks to the batches.

    Made for one call of the loop; ``serving.rules.MakeScheduler`` has its constructor's arguments.
    """

    def admit(self, state: DecodeState) -> bool:
        """Begins a step: closes finished requests and admits waiting ones.

        Admission sets ``request.admitted_s``, enters the request into ``state.requests`` and calls
        ``open`` of each part; closing calls ``close`` of each part, removes the request and calls
        ``on_finish``. Sets ``state.turn``: ids of the requests that this step may feed, None for
        all. Where no request has arrived yet, ``state.clock.wait_until`` the next arrival.

        Returns:
            False when no request is left.
        """
        ...

    def merge(self, nodes: Nodes) -> Batch:
        """The step's batch: ``nodes``, marked as submitted, and chunks of prompt tokens.

        Prefill covers all prompt tokens but the last. Advances ``request.prefill_sent`` and counts
        ``state.load``.
        """
        ...


@runtime_checkable
class Logger(Protocol):
    """Receives the results of runs and comparisons, besides the run folder (``logger=``).

    Built in the main process after the results are on disk; in a sweep, once per run.
    """

    def log(self, config: Mapping[str, Any], row: Mapping[str, Any], folder: Path) -> None:
        """Called once per strategy when a run or a comparison is complete.

        Args:
            config: the strategy's resolved configuration, plain values.
            row: every metric of docs/metrics.md by name; times in seconds unless the name says ms.
            folder: the run folder, which has ``requests.jsonl`` and the result files.
        """
        ...
