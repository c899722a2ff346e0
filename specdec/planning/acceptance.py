from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from specdec.errors import UserError
from specdec.fitting import HitLaw, ReadOptions, fit_logs, read_log
from specdec.fitting.tails import RankTail, class_decays
from specdec.models.bundled import record_path
from specdec.pairs import ModelPair, build_pair
from specdec.pairs.record import Record, read_record, read_traces
from specdec.pairs.recorded import RecordedSequences, ReplayModels
from specdec.planning.options import PlanOptions
from specdec.sources.hashing import hash_uniform
from specdec.types import FloatArray

_NOT_WORDS = ("kind", "draft_name", "origin")
_SHIFT = 7  # stream of the hash that changes a record's ranks
_LENGTHS = range(17)  # draft tokens of the chains in ``chain_table``


class Acceptance(Protocol):
    """What is known about which draft tokens the target accepts: a hit law, or the record of a run.

    Attributes:
        told: text that describes it and its origin.
        requests: number of measured requests behind it; 0 if it is assumed or does not say.
        draft_name: a profile must have the time of this draft; None accepts any.
        drawn: whether any number of prompts can be drawn from it.
    """

    @property
    def told(self) -> str: ...

    @property
    def requests(self) -> int: ...

    @property
    def draft_name(self) -> str | None: ...

    @property
    def drawn(self) -> bool: ...

    @property
    def words(self) -> list[str]:
        """Command-line overrides that choose it as the model."""
        ...

    def pair(self) -> ModelPair:
        """Returns models that reproduce it."""
        ...

    def hit_rate(self) -> float:
        """Returns the share of positions whose first candidate is right."""
        ...

    def tokens_per_pass(self, draft_tokens: int) -> float:
        """Returns the expected emitted tokens of a target pass over a chain of draft tokens."""
        ...

    def shifted(self, odds: float) -> Acceptance:
        """Returns a copy with ``odds`` added to the log odds that the first candidate is right."""
        ...


@dataclass(frozen=True, slots=True)
class OfLaw:
    """A hit law; ``section`` has the keys of ``model=synthetic``."""

    section: Mapping[str, Any]
    told: str
    requests: int = 0
    draft_name: str | None = None
    drawn: bool = True

    @staticmethod
    def of(section: Mapping[str, Any], told: str = "") -> OfLaw:
        return OfLaw(
            section={"kind": "synthetic", **section},
            told=told or f"law of {section.get('origin', 'assumed')}",
            requests=int(section.get("requests", 0)),
            draft_name=section.get("draft_name"),
        )

    @property
    def words(self) -> list[str]:
        """Leaves out the draft's name, since its time has been looked up before."""
        keys = {k: v for k, v in self.section.items() if k not in _NOT_WORDS}
        return ["model=synthetic", *(f"model.{k}={json.dumps(v)}" for k, v in keys.items())]

    def pair(self) -> ModelPair:
        return build_pair({**self.section, "draft_name": None})

    @property
    def law(self) -> HitLaw:
        """The law with its weights normalised."""
        section = self.section
        rows = np.asarray(section.get("group_weights") or [section["weights"]], float)
        shares = np.asarray(section.get("group_shares") or [1.0], float)
        return HitLaw(
            group_shares=shares / shares.sum(),
            weights=rows / rows.sum(axis=1, keepdims=True),
            stay=np.asarray(section.get("stay") or [0.0] * rows.shape[1], float),
            top1=np.asarray(section["top1"], float),
            depth=np.asarray(section.get("depth") or [0.0], float),
        )

    def hit_rate(self) -> float:
        return self.law.hit_rate()

    def tokens_per_pass(self, draft_tokens: int) -> float:
        return self.law.tokens_per_pass(draft_tokens)

    def shifted(self, odds: float) -> OfLaw:
        """Changes all classes alike; the ranks below the first keep their distribution."""
        top1 = _sigmoid(_odds(np.asarray(self.section["top1"], float)) + odds)
        tails = zip(top1, self.section["decay"], self.section["miss"], strict=True)
        decay = [
            float(class_decays(np.array([rate]), RankTail(decay=at, miss=miss))[0])
            for rate, at, miss in tails
        ]
        return replace(self, section={**self.section, "top1": top1.tolist(), "decay": decay})


@dataclass(frozen=True, slots=True)
class OfRecord:
    """A recorded run, or a trace of accepted lengths.

    ``path`` and ``method`` say where it is; ``num_layers`` is that of the target.
    """

    record: Record
    path: str
    method: str | None
    told: str
    requests: int
    num_layers: int = 80
    draft_name: str | None = None
    drawn: bool = False

    @staticmethod
    def of(path: str, method: str | None = None, num_layers: int = 80) -> OfRecord:
        """Reads a record, or a trace if the file is JSON lines."""
        if path.endswith((".jsonl", ".jsonl.gz")):
            record = read_traces(path, method)
        else:
            record = read_record(record_path(path))
        return OfRecord(
            record=record,
            path=path,
            method=method,
            told=f"record of {len(record.requests)} prompts",
            requests=len(record.requests),
            num_layers=num_layers,
        )

    @property
    def words(self) -> list[str]:
        record, method = json.dumps(self.path), json.dumps(self.method)
        layers = f"model.num_layers={self.num_layers}"
        return ["model=replay", f"model.record={record}", f"model.method={method}", layers]

    def pair(self) -> ModelPair:
        return ReplayModels(
            RecordedSequences(record=self.record),
            num_layers=self.num_layers,
            weight_bytes=self.record.weight_bytes,
            about=self.record.about,
        )

    def hit_rate(self) -> float:
        hits = [r.ranks == 0 if r.reach is None else r.reach > 0 for r in self.record.requests]
        return float(np.concatenate(hits).mean())

    def mean_context(self) -> int:
        """Returns the mean number of tokens before a decoded one."""
        each = [r.num_prompt + r.num_output / 2 for r in self.record.requests]
        return max(1, round(float(np.mean(each))))

    def tokens_per_pass(self, draft_tokens: int) -> float:
        tokens = passes = 0
        for request in self.record.requests:
            if request.reach is None:
                reach = _runs(request.ranks == 0)
            else:
                reach = np.asarray(request.reach)
            at = 0
            while at < len(reach):
                at += min(int(reach[at]), draft_tokens) + 1
                passes += 1
            tokens += len(reach)
        return tokens / passes

    def shifted(self, odds: float) -> OfRecord:
        """Sets the ranks of positions, drawn by a keyed hash, to 0 (right) or 1 (wrong).

        Raises:
            UserError: it is a trace, which has no ranks.
        """
        before = self.hit_rate()
        after = float(_sigmoid(_odds(np.array([before])) + odds)[0])
        changed = []
        for request in self.record.requests:
            if request.reach is not None:
                raise UserError("a trace of accepted lengths has no ranks to change")
            drawn = hash_uniform(_SHIFT, request.id, np.arange(len(request.ranks)))
            ranks = request.ranks.copy()
            if after > before:
                ranks[(ranks > 0) & (drawn < (after - before) / max(1.0 - before, 1e-9))] = 0
            else:
                ranks[(ranks == 0) & (drawn < (before - after) / max(before, 1e-9))] = 1
            changed.append(replace(request, ranks=ranks))
        return replace(self, record=replace(self.record, requests=tuple(changed)))


def of_log(chosen: PlanOptions) -> OfLaw:
    assert chosen.acceptance is not None
    options = ReadOptions(method=chosen.method, draft_tokens=chosen.draft_tokens)
    fitted = fit_logs([read_log(chosen.acceptance, options)])
    if fitted.covers_tree:
        raise UserError(f"acceptance={chosen.acceptance} is of trees: a plan needs chains")
    known = fitted.requests if fitted.requests > 1 else 0  # a single one is a summary of many
    section = {**fitted.model_option(), "requests": known}
    return OfLaw.of(section, f"law fitted to {fitted.requests} requests of {chosen.acceptance}")


def of_model(section: Mapping[str, Any]) -> Acceptance | None:
    """Returns the acceptance that a section ``model`` defines; None if models must decode first."""
    if section.get("kind") == "synthetic":
        return OfLaw.of(section)
    if section.get("kind") == "replay":
        layers = int(section.get("num_layers", 80))
        return OfRecord.of(str(section["record"]), section.get("method"), layers)
    return None


def chain_table(acceptance: Acceptance, lengths: range = _LENGTHS) -> FloatArray:
    """Returns float64[len(lengths)], the tokens per pass of chains of 0, 1, ... draft tokens."""
    return np.array([acceptance.tokens_per_pass(k) if k else 1.0 for k in lengths])


def _runs(hits: np.ndarray) -> np.ndarray:
    """Returns int64[T], the number of right positions in a row from each position."""
    reach = np.zeros(len(hits) + 1, np.int64)
    for at in range(len(hits) - 1, -1, -1):
        reach[at] = reach[at + 1] + 1 if hits[at] else 0
    return reach[:-1]


def _odds(share: np.ndarray) -> np.ndarray:
    kept = np.clip(share, 1e-9, 1.0 - 1e-9)
    return np.log(kept) - np.log1p(-kept)


def _sigmoid(odds: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1.0 / (1.0 + np.exp(-odds))
    return result
