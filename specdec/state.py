"""Requests, their trees and the one place where decisions become output.

``DecodeState.commit`` is the only code that emits tokens: EOS, stop strings and ``max_new_tokens``
are applied here token by token, also inside an accepted path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from specdec.clocks import Clock
from specdec.clocks.meter import Meter
from specdec.metrics.counters import RequestCounters
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams
from specdec.tree import TokenTree
from specdec.types import NO_NODE, Batch, Commit, CommitKind, IntArray, Nodes, TreeRows, Verdict

_STOP_TAIL_TOKENS = 8  # tokens beyond the stop string's bytes that may be needed to decode its end

_MAX_SILENT_STEPS = 10_000  # far beyond any pipeline's latency; a loop must not spin for ever

TARGET_ORIGIN = -1
"""Origin of an emitted token that no source proposed (correction, bonus, or a miss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a request is complete.

    Attributes:
        max_new_tokens: tokens to emit at most, 1 or more.
        eos_ids: tokens that end the request; they are emitted as the last one.
        stop_strings: the request ends with the token that completes one of them; none is empty.
        decode: token ids -> text; needed for ``stop_strings`` only.

    Raises:
        ValueError: for a limit below 1, an empty stop string, or stop strings without ``decode``.
    """

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if "" in self.stop_strings:
            raise ValueError(f"stop_strings={self.stop_strings}: an empty text ends everything")
        if self.stop_strings and self.decode is None:
            raise ValueError(f"stop_strings={self.stop_strings} need decode, to see them in tokens")

    def reason(self, output: Sequence[int]) -> str | None:
        """Why ``output`` is complete (eos, stop_string, length), or None."""
        if output[-1] in self.eos_ids:
            return "eos"
        if self.stop_strings and self.decode is not None:
            longest = max(len(s.encode()) for s in self.stop_strings)
            tail = self.decode(output[-(longest + _STOP_TAIL_TOKENS) :])
            if any(s in tail for s in self.stop_strings):
                return "stop_string"
        return "length" if len(output) >= self.max_new_tokens else None


class RequestState:
    """One prompt and everything that has been decided about it."""

    def __init__(
        self,
        *,
        request_id: int,
        prompt: IntArray,
        stop: StopRules,
        sampling: SamplingParams,
        arrival_s: float = 0.0,
    ) -> None:
        """Starts a request.

        Args:
            request_id: the prompt's id, which keys its randomness (not its arrival order).
            prompt: int64[T >= 1].
            stop: when it is complete.
            sampling: the target's sampling transform.
            arrival_s: when it arrives, on the run's clock.

        Raises:
            ValueError: for an empty prompt.
        """
        if not len(prompt):
            raise ValueError(
                f"prompt {request_id} has no tokens; give at least one (e.g. the model's BOS token)"
            )
        self.id = request_id
        self.num_prompt = len(prompt)
        self.stop = stop
        self.sampling = sampling
        self.arrival_s = arrival_s
        self.admitted_s = 0.0
        self.emitted_s: list[float] = []
        self.output: list[int] = []
        self.output_origins: list[int] = []
        self.finish_reason: str | None = None
        self.prefill_sent = 0
        self.last_kind = CommitKind.NONE
        self.counters = RequestCounters()
        self._tokens = np.concatenate(
            [np.asarray(prompt, np.int64), np.zeros(stop.max_new_tokens + 1, np.int64)]
        )
        self._num_tokens = len(prompt)
        self.tree = TokenTree(token=int(prompt[-1]), position=len(prompt) - 1)

    @property
    def tokens(self) -> IntArray:
        """int64[T]: prompt and emitted tokens; the last one is the root."""
        return self._tokens[: self._num_tokens]

    @property
    def prefix_len(self) -> int:
        """Committed tokens before the root = the root's position."""
        return self._num_tokens - 1

    @property
    def num_prefill(self) -> int:
        """Prompt tokens that prefill covers: all but the first root."""
        return self.num_prompt - 1

    @property
    def finished(self) -> bool:
        """Whether the request is complete or cancelled."""
        return self.finish_reason is not None

    @property
    def awaiting(self) -> bool:
        """Whether submitted nodes of the tree still wait for the target's answer."""
        tree = self.tree
        return bool(((tree.submitted_at >= 0) & ~tree.answered).any())

    @property
    def held_tokens(self) -> int:
        """Tokens and nodes that the first stage of the target holds: prefix and submitted nodes."""
        prefix = self.prefill_sent if not self.output else self.prefix_len
        return prefix + int(np.count_nonzero(self.tree.submitted_at >= 0))

    def path_tokens(self, slot: int) -> IntArray:
        """int64[T + depth]: committed tokens and the path of a node, both ends included."""
        return np.concatenate([self.tokens, self.tree.tokens[self.tree.path(slot)[1:]]])

    def emit(self, token: int, origin: int, at_s: float) -> None:
        """Appends one output token and checks whether the request is complete with it."""
        self._tokens[self._num_tokens] = token
        self._num_tokens += 1
        self.output.append(token)
        self.output_origins.append(origin)
        self.emitted_s.append(at_s)
        self.finish_reason = self.stop.reason(self.output)

    def cancel(self) -> None:
        """Ends the request; the scheduler closes it on every part at the next step."""
        if not self.finished:
            self.finish_reason = "cancelled"


@dataclass(slots=True)
class Load:
    """How much the requests of a run held at a time; the scheduler counts it once per step.

    Attributes:
        request_steps: sum over steps of the requests that were open.
        kv_token_steps: sum over steps of the committed tokens and submitted nodes of all of them.
        kv_peak_tokens: the most of these in any step.
    """

    request_steps: int = 0
    kv_token_steps: int = 0
    kv_peak_tokens: int = 0

    def count(self, requests: Collection[RequestState]) -> None:
        """Counts one step."""
        held = sum(r.held_tokens for r in requests)
        self.request_steps += len(requests)
        self.kv_token_steps += held
        self.kv_peak_tokens = max(self.kv_peak_tokens, held)


class DecodeState:
    """The forest: live requests by id, the step counter, draws, clock and meter of a run.

    Attributes:
        turn: ids of the requests that may be fed in this step, None for all; the scheduler's.
        load: what the requests held.
    """

    def __init__(self, *, draws: KeyedDraws, clock: Clock, meter: Meter) -> None:
        self.requests: dict[int, RequestState] = {}
        self.turn: frozenset[int] | None = None
        self.load = Load()
        self.step = 0
        self._silent_steps = 0
        self.draws = draws
        self.clock = clock
        self.meter = meter

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Whatever the controller computes in the block is a source's work, of whatever kind.

        Layers and heads of the target draft too (early exits, Medusa): kinds of work do not tell.
        """
        self.clock.drafting = self.meter.drafting = True
        try:
            yield
        finally:
            self.clock.drafting = self.meter.drafting = False

    def mark_submitted(self, nodes: Nodes) -> None:
        """Records the submission step of chosen nodes (called by the scheduler)."""
        for request_id, ids in nodes.items:
            request = self.requests[request_id]
            slots = request.tree.slots(ids)
            assert NO_NODE not in slots, f"nodes {ids} of request {request_id} left the tree"
            request.tree.submitted_at[slots] = self.step
            request.counters.proposed += int((slots > 0).sum())

    def commit(self, verdicts: Sequence[Verdict]) -> list[Commit]:
        """Turns verdicts into output, moves the roots, counts the step, and ends it.

        Returns:
            One commit per verdict; requests without one had no answer in this step.
        """
        answered = {verdict.request for verdict in verdicts}
        for request in self.requests.values():
            if request.id not in answered:
                _count_idle(request)
        live = self.requests.values()
        at_work = bool(verdicts) or any(r.prefill_sent < r.num_prefill for r in live)
        self._silent_steps = 0 if at_work or not live else self._silent_steps + 1
        if self._silent_steps > _MAX_SILENT_STEPS:
            raise RuntimeError(
                f"no answer in {_MAX_SILENT_STEPS} steps: the policy submits nothing for requests"
                f" {sorted(self.requests)}, or the executor loses what it is given"
            )
        now = self.clock.now()
        commits = [self._commit_one(self.requests[v.request], v, now) for v in verdicts]
        self.step += 1
        return commits

    def _commit_one(self, request: RequestState, verdict: Verdict, now: float) -> Commit:
        tree = request.tree
        path = tree.slots(verdict.accepted_ids)
        assert NO_NODE not in path, f"accepted nodes {verdict.accepted_ids} left the tree"
        last = int(path[-1]) if len(path) else 0
        child = tree.child(last, verdict.next_token)
        assert child == NO_NODE or not tree.answered[child], (
            f"the verifier stopped above node {tree.ids[child]}, which has its answer: as a root it"
            " would never be answered again"
        )
        retired = np.concatenate([[0], path])
        retired_ids, retired_tokens = tree.ids[retired], tree.tokens[retired]
        _count_answer(request, verdict, hit=child != NO_NODE)

        tokens = [*tree.tokens[path].tolist(), verdict.next_token]
        next_origin = TARGET_ORIGIN if child == NO_NODE else int(tree.origins[child])
        origins = [*tree.origins[path].tolist(), next_origin]
        for token, origin in zip(tokens, origins, strict=True):
            if request.finished:
                request.counters.cut_tokens += 1
            else:
                request.emit(token, origin, now)

        if child != NO_NODE:
            kind = CommitKind.HIT
            tree.reroot(child)
        else:
            kind = CommitKind.MISS
            position = int(tree.positions[last]) + 1
            tree.reset(token=verdict.next_token, position=position)
        request.last_kind = kind
        return Commit(
            request=request.id,
            step=self.step,
            kind=kind,
            retired_ids=retired_ids,
            retired_tokens=retired_tokens,
            next_token=verdict.next_token,
            root_id=tree.root_id,
            prefix_len=int(tree.positions[0]),
            kept_ids=tree.ids.copy(),
            finished=request.finished,
        )


def _count_answer(request: RequestState, verdict: Verdict, *, hit: bool) -> None:
    counters = request.counters
    depth = len(verdict.accepted_ids)
    counters.answers += 1
    counters.accepted += depth
    counters.hits += hit
    counters.misses += not hit
    counters.verified += verdict.num_verified
    counters.path_lengths[depth + 1] += 1
    counters.accepted_by_depth.update(range(1, depth + 1))
    counters.judged_by_depth.update(range(1, depth + 1 + (verdict.num_verified > depth)))


def _count_idle(request: RequestState) -> None:
    counters = request.counters
    if request.prefill_sent < request.num_prefill or not request.awaiting:
        return
    if request.last_kind is CommitKind.NONE:
        counters.fill_steps += 1
    elif request.last_kind is CommitKind.MISS:
        counters.flush_steps += 1
    else:
        counters.refill_steps += 1


def batch_of(state: DecodeState, nodes: Nodes) -> Batch:
    """Packs chosen nodes as the rows that travel to the target (no prefill)."""
    trees = []
    for request_id, ids in nodes.items:
        request = state.requests[request_id]
        tree = request.tree
        slots = tree.slots(ids)
        parents = tree.parents[slots]
        trees.append(
            TreeRows(
                request=request_id,
                prefix_len=request.prefix_len,
                node_ids=ids,
                tokens=tree.tokens[slots],
                parent_ids=np.where(parents == NO_NODE, NO_NODE, tree.ids[parents]),
                depths=tree.depths[slots],
            )
        )
    return Batch(step=state.step, trees=tuple(trees))
