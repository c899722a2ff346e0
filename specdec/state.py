"""Requests, their token trees, and the commit of decisions.

``DecodeState.commit`` is the only code that emits tokens: it applies EOS, stop strings and
``max_new_tokens`` token by token, also inside an accepted path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import numpy as np

from specdec.clocks import Clock
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.metrics.counters import RequestCounters
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sampling.transform import SamplingParams
from specdec.tree import TokenTree
from specdec.types import (
    NO_NODE,
    Batch,
    Candidates,
    Commit,
    CommitKind,
    IntArray,
    Nodes,
    Output,
    TreeRows,
    Verdict,
)

_SPARE_CHARS = 8  # a part of a character, or a space, may be wrong where decoding begins
_MAX_IDLE_STEPS = 10_000  # far beyond any pipeline's latency; stops an endless loop
_ROOT = np.zeros(1, np.int64)  # slots of the path to the root

TARGET_ORIGIN = -1
"""Origin of an emitted token that no source proposed, such as a correction or bonus token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """Conditions that complete a request.

    Attributes:
        max_new_tokens: maximum number of emitted tokens, at least 1.
        eos_ids: tokens that end the request; emitted as its last token. Default: none.
        stop_strings: the request ends with the token that completes one of them. Default: none.
        decode: token ids -> text; required with ``stop_strings``.
    """

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if "" in self.stop_strings:
            raise ValueError(
                f"stop_strings={self.stop_strings} contains an empty string; remove it"
            )
        if self.stop_strings and self.decode is None:
            raise ValueError(
                f"stop_strings={self.stop_strings} requires decode, from token ids to text"
            )

    def reason(self, output: Sequence[int]) -> str | None:
        if output[-1] in self.eos_ids:
            return "eos"
        if self.stop_strings and self.decode is not None:
            num_chars = num_tokens = max(map(len, self.stop_strings)) + _SPARE_CHARS
            while num_tokens < len(output) and len(self.decode(output[-num_tokens:-1])) < num_chars:
                num_tokens *= 2  # a token may be one byte of a character, or have no text
            tail = self.decode(output[-num_tokens:])
            if any(s in tail for s in self.stop_strings):
                return "stop_string"
        return "length" if len(output) >= self.max_new_tokens else None


class RequestState:
    """One prompt, its emitted tokens, its token tree and its counters.

    Attributes:
        tree: the token tree; its root is the last committed token.
        output: emitted tokens.
        output_origins: index of the source that proposed each output token, or ``TARGET_ORIGIN``.
        emitted_s: time of each output token, in seconds of the run's clock.
        finish_reason: "eos", "stop_string", "length" or "cancelled"; None while unfinished.
        prefill_sent: number of prompt tokens submitted to the target so far.
        max_cached: number of KV entries (prompt, output, tree) that each target cache reserves.
        last_kind: kind of the last commit; None before the first.
    """

    def __init__(
        self,
        *,
        request_id: int,
        prompt: IntArray,
        stop: StopRules,
        sampling: SamplingParams,
        arrival_s: float = 0.0,
    ) -> None:
        """Creates a request that arrives at clock time ``arrival_s``. Its tree has only the root,
        the last token of ``prompt``, int64[T >= 1]; ``request_id`` keys its random numbers.
        """
        if not len(prompt):
            raise ValueError(
                f"prompt {request_id} has no tokens; pass at least one (e.g. the model's BOS token)"
            )
        self.id, self.num_prompt = request_id, len(prompt)
        self.stop, self.sampling = stop, sampling
        self.arrival_s, self.admitted_s = arrival_s, 0.0
        self.emitted_s: list[float] = []
        self.output: list[int] = []
        self.output_origins: list[int] = []
        self.finish_reason: str | None = None
        self.prefill_sent = 0
        self.max_cached = self.num_prompt + stop.max_new_tokens
        self.last_kind: CommitKind | None = None
        self.counters = RequestCounters()
        room = np.zeros(stop.max_new_tokens + 1, np.int64)
        self._tokens = np.concatenate([np.asarray(prompt, np.int64), room])
        self._num_tokens = len(prompt)
        self.tree = TokenTree(token=int(prompt[-1]), position=len(prompt) - 1)

    @property
    def tokens(self) -> IntArray:
        """int64[T]: prompt and emitted tokens; the last one is the root."""
        return self._tokens[: self._num_tokens]

    @property
    def prefix_len(self) -> int:
        """Number of committed tokens before the root, which is the root's position."""
        return self._num_tokens - 1

    @property
    def num_prefill(self) -> int:
        """Number of prompt tokens to prefill: all but the last, the first tree's root."""
        return self.num_prompt - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def awaiting(self) -> bool:
        """Whether the target has not yet answered all submitted nodes of the tree."""
        return bool(((self.tree.submitted_at >= 0) & ~self.tree.answered).any())

    @property
    def num_cached_tokens(self) -> int:
        """Number of KV entries on the target's first stage: prefix tokens and submitted nodes."""
        prefix = self.prefill_sent if not self.output else self.prefix_len
        return prefix + int(np.count_nonzero(self.tree.submitted_at >= 0))

    def path_tokens(self, slot: int) -> IntArray:
        """Returns int64[T + depth]: committed tokens, then the path below the root to ``slot``."""
        return np.concatenate([self.tokens, self.tree.tokens[self.tree.path(slot)[1:]]])

    def emit(self, token: int, origin: int, at_s: float) -> None:
        """Appends a token decided at time ``at_s``; sets ``finish_reason`` if it is the last."""
        self._tokens[self._num_tokens] = token
        self._num_tokens += 1
        self.output.append(token)
        self.output_origins.append(origin)
        self.emitted_s.append(at_s)
        self.finish_reason = self.stop.reason(self.output)

    def cancel(self) -> None:
        if not self.finished:
            self.finish_reason = "cancelled"


@dataclass(slots=True)
class Load:
    request_steps: int = 0
    kv_token_steps: int = 0
    kv_peak_tokens: int = 0

    def count(self, requests: Collection[RequestState]) -> None:
        num_tokens = sum([request.num_cached_tokens for request in requests])
        self.request_steps += len(requests)
        self.kv_token_steps += num_tokens
        self.kv_peak_tokens = max(self.kv_peak_tokens, num_tokens)


class DecodeState:
    """The live requests of a run, with the run's step counter, random numbers, clock and meter.

    Attributes:
        turn: ids of the requests whose nodes may be submitted in this step; None: all. The
            scheduler sets it.
        first_alone: when a request's first answer arrives, drop the tree below the last prompt
            token, so that the first emitted token passes through the stages alone.
        label: the strategy's parts, for errors (source=... policy=...).
        warm_up: whether this is the warm-up run, which is excluded from all metrics.
    """

    def __init__(
        self,
        *,
        draws: KeyedDraws,
        clock: Clock,
        meter: Meter,
        first_alone: bool = False,
        label: str = "this strategy",
    ) -> None:
        self.first_alone = first_alone
        self.label = label
        self.requests: dict[int, RequestState] = {}
        self.turn: frozenset[int] | None = None
        self.load = Load()
        self.step = self._idle_steps = 0
        self.warm_up = False
        self.draws, self.clock, self.meter = draws, clock, meter

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Counts all work of this process inside the block as draft work, also that of layers and
        heads of the target (early exits, Medusa).
        """
        self.clock.drafting = self.meter.drafting = True
        try:
            yield
        finally:
            self.clock.drafting = self.meter.drafting = False

    def mark_submitted(self, nodes: Nodes) -> None:
        """Records the step in which nodes are submitted; called by the scheduler."""
        for request_id, ids in nodes.items:
            request = self.requests[request_id]
            slots = request.tree.live_slots(ids)
            request.tree.submitted_at[slots] = self.step
            request.counters.proposed += len(slots) - (0 in slots.tolist())

    def copy(self, nodes: Nodes) -> DecodeState:
        state = DecodeState(draws=self.draws, clock=self.clock, meter=self.meter)
        state.step, state.turn, state.warm_up = self.step, self.turn, self.warm_up
        for request_id, _ in nodes.items:
            state.requests[request_id] = request = copy(self.requests[request_id])
            request.tree = request.tree.copy()
        return state

    def set_candidates(self, nodes: Nodes, candidates: Candidates) -> None:
        for request_id, ids, rows in nodes.packed():
            if (request := self.requests.get(request_id)) is None:
                continue
            tree, slots = request.tree, request.tree.slots(ids)
            live = np.flatnonzero(slots >= 0)
            if len(live):
                part = candidates.take(rows.start + live)
                tree.set_candidates(slots[live], part, slice(None))
                tree.drop_known_children(slots[live])

    def receive(self, output: Output) -> list[RequestState]:
        """Stores answers and early hidden states of open requests and live nodes; returns the
        requests whose root is answered.
        """
        for answers in output.answers:
            if (request := self.requests.get(answers.request)) is not None:
                request.tree.set_answers(answers)
        for early in output.early:
            if (request := self.requests.get(early.request)) is not None:
                request.tree.set_hidden(early.node_ids, early.hidden)
        return [request for request in self.requests.values() if request.tree.answered[0]]

    def commit(self, verdicts: Sequence[Verdict]) -> list[Commit]:
        """Emits the verdicts' tokens, moves the roots and ends the step; returns a commit per
        verdict. Raises UserError after 10,000 consecutive steps without a verdict or prefill.
        """
        live = self.requests.values()
        if len(verdicts) < len(live):
            answered = {verdict.request for verdict in verdicts}
            for request in live:
                if request.id not in answered:
                    _count_idle(request)
        busy = bool(verdicts) or any(r.prefill_sent < r.num_prefill for r in live)
        self._idle_steps = 0 if busy or not live else self._idle_steps + 1
        if self._idle_steps > _MAX_IDLE_STEPS:
            raise UserError(
                f"no answer in {_MAX_IDLE_STEPS} steps of {self.label}: the policy submits no"
                f" nodes of requests {sorted(self.requests)}, or the executor drops submitted"
                " nodes; correct that part"
            )
        now = self.clock.now()
        commits = [self._commit_one(self.requests[v.request], v, now) for v in verdicts]
        self.step += 1
        return commits

    def _commit_one(self, request: RequestState, verdict: Verdict, now: float) -> Commit:
        tree = request.tree
        depth = len(verdict.accepted_ids)
        retired = _ROOT
        if depth:
            retired = np.concatenate([_ROOT, tree.live_slots(verdict.accepted_ids)])
        last = int(retired[-1])
        child = tree.child(last, verdict.next_token)
        assert False not in tree.answered.take(retired), (
            f"a node of request {request.id} has no answer"
        )
        retired_ids, retired_tokens = tree.ids[retired], tree.tokens[retired]
        next_position = int(tree.positions[last]) + 1
        hidden = tree.hidden_rows(retired_ids)
        num_examined = int(np.count_nonzero(tree.submitted_at >= 0)) - len(retired)
        request.counters.count_answer(depth, verdict.num_verified, hit=child != NO_NODE)

        tokens = [*retired_tokens[1:].tolist(), verdict.next_token]
        next_origin = TARGET_ORIGIN if child == NO_NODE else int(tree.origins[child])
        origins = [*(tree.origins.take(retired[1:]).tolist() if depth else ()), next_origin]
        for token, origin in zip(tokens, origins, strict=True):
            if request.finished:
                request.counters.cut_tokens += 1
            else:
                request.emit(token, origin, now)

        if child != NO_NODE and not (self.first_alone and request.last_kind is None):
            kind = CommitKind.HIT
            tree.reroot(child)
        else:
            kind = CommitKind.MISS
            tree.reset(token=verdict.next_token, position=next_position)
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
            num_examined=num_examined,
            finished=request.finished,
            hidden=hidden,
        )


def _count_idle(request: RequestState) -> None:
    counters = request.counters
    if request.prefill_sent < request.num_prefill or not request.awaiting:
        return
    counters.fill_steps += request.last_kind is None
    counters.flush_steps += request.last_kind is CommitKind.MISS
    counters.refill_steps += request.last_kind is CommitKind.HIT


def batch_of(state: DecodeState, nodes: Nodes) -> Batch:
    """Returns a target batch whose rows are the given nodes, without prefill chunks."""
    trees = []
    for request_id, ids in nodes.items:
        request = state.requests[request_id]
        trees.append(tree_rows(request, request.tree.slots(ids)))
    return Batch(step=state.step, trees=tuple(trees), warm_up=state.warm_up)


def tree_rows(request: RequestState, slots: IntArray) -> TreeRows:
    """Returns nodes of a request's tree (``slots`` int64[W]) as rows of a target batch."""
    return TreeRows(
        request=request.id,
        prefix_len=request.prefix_len,
        tokens=request.tree.tokens[slots],
        paths=request.tree.paths(slots),
    )
