"""The one decode loop. Every strategy is this loop with other parts."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.interfaces import Executor, Scheduler, TokenSource, TreePolicy, Verifier
from specdec.state import DecodeState
from specdec.types import Commit


def decode(
    *,
    state: DecodeState,
    scheduler: Scheduler,
    policy: TreePolicy,
    source: TokenSource,
    verifier: Verifier,
    executor: Executor,
) -> Iterator[list[Commit]]:
    """Decodes every request of the scheduler, yielding each step's commits as they are decided.

    A *step* is one turn: one pipeline step, or one target pass where the latency is 1. The caller
    may cancel requests between steps (``RequestState.cancel``) and must iterate to the end: the
    parts close a request in the turn after its last.
    """
    while scheduler.admit(state):
        batch = scheduler.merge(policy.select(state, source))
        executor.submit(batch)
        policy.overlap(state, source, executor.ready)
        output = executor.collect()
        commits = state.commit(verifier.verify(state, output))
        for part in (policy, source, executor):
            part.commit(commits, output)
        yield commits
