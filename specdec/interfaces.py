"""The five Protocols that a strategy is put together from, and what each owes the others.

The loop in ``loop.py`` calls nothing else. Implementations compose; they do not inherit from each
other. Every part is told of a request by ``open`` (before any other call about it) and ``close``
(after its last), both called by the scheduler, and of every decision by ``commit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specdec.metrics.counters import ExecutorCounters, SourceCounters
from specdec.types import Batch, Candidates, Commit, Lossless, Needs, Nodes, Output, Verdict

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState


@runtime_checkable
class TokenSource(Protocol):
    """Proposes tokens: draft model, n-gram model, prompt lookup, exit head, mixtures of them.

    Optional attributes (default in parentheses):

    gives_probs (False): candidates are sampled and come with ``Candidates.probs``; rejection
        verifiers need it.
    pass_bytes (bytes of the draft model): bytes of weights that one pass of the source reads.
    speedup_law(policy, latency) -> SpeedupLaw | None (none): the theoretical speed-up over plain
        decoding, reported as ``speedup_law``.
    """

    needs: Needs
    counters: SourceCounters
    vocab_size: int | None
    """Size of the vocabulary it proposes from (must be the target's); None where any will do."""

    def open(self, request: RequestState) -> None: ...

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Proposes up to ``k`` children for each node.

        The caller asks once per live node and keeps the answer in the tree
        (``TokenTree.set_candidates``), so a known node never costs a second forward. Any node of a
        live tree may be asked for, whether its ancestors were expanded before or not. A source
        whose cache is behind the committed tokens catches up here and counts it.

        Returns:
            Candidates with rows in the order of ``nodes``; count 0 where it has nothing (yet).
        """
        ...

    def commit(self, commits: Sequence[Commit], output: Output) -> None: ...

    def close(self, request_id: int) -> None: ...


@runtime_checkable
class TreePolicy(Protocol):
    """Decides which nodes to propose, keep and verify.

    May also have, and is taken to have otherwise the value in brackets:

    serial (True): it feeds a request nothing while answers are awaited. One that feeds at every
        step must say False: turns and ``hit_rate`` go by it.
    levels_per_step (None): 1 where each batch is one level, so that an answer emits one token.
    follows_exits (False): it waits for ``Output.exits`` before it goes on below a node (PPSD).
    prepared(request) -> bool (none): whether the request's tree is drafted; see ``serving.Turns``.
    """

    value_dependent: bool
    """Whether the choice of a node's children depends on the candidates' values. If so, rejection
    sampling would be biased, and composing the two is refused."""

    def open(self, request: RequestState) -> None: ...

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time, its root included.

        Submitted and neither retired nor pruned, on an executor of that ``latency``. A paged cache
        admits requests by it.
        """
        ...

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """Chooses nodes to verify now, in topological order per request; may grow the forest.

        Nothing for a request whose root waits for its prefill or whose answers are awaited.
        """
        ...

    def overlap(self, state: DecodeState, source: TokenSource, ready: Callable[[], bool]) -> None:
        """Draft work while the target is busy; ``ready`` tells whether it has finished."""
        ...

    def commit(self, commits: Sequence[Commit], output: Output) -> None: ...

    def close(self, request_id: int) -> None: ...


@runtime_checkable
class Executor(Protocol):
    """Runs the target: an asynchronous verification service with a latency of so many steps."""

    latency: int
    """A node submitted in step s is answered by the collect of step s + latency - 1."""
    counters: ExecutorCounters
    hidden_layers: tuple[int, ...]
    """Layers whose hidden states its outputs carry; a part that needs others is refused."""

    def open(self, request: RequestState) -> None: ...

    def submit(self, batch: Batch) -> None:
        """Hands the batch to the target; does not wait. An empty batch is a step tick."""
        ...

    def ready(self) -> bool:
        """Whether ``collect`` would return without waiting for the target."""
        ...

    def collect(self) -> Output:
        """Blocks to the end of the step; answers the batch submitted ``latency`` - 1 steps ago."""
        ...

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Prunes caches and everything in flight, then ends the step (PipeDec 3.4.3)."""
        ...

    def close(self, request_id: int) -> None: ...

    def shutdown(self) -> None:
        """Releases processes and memory; called once, also after an error."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """Turns the target's answers into accepted paths."""

    needs: Needs
    lossless: Lossless

    def verify(self, state: DecodeState, output: Output) -> list[Verdict]:
        """One verdict per request in ``output.answers`` whose root was answered."""
        ...


@runtime_checkable
class Scheduler(Protocol):
    """Opens and closes requests on every part and adds prefill chunks to the batches."""

    def admit(self, state: DecodeState) -> bool:
        """Closes finished requests, admits waiting ones; False when nothing is left to do."""
        ...

    def merge(self, nodes: Nodes) -> Batch:
        """The step's batch: the chosen nodes, marked as submitted, and prefill chunks."""
        ...
