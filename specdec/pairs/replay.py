"""Pairs without models that replay a recorded run (``model=replay``).

A record has, for every position of every prompt, the draft's probabilities and the rank of the
target's token. Strategies do not depend on the tokens themselves, so these are made up: hidden
sequences of the recorded lengths. A node on the target's path gets the recorded candidates of its
position, with the target's token at its recorded rank. A node off the path gets those of another
position of the same prompt, drawn by keyed hash, because the record has no candidates after a wrong
token. This is an approximation if nodes off the path compete for the budget.

Shape letters: P recorded positions of all requests, K candidates, n given positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.models.bundled import record_path
from specdec.pairs.record import Record, RecordedRequest, read_record, read_traces
from specdec.pairs.recorded import DRAFT_MODEL, SYNTHETIC, RecordedPair
from specdec.parts.fields import Count, Index, Text, validated
from specdec.sources.hashing import hash_u64
from specdec.types import FloatArray, IntArray

END = 0
"""Last token of every hidden sequence; it occurs nowhere else."""

_MIN_VOCAB = 4096  # so that all candidates of a node differ
_TOKEN, _POSITION, _NODE, _NODE_POSITION = range(4)  # streams of the keyed hash

_NO_SOURCE = "specdec.sources.NullSource"


class RecordedSequences:
    """Made-up target sequences of recorded lengths, each ending in ``END``, and a recorded draft.

    It implements ``HiddenPair``; its classes are the recorded positions.

    Attributes:
        class_logprobs: float64[P, K].
    """

    num_depths = 1

    def __init__(self, *, record: Record, seed: int = 0) -> None:
        """Concatenates the requests; ``seed`` is that of tokens and of nodes off the path."""
        requests = record.requests
        self.vocab_size = _MIN_VOCAB
        self.seed = seed
        self._requests = {request.id: request for request in requests}
        self.class_logprobs: FloatArray = np.concatenate([r.logprobs for r in requests]).astype(
            np.float64
        )
        self._ranks = np.concatenate([request.ranks for request in requests])
        stops = np.cumsum([request.num_output for request in requests]).tolist()
        self._first = dict(zip(self._requests, [0, *stops], strict=False))

    @property
    def chain_only(self) -> bool:
        """Whether the record is a trace of accepted lengths of chains."""
        return any(request.reach is not None for request in self._requests.values())

    def request(self, request_id: int) -> RecordedRequest:
        if request_id not in self._requests:
            raise UserError(
                f"the record has no prompt {request_id}; model=replay decodes recorded prompts only"
            )
        return self._requests[request_id]

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        """Returns int64[n]: tokens of the hidden sequence at absolute positions."""
        request = self.request(request_id)
        drawn = hash_u64(self.seed, _TOKEN, request_id, positions) % np.uint64(self.vocab_size - 1)
        last = request.num_prompt + request.num_output - 1
        return np.where(positions == last, END, drawn.astype(np.int64) + 1)

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        """Returns int64[n]: the recorded positions; drawn ones beyond the end of the record."""
        request = self.request(request_id)
        entry = positions - (request.num_prompt - 1)
        drawn = self._drawn(request, hash_u64(self.seed, _POSITION, request_id, positions))
        inside = (entry >= 0) & (entry < request.num_output)
        return np.where(inside, self._first[request_id] + entry, drawn)

    def ranks(self, request_id: int, positions: IntArray, depth: int = 0) -> IntArray:
        """Returns int64[n]: the recorded rank of the token after each position, at every depth."""
        return self._ranks[self.classes(request_id, positions)]

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """Returns int64[n]: accepted tokens of a chain with its root there; 0 beyond the trace.

        Returns None for a record, whose ranks do not depend on the root.
        """
        request = self.request(request_id)
        if request.reach is None:
            return None
        entry = positions - (request.num_prompt - 1)
        inside = (entry >= 0) & (entry < request.num_output)
        return np.where(inside, request.reach[np.clip(entry, 0, request.num_output - 1)], 0)

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Returns (first token, class), int64[n] each, for nodes off the target's path."""
        streams = np.array([[_NODE], [_NODE_POSITION]])
        first, drawn = hash_u64(self.seed, streams, request_id, positions, tokens)
        classes = self._drawn(self.request(request_id), drawn)
        return (first % np.uint64(self.vocab_size)).astype(np.int64), classes

    def prompts(self) -> list[tuple[int, IntArray]]:
        return [
            (i, self.tokens(i, np.arange(request.num_prompt)))
            for i, request in self._requests.items()
        ]

    def _drawn(self, request: RecordedRequest, drawn: np.ndarray) -> IntArray:
        entry = (drawn % np.uint64(request.num_output)).astype(np.int64)
        return self._first[request.id] + entry


class ReplayModels(RecordedPair):
    """The models of ``model=replay``: hidden sequences and a draft of recorded ranks."""

    hidden: RecordedSequences
    option = "replay"
    eos_ids = frozenset({END})

    def prompts(self) -> list[tuple[int, IntArray]]:
        return self.hidden.prompts()

    def conditions(self) -> dict[str, Any]:
        known = {k: self.about.get(k) for k in ("data", "sampling", "dtype")}
        of = ("model", "strategy", "seed", "max_new_tokens", "traces", "method")
        record = {k: self.about[k] for k in of if self.about.get(k) is not None}
        note = (
            "replayed accepted lengths of chains"
            if self.hidden.chain_only
            else "replayed; nodes off the target's path draw a recorded position of their prompt"
            " (approximation)"
        )
        return {**known, "replay": note, "record": record}

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> dict[str, Any]:
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
        if self.hidden.chain_only and not kind.endswith((".Chain", ".RootOnly")):
            raise UserError(
                f"the record is a trace of accepted lengths without a tree's other branches:"
                f" {kind} cannot be replayed from it; use policy=chain, or a record.npz"
            )
        return {"_target_": SYNTHETIC}


@validated
def build_replay(
    *, record: Text, method: Text | None = None, num_layers: Count = 80, seed: Index = 0
) -> ReplayModels:
    """Builds the models of a recorded run.

    Args:
        record: a ``record.npz``, ``bundled:NAME``, or a ``.jsonl`` (``.jsonl.gz``) of acceptance
            lengths.
        method: name of a method in the trace; None for a trace of one method, and for records.
        num_layers: layers of the target, the largest possible number of stages.
        seed: seed of tokens, and of positions for nodes off the target's path.
    """
    if record.endswith((".jsonl", ".jsonl.gz")):
        recorded = read_traces(record, method)
    elif method is not None:
        raise UserError(
            f"model.method={method} chooses a method of an acceptance trace (.jsonl), but"
            f" model.record={record} is a record: use model.method=null"
        )
    else:
        recorded = read_record(record_path(record))
    return ReplayModels(
        RecordedSequences(record=recorded, seed=seed),
        num_layers=num_layers,
        weight_bytes=recorded.weight_bytes,
        about=recorded.about,
    )
