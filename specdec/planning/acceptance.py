"""What is known of a draft's hits: a law, or the record of a run."""

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
from specdec.pairs.replay import RecordedSequences, ReplayModels
from specdec.planning.options import PlanOptions
from specdec.sources.hashing import hash_uniform
from specdec.types import FloatArray

_NOT_WORDS = ("kind", "draft_name", "origin")
_SHIFT = 7  # stream of the hash that changes a record's ranks
_LENGTHS = range(17)  # draft tokens of the chains of tables


class Acceptance(Protocol):
    """What is known of a draft's hits.

    Attributes:
        told: in words, with its origin.
        requests: measured ones that it is from; 0 where it is assumed or says nothing of them.
        draft_name: of the draft; a profile must have its time. None: any.
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
        """Words of the command line that choose it as the model."""
        ...

    def pair(self) -> ModelPair:
        """Models that play it."""
        ...

    def hit_rate(self) -> float:
        """Share of positions whose first candidate is right."""
        ...

    def tokens_per_pass(self, draft_tokens: int) -> float:
        """Expected tokens of a pass over a chain of so many draft tokens."""
        ...

    def shifted(self, odds: float) -> Acceptance:
        """The same with ``odds`` added to the log odds of the first candidate."""
        ...


@dataclass(frozen=True, slots=True)
class OfLaw:
    """A law of ``model=synthetic``.

    Attributes:
        section: the keys of the model.
        told, requests, draft_name, drawn: see ``Acceptance``.
    """

    section: Mapping[str, Any]
    told: str
    requests: int = 0
    draft_name: str | None = None
    drawn: bool = True

    @staticmethod
    def of(section: Mapping[str, Any], told: str = "") -> OfLaw:
        """The law of a section ``model``."""
        return OfLaw(
            section={"kind": "synthetic", **section},
            told=told or f"law of {section.get('origin', 'assumed')}",
            requests=int(section.get("requests", 0)),
            draft_name=section.get("draft_name"),
        )

    @property
    def words(self) -> list[str]:
        """See ``Acceptance``; the draft's name is left out, since its time is looked up before."""
        keys = {k: v for k, v in self.section.items() if k not in _NOT_WORDS}
        return ["model=synthetic", *(f"model.{k}={json.dumps(v)}" for k, v in keys.items())]

    def pair(self) -> ModelPair:
        """See ``Acceptance``."""
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
        """See ``Acceptance``."""
        return self.law.hit_rate()

    def tokens_per_pass(self, draft_tokens: int) -> float:
        """See ``Acceptance``; exact."""
        return self.law.tokens_per_pass(draft_tokens)

    def shifted(self, odds: float) -> OfLaw:
        """See ``Acceptance``; every class by the same, ranks below the first keep their shape."""
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

    Attributes:
        record: what is played.
        path, method: of its file.
        num_layers: of the target.
        told, requests, draft_name, drawn: see ``Acceptance``.
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
        """The record or trace of a file.

        Raises:
            UserError: a file that cannot be used.
        """
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
        """See ``Acceptance``."""
        record, method = json.dumps(self.path), json.dumps(self.method)
        layers = f"model.num_layers={self.num_layers}"
        return ["model=replay", f"model.record={record}", f"model.method={method}", layers]

    def pair(self) -> ModelPair:
        """See ``Acceptance``."""
        return ReplayModels(
            RecordedSequences(record=self.record),
            num_layers=self.num_layers,
            weight_bytes=self.record.weight_bytes,
            about=self.record.about,
        )

    def hit_rate(self) -> float:
        """See ``Acceptance``."""
        hits = [r.ranks == 0 if r.reach is None else r.reach > 0 for r in self.record.requests]
        return float(np.concatenate(hits).mean())

    def mean_context(self) -> int:
        """Mean number of tokens before a decoded one."""
        each = [r.num_prompt + r.num_output / 2 for r in self.record.requests]
        return max(1, round(float(np.mean(each))))

    def tokens_per_pass(self, draft_tokens: int) -> float:
        """See ``Acceptance``; by passes over the recorded positions."""
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
        """See ``Acceptance``; ranks of positions drawn by keyed hash become 0, or 1.

        Raises:
            UserError: a trace, whose chains cannot be changed.
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
    """The law that is fitted to the log ``acceptance`` of an engine.

    Raises:
        UserError: a file that has no acceptance.
    """
    assert chosen.acceptance is not None
    options = ReadOptions(method=chosen.method, draft_tokens=chosen.draft_tokens)
    fitted = fit_logs([read_log(chosen.acceptance, options)])
    if fitted.covers_tree:
        raise UserError(f"acceptance={chosen.acceptance} is of trees: a plan needs chains")
    known = fitted.requests if fitted.requests > 1 else 0  # one is a summary of many
    section = {**fitted.model_option(), "requests": known}
    return OfLaw.of(section, f"law fitted to {fitted.requests} requests of {chosen.acceptance}")


def of_model(section: Mapping[str, Any]) -> Acceptance | None:
    """What a section ``model`` says of the draft; None where models have to decode first.

    Raises:
        UserError: a record that cannot be used.
    """
    if section.get("kind") == "synthetic":
        return OfLaw.of(section)
    if section.get("kind") == "replay":
        layers = int(section.get("num_layers", 80))
        return OfRecord.of(str(section["record"]), section.get("method"), layers)
    return None


def chain_table(acceptance: Acceptance, lengths: range = _LENGTHS) -> FloatArray:
    """float64[len(lengths)]: tokens per pass of chains of 0, 1, ... draft tokens."""
    return np.array([acceptance.tokens_per_pass(k) if k else 1.0 for k in lengths])


def _runs(hits: np.ndarray) -> np.ndarray:
    """int64[T]: right positions in a row from each one."""
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
