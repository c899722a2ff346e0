"""Pairs without models that replay a recorded run (``model=replay``).

A record has, for every position of every prompt, the draft's probabilities and the rank of the
target's token. Strategies do not depend on the tokens themselves, so these are made up: hidden
sequences of the recorded lengths. A node on the target's path gets the recorded candidates of its
position, with the target's token at its recorded rank. The record has no candidates after a wrong
token; such a node gets those of another position of the same prompt, drawn by keyed hash. This is
an approximation wherever wrong nodes compete for the budget.

Shape letters: P recorded positions of all requests, K candidates, n given positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from specdec.errors import UserError
from specdec.models.bundled import record_path
from specdec.pairs.record import (
    Record,
    RecordedRequest,
    TracedRequest,
    read_record,
    read_traces,
)
from specdec.pairs.synthetic import DRAFT_MODEL, SYNTHETIC, HiddenModels
from specdec.parts.fields import Count, Index, Text, validated
from specdec.sources.hashing import hash_u64
from specdec.types import FloatArray, IntArray

END = 0
"""Last token of every hidden sequence; it occurs nowhere else."""

_MIN_VOCAB = 4096  # so that all candidates of a node differ
_TOKEN, _POSITION, _NODE, _NODE_POSITION = range(4)  # streams of the keyed hash

_NO_SOURCE = "specdec.sources.NullSource"


class HiddenSequences:
    """Made-up target sequences of given lengths, each ending in ``END``."""

    def __init__(self, *, requests: Sequence[RecordedRequest | TracedRequest], seed: int) -> None:
        """Takes ids and lengths.

        Args:
            requests: ids and lengths.
            seed: of tokens and of the draws of wrong nodes.
        """
        self.vocab_size = _MIN_VOCAB
        self.seed = seed
        self._requests = {request.id: request for request in requests}

    def request(self, request_id: int) -> RecordedRequest | TracedRequest:
        """The recorded request.

        Raises:
            UserError: the record has no such prompt.
        """
        if request_id not in self._requests:
            raise UserError(
                f"the record has no prompt {request_id}; model=replay decodes recorded prompts only"
            )
        return self._requests[request_id]

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: tokens of the hidden sequence at absolute positions."""
        request = self.request(request_id)
        drawn = hash_u64(self.seed, _TOKEN, request_id, positions) % np.uint64(self.vocab_size - 1)
        last = request.num_prompt + request.num_output - 1
        return np.where(positions == last, END, drawn.astype(np.int64) + 1)

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """None: ranks do not depend on the root."""
        return None

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: class of the draft's candidates after each position."""
        raise NotImplementedError

    def wrong_classes(self, request_id: int, positions: IntArray, tokens: IntArray) -> IntArray:
        """int64[n]: class of the draft's candidates after wrong nodes."""
        return self.classes(request_id, positions)

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """(first token, class) int64[n] each after wrong nodes."""
        drawn = hash_u64(self.seed, _NODE, request_id, positions, tokens)
        first = (drawn % np.uint64(self.vocab_size)).astype(np.int64)
        return first, self.wrong_classes(request_id, positions, tokens)

    def prompts(self) -> list[tuple[int, IntArray]]:
        """(id, int64[T]) of every recorded prompt, in the order of the record."""
        return [
            (i, self.tokens(i, np.arange(request.num_prompt)))
            for i, request in self._requests.items()
        ]


class RecordedPair(HiddenSequences):
    """A recorded draft; classes are the recorded positions.

    Attributes:
        class_logprobs: float64[P, K].
    """

    def __init__(self, *, record: Record, seed: int = 0) -> None:
        """Concatenates the requests of ``record``."""
        super().__init__(requests=record.requests, seed=seed)
        self.class_logprobs: FloatArray = np.concatenate(
            [request.logprobs for request in record.requests]
        ).astype(np.float64)
        self._ranks = np.concatenate([request.ranks for request in record.requests])
        stops = np.cumsum([request.num_output for request in record.requests])
        self._first = {
            request.id: int(stop) - request.num_output
            for request, stop in zip(record.requests, stops, strict=True)
        }

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: the recorded position; beyond the record a drawn one."""
        request = self.request(request_id)
        entry = positions - (request.num_prompt - 1)
        drawn = self._drawn(request, hash_u64(self.seed, _POSITION, request_id, positions))
        inside = (entry >= 0) & (entry < request.num_output)
        return np.where(inside, self._first[request_id] + entry, drawn)

    def ranks(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: the recorded rank of the token after each position."""
        return self._ranks[self.classes(request_id, positions)]

    def wrong_classes(self, request_id: int, positions: IntArray, tokens: IntArray) -> IntArray:
        """int64[n]: drawn positions of the prompt."""
        drawn = hash_u64(self.seed, _NODE_POSITION, request_id, positions, tokens)
        return self._drawn(self.request(request_id), drawn)

    def _drawn(self, request: RecordedRequest | TracedRequest, drawn: np.ndarray) -> IntArray:
        entry = (drawn % np.uint64(request.num_output)).astype(np.int64)
        return self._first[request.id] + entry


class TracedPair(HiddenSequences):
    """A draft of known accepted lengths: its chain is right for as many tokens as recorded.

    Attributes:
        class_logprobs: float64[1, 1], the log share of positions with an accepted token.
    """

    def __init__(self, *, requests: Sequence[TracedRequest], seed: int = 0) -> None:
        """Takes the lengths of each request."""
        super().__init__(requests=requests, seed=seed)
        share = np.mean(np.concatenate([request.emitted for request in requests]) > 1)
        self.class_logprobs: FloatArray = np.log(np.clip(share, 1e-3, 1.0)).reshape(1, 1)
        self._emitted = {request.id: request.emitted for request in requests}

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: all 0."""
        return np.zeros(len(positions), np.int64)

    ranks = classes  # unused, since ``reach`` is given

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """int64[n]: accepted tokens of a chain with its root there; 0 beyond the trace."""
        emitted = self._emitted[request_id]
        entry = positions - (self.request(request_id).num_prompt - 1)
        inside = (entry >= 0) & (entry < len(emitted))
        return np.where(inside, emitted[np.clip(entry, 0, len(emitted) - 1)] - 1, 0)


class ReplayModels(HiddenModels):
    """Plays a record: hidden sequences of recorded lengths and the recorded draft."""

    option = "replay"
    eos_ids = frozenset({END})

    @property
    def chain_only(self) -> bool:
        """Whether the record has accepted lengths of chains only."""
        return isinstance(self.hidden, TracedPair)

    def prompts(self) -> list[tuple[int, IntArray]]:
        """(id, int64[T]) of every recorded prompt; the tokens are made up."""
        return cast("HiddenSequences", self.hidden).prompts()

    def conditions(self) -> dict[str, Any]:
        """Conditions of the recorded run, and a note on the approximation."""
        known = {k: self.about.get(k) for k in ("data", "sampling", "dtype")}
        of = ("model", "strategy", "seed", "max_new_tokens", "traces", "method")
        record = {k: self.about[k] for k in of if self.about.get(k) is not None}
        note = (
            "replayed accepted lengths of chains"
            if self.chain_only
            else "replayed; nodes off the target's path draw a recorded position of their prompt"
            " (approximation)"
        )
        return {**known, "replay": note, "record": record}

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> dict[str, Any]:
        """The source node with the recorded draft in place of a draft model.

        Raises:
            UserError: a source that cannot be replayed, or a policy that needs more of the draft
                than the record has.
        """
        target, reason = source.get("_target_"), ""
        if target == _NO_SOURCE:
            return dict(source)
        if target not in (DRAFT_MODEL, SYNTHETIC):
            reason = f"{target} proposes from tokens, which a record does not contain"
        elif source.get("guess_draw"):
            reason = "source.guess_draw=true needs the target's draws and the draft's distribution"
        if reason:
            raise UserError(
                f"model=replay replays a recorded draft: {reason}; use source=draft_model"
            )
        kind = str(policy.get("_target_"))
        if self.chain_only and not kind.endswith((".Chain", ".RootOnly")):
            raise UserError(
                f"the record is a trace of accepted lengths without a tree's other branches:"
                f" {kind} cannot be replayed from it; use policy=chain, or a record.npz"
            )
        return {"_target_": SYNTHETIC}


@validated
def build_replay(
    *, record: Text, method: Text | None = None, num_layers: Count = 80, seed: Index = 0
) -> ReplayModels:
    """The models of a recorded run.

    Args:
        record: a ``record.npz``, ``bundled:NAME``, or a ``.jsonl`` (``.jsonl.gz``) of acceptance
            lengths.
        method: which of a trace's methods; None for a trace of one method, and for records.
        num_layers: of the target; the largest possible number of stages.
        seed: of the draws of wrong nodes.

    Raises:
        UserError: a file that cannot be used.
    """
    if record.endswith((".jsonl", ".jsonl.gz")):
        traced = read_traces(record, method)
        about = {"traces": record, "method": method}
        pair = TracedPair(requests=traced, seed=seed)
        return ReplayModels(pair=pair, num_layers=num_layers, about=about)
    if method is not None:
        raise UserError(
            f"model.method={method} chooses a method of an acceptance trace (.jsonl), but"
            f" model.record={record} is a record: use model.method=null"
        )
    recorded = read_record(record_path(record))
    return ReplayModels(
        pair=RecordedPair(record=recorded, seed=seed),
        num_layers=num_layers,
        weight_bytes=recorded.weight_bytes,
        about=recorded.about,
    )
