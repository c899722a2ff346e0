"""What is known about which draft tokens the target accepts: a hit law, or the record of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import expit, logit

from specdec.errors import UserError
from specdec.fitting import AcceptanceModel, ReadOptions, fit_logs, read_log
from specdec.fitting.tails import RankTail, class_decays
from specdec.models.bundled import record_path
from specdec.pairs import ModelPair, build_pair
from specdec.pairs.record import Record, read_record, read_traces
from specdec.pairs.recorded import RecordedSequences, ReplayModels
from specdec.planning.options import PlanOptions
from specdec.sources.hashing import hash_uniform
from specdec.types import FloatArray

_NOT_KEYS = ("kind", "draft_name", "origin")
_SHIFT = 7  # stream of the hash that changes a record's ranks
_LONGEST = 16  # draft tokens of the chains in ``chain_table``
_EDGE = 1e-9  # hit rates are kept this far from 0 and 1 in log odds


@dataclass(frozen=True, slots=True, kw_only=True)
class OfLaw:
    """A hit law.

    Attributes:
        section: keys of ``model=synthetic``.
        label: describes the law and its origin.
        requests: number of measured requests behind it; 0 if it is assumed or does not say.
        draft_name: a profile must have the time of this draft; None accepts any.
        drawn: whether any number of prompts can be drawn from it.
    """

    section: Mapping[str, Any]
    label: str
    requests: int = 0
    draft_name: str | None = None
    drawn: bool = True

    @staticmethod
    def of(section: Mapping[str, Any], label: str = "") -> OfLaw:
        return OfLaw(
            section={"kind": "synthetic", **section},
            label=label or f"law of {section.get('origin', 'assumed')}",
            requests=int(section.get("requests", 0)),
            draft_name=section.get("draft_name"),
        )

    @property
    def overrides(self) -> list[str]:
        """Overrides of a configuration that choose it as the model.

        Leaves out the draft's name, since its time has been looked up before.
        """
        keys = {k: v for k, v in self.section.items() if k not in _NOT_KEYS}
        return ["model=synthetic", *(f"model.{k}={json.dumps(v)}" for k, v in keys.items())]

    def pair(self) -> ModelPair:
        """Returns models that reproduce it."""
        return build_pair({**self.section, "draft_name": None})

    @property
    def law(self) -> AcceptanceModel:
        """The law with its weights normalised."""
        section = self.section
        rows = np.asarray(section.get("group_weights") or [section["weights"]], float)
        shares = np.asarray(section.get("group_shares") or [1.0], float)
        return AcceptanceModel(
            group_shares=shares / shares.sum(),
            weights=rows / rows.sum(axis=1, keepdims=True),
            stay=np.asarray(section.get("stay") or [0.0] * rows.shape[1], float),
            top1=np.asarray(section["top1"], float),
            depth=np.asarray(section.get("depth") or [0.0], float),
        )

    def hit_rate(self) -> float:
        """Returns the share of positions whose first candidate is right."""
        return self.law.hit_rate()

    def tokens_per_pass(self, draft_tokens: int) -> float:
        """Returns the expected emitted tokens of a target pass over a chain of draft tokens."""
        return self.law.tokens_per_pass(draft_tokens)

    def shifted(self, odds: float) -> OfLaw:
        """Adds to the log odds that the first candidate is right, in all classes alike.

        The ranks below the first keep their distribution.
        """
        top1 = _shifted(np.asarray(self.section["top1"], float), odds)
        tails = zip(top1, self.section["decay"], self.section["miss"], strict=True)
        decay = [
            float(class_decays(np.array([rate]), RankTail(decay=at, miss=miss))[0])
            for rate, at, miss in tails
        ]
        return replace(self, section={**self.section, "top1": top1.tolist(), "decay": decay})


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRecord:
    """A recorded run, or a trace of accepted lengths; ``num_layers`` is that of the target."""

    record: Record
    path: str
    method: str | None = None
    num_layers: int = 80
    draft_name: None = None
    drawn: bool = False

    @staticmethod
    def of(path: str, method: str | None = None, num_layers: int = 80) -> OfRecord:
        """Reads a record, or a trace if the file is JSON lines."""
        is_trace = path.endswith((".jsonl", ".jsonl.gz"))
        record = read_traces(path, method) if is_trace else read_record(record_path(path))
        return OfRecord(record=record, path=path, method=method, num_layers=num_layers)

    @property
    def requests(self) -> int:
        return len(self.record.requests)

    @property
    def label(self) -> str:
        return f"record of {self.requests} prompts"

    @property
    def overrides(self) -> list[str]:
        keys = {"record": self.path, "method": self.method, "num_layers": self.num_layers}
        return ["model=replay", *(f"model.{k}={json.dumps(v)}" for k, v in keys.items())]

    def pair(self) -> ModelPair:
        return ReplayModels(
            RecordedSequences(record=self.record),
            num_layers=self.num_layers,
            weight_bytes=self.record.weight_bytes,
            about=self.record.about,
        )

    def hit_rate(self) -> float:
        return float(np.concatenate([reach > 0 for reach in self._reaches()]).mean())

    def tokens_per_pass(self, draft_tokens: int) -> float:
        tokens = passes = 0
        for reach in self._reaches():
            at = 0
            while at < len(reach):
                at += min(int(reach[at]), draft_tokens) + 1
                passes += 1
            tokens += len(reach)
        return tokens / passes

    def mean_context(self) -> int:
        """Returns the mean number of tokens before a decoded one."""
        each = [r.num_prompt + r.num_output / 2 for r in self.record.requests]
        return max(1, round(float(np.mean(each))))

    def _reaches(self) -> list[np.ndarray]:
        """Returns int64[L] per request: the first candidates in a row that are right from there."""
        reaches = []
        for request in self.record.requests:
            ends = np.append(np.flatnonzero(request.ranks), len(request.ranks))  # next wrong one
            at = np.arange(len(request.ranks))
            runs = ends[np.searchsorted(ends, at)] - at
            reaches.append(runs if request.reach is None else np.asarray(request.reach))
        return reaches

    def shifted(self, odds: float) -> OfRecord:
        """Sets the ranks of positions, drawn by a keyed hash, to 0 (right) or 1 (wrong).

        Raises:
            UserError: it is a trace, which has no ranks.
        """
        before = self.hit_rate()
        after = float(_shifted(np.array(before), odds))
        changed = []
        for request in self.record.requests:
            if request.reach is not None:
                raise UserError("a trace of accepted lengths has no ranks to change")
            drawn = hash_uniform(_SHIFT, request.id, np.arange(len(request.ranks)))
            ranks = request.ranks.copy()
            if after > before:
                ranks[(ranks > 0) & (drawn < (after - before) / max(1.0 - before, _EDGE))] = 0
            else:
                ranks[(ranks == 0) & (drawn < (before - after) / max(before, _EDGE))] = 1
            changed.append(replace(request, ranks=ranks))
        return replace(self, record=replace(self.record, requests=tuple(changed)))


def _shifted(rates: FloatArray, odds: float) -> FloatArray:
    result: FloatArray = expit(logit(np.clip(rates, _EDGE, 1.0 - _EDGE)) + odds)
    return result


Acceptance = OfLaw | OfRecord


def chain_table(acceptance: Acceptance) -> FloatArray:
    """Returns float64[K + 1], the tokens per pass of chains of 0, 1, ..., K draft tokens."""
    return np.array([1.0, *map(acceptance.tokens_per_pass, range(1, _LONGEST + 1))])


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
