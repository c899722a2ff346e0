"""Selects the requests that share one step of the target (SpecPipe 4.4)."""

from enum import StrEnum

from specdec.interfaces import TreePolicy
from specdec.policies.tree_growth import last_position
from specdec.state import DecodeState, RequestState


class Feeding(StrEnum):
    """Which requests' nodes a step may submit; the other requests wait for later steps.

    ``DYNAMIC``: all, as one ragged batch (SpecPipe-DB). ``MICRO_BATCHES``: one of n groups of
    open requests in turn, where n batches can be in flight (PP-vLLM's mini-batches).
    ``ITERATION``: one request per step (the iteration-based scheduling of SpecPipe and SpecInfer).
    """

    DYNAMIC = "dynamic"
    MICRO_BATCHES = "micro_batches"
    ITERATION = "iteration"


class Turns:
    """Chooses the requests whose nodes each step of a run may submit."""

    def __init__(self, *, feeding: Feeding, in_flight: int, policy: TreePolicy) -> None:
        """If the policy drafts for waiting requests (``drafts_waiting``), a request whose tree is
        not drafted yet (``prepared``) is skipped while others are in flight, and delays none.
        """
        self._in_flight = in_flight
        self._policy = policy
        one_group = feeding is Feeding.MICRO_BATCHES and in_flight == 1
        if one_group and policy.serial and not policy.drafts_waiting:
            feeding = Feeding.DYNAMIC  # every request that is not awaited
        self._feeding = feeding
        self._last: dict[int, int] = {}

    def take(self, state: DecodeState) -> frozenset[int] | None:
        if self._feeding is Feeding.DYNAMIC:
            return None
        live = [r for r in state.requests.values() if not r.finished]
        limit = 1 if self._feeding is Feeding.ITERATION else -(-len(live) // self._in_flight)
        waiting = [r for r in live if self._has_work(r)]
        if self._policy.drafts_waiting and any(r.awaiting for r in live):
            waiting = [r for r in waiting if self._policy.prepared(r)]
        waiting.sort(key=lambda r: self._last.get(r.id, -1))  # stable: of equals the oldest first
        chosen = frozenset(r.id for r in waiting[:limit])
        self._last = {r.id: self._last[r.id] for r in live if r.id in self._last}
        self._last.update(dict.fromkeys(chosen, state.step))
        return chosen

    def _has_work(self, request: RequestState) -> bool:
        if request.prefill_sent < request.num_prefill:
            return False
        tree = request.tree
        if self._policy.serial:
            return not request.awaiting
        fed_to_its_end = int(tree.positions.max()) >= last_position(request)
        return not fed_to_its_end or bool((tree.submitted_at < 0).any())
