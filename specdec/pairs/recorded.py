"""Pairs whose target tokens are given: by an acceptance model, a record or a text.

A record (``model=replay``) has, for every position of every prompt, the draft's probabilities and
the rank of the target's token. Strategies do not depend on the tokens themselves, so these are made
up. A node on the target's path gets the recorded candidates of its position, with the target's
token at its recorded rank. A node off the path gets the candidates of a random position of the same
prompt, which is an approximation if such nodes compete for places in the tree.

Shape letters: P recorded positions of all requests, K candidates, n given positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors.models import ModelPair
from specdec.executors.stage import Answerer, Stage
from specdec.models.bundled import record_path
from specdec.pairs.options import with_flat_options
from specdec.pairs.record import Record, RecordedRequest, read_record, read_traces
from specdec.parts.fields import Count, Index, Share, Text, validated
from specdec.sampling.keyed_draws import KeyedDraws
from specdec.sources.hashing import hash_u64
from specdec.sources.synthetic import HiddenPair, SyntheticPair
from specdec.types import Answers, Batch, BoolArray, FloatArray, HiddenName, IntArray

DRAFT_MODEL = "specdec.sources.DraftModelSource"
SYNTHETIC = "specdec.sources.SyntheticSource"

END = 0  # last token of every hidden sequence; it occurs nowhere else
_MIN_VOCAB = 4096  # so that all candidates of a node differ
_TOKEN, _POSITION, _NODE, _NODE_POSITION = range(4)  # streams of the keyed hash

_NO_SOURCE = "specdec.sources.NullSource"
_CHAINS = (".Chain", ".RootOnly")  # policies without branches


class RecordedPair(ModelPair):
    """A pair whose target is a given token sequence per request, so no target model is run.

    ``hidden`` has these sequences and the draft's ranks of their tokens, random or recorded.
    ``SyntheticSource`` proposes from the ranks; other sources that need a draft are refused.
    ``hidden_middle`` has the ranks of a middle model; None without one.
    """

    is_synthetic = True
    option = "synthetic"
    dtype = "float32"
    hidden_middle: HiddenPair | None = None

    def __init__(
        self,
        hidden: HiddenPair,
        *,
        num_layers: int = 80,
        weight_bytes: tuple[int, int] = (0, 0),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.hidden, self.vocab_size = hidden, hidden.vocab_size
        self.num_layers = num_layers
        self.weight_bytes = dict(zip(("target", "draft"), weight_bytes, strict=True))
        self.about = dict(about or {})

    def sequences(self, model: str) -> HiddenPair:
        if model != "middle":
            return self.hidden
        if self.hidden_middle is None:
            raise UserError(
                "this strategy needs a middle model; its chances in model=synthetic are"
                " model.middle_top1: give one per class of positions"
            )
        return self.hidden_middle

    def stage(
        self, first: int, last: int, meter: Meter, *, capture: Sequence[HiddenName] = ()
    ) -> Stage:
        return Stage()

    def answerer(self, *, draws: KeyedDraws, needs_probs: bool) -> Answerer:
        if needs_probs:
            raise UserError(
                f"model={self.option} has target tokens but no target distributions; use"
                " verifier=match"
            )
        return SyntheticAnswerer(self.hidden)

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> Any:
        if isinstance(source, list):
            return [self.fitted_source(item, policy) for item in source]
        if not isinstance(source, Mapping):
            return source
        if source.get("_target_") == DRAFT_MODEL:
            return {"_target_": SYNTHETIC, "model": source.get("model", "draft")}
        return {key: self.fitted_source(value, policy) for key, value in source.items()}


class SyntheticModels(RecordedPair):
    @validated
    def __init__(
        self,
        *,
        law: SyntheticPair = SyntheticPair(),  # noqa: B008 - nothing changes it
        num_layers: Count = 80,
        middle_top1: Sequence[Share] = (),
        covers: Literal["chain", "tree"] = "chain",
        draft_name: Text | None = None,
        origin: Text = "assumed",
        requests: Index = 0,
    ) -> None:
        """Takes the keys of ``model=synthetic``, in which the fields of ``law`` are separate keys.

        Args:
            law: the acceptance model: tokens of the target, and the draft's ranks of them.
            num_layers: layers of the target, the largest possible number of stages.
            middle_top1: per class, a middle model's chance of a right first candidate. If larger,
                it is right wherever the draft is; if both are wrong, they agree. Empty: none.
            covers: "chain" if ``law`` describes acceptance of a chain's tokens, "tree" if it
                describes whether any node of a measured tree was accepted.
            draft_name: the measured draft, whose time the latency profile must have.
            origin: origin of the values, for result files.
            requests: number of requests that the values were fitted to, for the confidence
                intervals of a plan; 0: not known.
        """
        about = {"law": origin, "draft": draft_name, "requests": requests or None}
        super().__init__(law, num_layers=num_layers, about=about)
        self._covers = covers
        self.hidden_middle = replace(law, top1=middle_top1) if middle_top1 else None

    def fitted_source(self, source: Any, policy: Mapping[str, Any]) -> Any:
        kind = str(policy.get("_target_"))
        if self._covers == "tree" and not kind.endswith(_CHAINS):
            raise UserError(
                f"model=synthetic has model.covers=tree: its chances say how often a whole tree"
                f" of its draft had the right token, so {kind} cannot grow another from it; use"
                " policy=chain with policy.gamma as deep as that tree"
            )
        return super().fitted_source(source, policy)


build_synthetic = with_flat_options(SyntheticModels, "law")


class SyntheticAnswerer(Answerer):
    def __init__(self, hidden: HiddenPair) -> None:
        self._hidden = hidden

    def answer(self, batch: Batch, logits: torch.Tensor | None) -> tuple[Answers, ...]:
        """Returns the given token after the position of every row, also of rows off the target's
        path, whose answers no verifier reads.
        """
        return tuple(
            Answers(
                request=rows.request,
                node_ids=rows.node_ids,
                tokens=self._hidden.tokens(rows.request, rows.positions + 1),
            )
            for rows in batch.trees
        )


class RecordedSequences(HiddenPair):
    """Made-up target sequences of recorded lengths, ending in ``END``, and recorded draft ranks.

    Each recorded position is a class of its own (see ``HiddenPair``).

    Attributes:
        class_logprobs: float64[P, K], log probabilities of each position's candidates, decreasing.
    """

    def __init__(self, *, record: Record, seed: int = 0) -> None:
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
        return any(request.reach is not None for request in self._requests.values())

    def request(self, request_id: int) -> RecordedRequest:
        if request_id not in self._requests:
            raise UserError(
                f"the record has no prompt {request_id}; model=replay decodes recorded prompts only"
            )
        return self._requests[request_id]

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        request = self.request(request_id)
        drawn = hash_u64(self.seed, _TOKEN, request_id, positions) % np.uint64(self.vocab_size - 1)
        last = request.num_prompt + request.num_output - 1
        return np.where(positions == last, END, drawn.astype(np.int64) + 1)

    def _entries(self, request_id: int, positions: IntArray) -> tuple[IntArray, BoolArray]:
        request = self.request(request_id)
        entry = positions - (request.num_prompt - 1)
        return entry, (entry >= 0) & (entry < request.num_output)

    def classes(self, request_id: int, positions: IntArray) -> IntArray:
        entry, inside = self._entries(request_id, positions)
        drawn = self._drawn(request_id, hash_u64(self.seed, _POSITION, request_id, positions))
        return np.where(inside, self._first[request_id] + entry, drawn)

    def ranks(self, request_id: int, positions: IntArray, depth: int = 0) -> IntArray:
        return self._ranks[self.classes(request_id, positions)]

    def reach(self, request_id: int, positions: IntArray) -> IntArray | None:
        """Returns int64[n]: accepted tokens of a chain rooted at each position; 0 past the trace.

        Returns None for a record, whose ranks do not depend on the root.
        """
        reach = self.request(request_id).reach
        if reach is None:
            return None
        entry, inside = self._entries(request_id, positions)
        return np.where(inside, reach[np.clip(entry, 0, len(reach) - 1)], 0)

    def node_keys(
        self, request_id: int, positions: IntArray, tokens: IntArray
    ) -> tuple[IntArray, IntArray]:
        streams = np.array([[_NODE], [_NODE_POSITION]])
        first, drawn = hash_u64(self.seed, streams, request_id, positions, tokens)
        classes = self._drawn(request_id, drawn)
        return (first % np.uint64(self.vocab_size)).astype(np.int64), classes

    def prompts(self) -> list[tuple[int, IntArray]]:
        return [
            (i, self.tokens(i, np.arange(request.num_prompt)))
            for i, request in self._requests.items()
        ]

    def _drawn(self, request_id: int, drawn: np.ndarray) -> IntArray:
        num_output = np.uint64(self.request(request_id).num_output)
        return self._first[request_id] + (drawn % num_output).astype(np.int64)


class ReplayModels(RecordedPair):
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
        target = source.get("_target_")
        if target == _NO_SOURCE:
            return dict(source)
        reason = f"{target} proposes from tokens, which a record does not contain"
        if target in (DRAFT_MODEL, SYNTHETIC):
            reason = "source.guess_draw=true needs the target's draws and the draft's distribution"
        if target not in (DRAFT_MODEL, SYNTHETIC) or source.get("guess_draw"):
            raise UserError(
                f"model=replay replays a recorded draft: {reason}; use source=draft_model"
            )
        kind = str(policy.get("_target_"))
        if self.hidden.chain_only and not kind.endswith(_CHAINS):
            raise UserError(
                f"the record is a trace of accepted lengths without a tree's other branches:"
                f" {kind} cannot be replayed from it; use policy=chain, or a record.npz"
            )
        return {"_target_": SYNTHETIC}


@validated
def build_replay(
    *, record: Text, method: Text | None = None, num_layers: Count = 80, seed: Index = 0
) -> ReplayModels:
    """Builds the pair that replays a recorded run or an acceptance trace.

    Args:
        record: a ``record.npz``, ``bundled:NAME``, or a ``.jsonl`` (``.jsonl.gz``) of acceptance
            lengths.
        method: which method of the trace to replay, if it has several.
        num_layers: layers of the target, the largest possible number of stages.
        seed: seed of the made-up tokens and of the random choices for nodes off the path.
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
