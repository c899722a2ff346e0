"""The decode loop. Every strategy is this loop with different parts."""

from collections.abc import Iterator

from specdec.interfaces import Executor, Scheduler, TokenSource, TreePolicy, Verifier
from specdec.sources.events import LoopEvents
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
    """Decodes all requests of the scheduler, and yields the commits of each step.

    A *step* is one iteration: one pipeline step, one target pass for an executor of latency 1, or,
    for an executor without a latency, the time until answers arrive or the policy has new nodes.
    The caller may cancel requests between steps (``RequestState.cancel``) and must exhaust the
    iterator, since the parts close a request in the step after its last.
    """
    events = LoopEvents(state, source, executor)
    while scheduler.admit(state):
        batch = scheduler.merge(policy.select(state, source))
        executor.submit(batch)
        hurry = policy.overlap(state, source, events)
        output = executor.collect(wait=not hurry)
        commits = state.commit(verifier.verify(state, state.receive(output)))
        for part in (policy, source, executor):
            part.commit(commits, output)
        yield commits
