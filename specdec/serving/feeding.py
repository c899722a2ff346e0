"""Whose turn it is: how many requests share one step of the target (SpecPipe 4.4)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from specdec.policies.tree_growth import last_position

if TYPE_CHECKING:
    from specdec.interfaces import TreePolicy
    from specdec.state import DecodeState, RequestState


class Feeding(StrEnum):
    """Which requests a step may feed; those left out keep their turn for a later one.

    ``DYNAMIC``: all of them, as one ragged batch (SpecPipe-DB's dynamic batching).
    ``MICRO_BATCHES``: the live requests in min(requests, latency) groups, one group per step, so
    that plain decoding keeps all stages of a pipeline at work (PP-vLLM's mini-batches).
    ``ITERATION``: one request per step (the iteration-based scheduling of SpecPipe and SpecInfer).
    """

    DYNAMIC = "dynamic"
    MICRO_BATCHES = "micro_batches"
    ITERATION = "iteration"


class Turns:
    """Gives turns to those who have waited longest, so that no request starves."""

    def __init__(self, *, feeding: Feeding, latency: int, policy: TreePolicy) -> None:
        """Sets the rule.

        Args:
            feeding: how many requests share a step.
            latency: steps from submission to answer.
            policy: who is fed by it. One with a method ``prepared(request)`` drafts for requests
                that wait; while others are in flight, those that are not prepared get no turn, so
                that their drafting holds nobody up.
        """
        self._feeding = feeding
        self._latency = latency
        self._serial = getattr(policy, "serial", True)
        self._prepared = getattr(policy, "prepared", None)
        self._last: dict[int, int] = {}

    def take(self, state: DecodeState) -> frozenset[int] | None:
        """Ids of the requests that this step may feed; None: all of them."""
        if self._feeding is Feeding.DYNAMIC:
            return None
        live = [r for r in state.requests.values() if not r.finished]
        limit = 1 if self._feeding is Feeding.ITERATION else -(-len(live) // self._latency)
        waiting = [r for r in live if self._has_work(r)]
        if self._prepared is not None and any(r.awaiting for r in live):
            waiting = [r for r in waiting if self._prepared(r)]
        waiting.sort(key=lambda r: self._last.get(r.id, -1))  # stable: of equals the oldest first
        chosen = frozenset(r.id for r in waiting[:limit])
        self._last = {r.id: self._last[r.id] for r in live if r.id in self._last}
        self._last.update(dict.fromkeys(chosen, state.step))
        return chosen

    def _has_work(self, request: RequestState) -> bool:
        """Whether a turn could be of use: not while it is prefilled, awaited, or fed to its end."""
        if request.prefill_sent < request.num_prefill:
            return False
        tree = request.tree
        if self._serial:
            return not request.awaiting
        fed_to_its_end = int(tree.positions.max()) >= last_position(request)
        return not fed_to_its_end or bool((tree.submitted_at < 0).any())
