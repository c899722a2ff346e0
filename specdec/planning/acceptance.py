"""What is known about which draft tokens the target accepts: a hit law, or the record of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import expit, logit

from specdec.errors import UserError
from specdec.fitting import AcceptanceModel, ReadOptions, fit_logs, read_log
from specdec.fitting.model import RankTail, class_decays
from specdec.models.bundled import record_path
from specdec.pairs import ModelPair, build_pair
from specdec.pairs.record import Record, RecordedRequest, read_record, read_traces
from specdec.pairs.recorded import RecordedSequences, ReplayModels
from specdec.planning.options import PlanOptions
from specdec.sources.hashing import hash_uniform
from specdec.types import FloatArray

_SHIFT = 7  # stream of the hash that changes a record's ranks
_LONGEST = 16  # draft tokens of the chains in ``chain_table``
_EDGE = 1e-9  # hit rates are kept this far from 0 and 1 in log odds


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    section: Mapping[str, Any]  # the section ``model`` of a configuration that chooses it
    label: str
    requests: int  # measured ones behind it; 0 if it is assumed or does not say
    hit_rate: float  # share of positions whose first candidate is right
    tokens_per_pass: Callable[[int], float]  # expected, of a chain of so many draft tokens
    pair: Callable[[], ModelPair]  # returns models that reproduce it
    shifted: Callable[[float], Acceptance]  # adds to the log odds of ``hit_rate``
    draft_name: str | None = None  # a profile must have its time; None accepts any
    drawn: bool = False  # whether any number of prompts can be drawn from it
    context: int = 0  # mean number of tokens before a decoded one, of a record

    @property
    def overrides(self) -> list[str]:
        keys = {k: v for k, v in self.section.items() if k not in ("kind", "draft_name", "origin")}
        words = (f"model.{key}={json.dumps(value)}" for key, value in keys.items())
        return [f"model={self.section['kind']}", *words]

    def chain_table(self) -> FloatArray:
        """Returns float64[K + 1], the tokens per pass of chains of 0, 1, ..., K draft tokens."""
        return np.array([1.0, *map(self.tokens_per_pass, range(1, _LONGEST + 1))])


def of_law(section: Mapping[str, Any], label: str = "") -> Acceptance:
    section = {**section, "kind": "synthetic"}
    rows = np.asarray(section.get("group_weights") or [section["weights"]], float)
    shares = np.asarray(section.get("group_shares") or [1.0], float)
    top1 = np.asarray(section["top1"], float)
    law = AcceptanceModel(
        group_shares=shares / shares.sum(),
        weights=rows / rows.sum(axis=1, keepdims=True),
        stay=np.asarray(section.get("stay") or [0.0] * rows.shape[1], float),
        top1=top1,
        depth=np.asarray(section.get("depth") or [0.0], float),
    )

    def shifted(odds: float) -> Acceptance:
        moved = _shifted(top1, odds)
        tails = zip(moved, section["decay"], section["miss"], strict=True)
        decay = [
            float(class_decays(np.array([rate]), RankTail(decay=at, miss=miss))[0])
            for rate, at, miss in tails
        ]
        return of_law({**section, "top1": moved.tolist(), "decay": decay}, label)

    return Acceptance(
        section=section,
        label=label or f"law of {section.get('origin', 'assumed')}",
        requests=int(section.get("requests", 0)),
        hit_rate=law.hit_rate(),
        tokens_per_pass=law.tokens_per_pass,
        pair=lambda: build_pair({**section, "draft_name": None}),
        shifted=shifted,
        draft_name=section.get("draft_name"),
        drawn=True,
    )


def of_record(section: Mapping[str, Any], record: Record | None = None) -> Acceptance:
    path, method = str(section["record"]), section.get("method")
    layers = int(section.get("num_layers", 80))
    if record is None:
        is_trace = path.endswith((".jsonl", ".jsonl.gz"))
        record = read_traces(path, method) if is_trace else read_record(record_path(path))
    requests, known = record.requests, record
    reaches = [_reach(request) for request in requests]
    hit_rate = float(np.concatenate([reach > 0 for reach in reaches]).mean())

    def tokens_per_pass(draft_tokens: int) -> float:
        passes = 0
        for reach in reaches:
            at = 0
            while at < len(reach):
                at += min(int(reach[at]), draft_tokens) + 1
                passes += 1
        return sum(map(len, reaches)) / passes

    def shifted(odds: float) -> Acceptance:
        """Sets the ranks of positions, drawn by a keyed hash, to 0 (right) or 1 (wrong); a trace
        has none.
        """
        after = float(_shifted(np.array(hit_rate), odds))
        changed = []
        for request in requests:
            if request.reach is not None:
                raise UserError("a trace of accepted lengths has no ranks to change")
            drawn = hash_uniform(_SHIFT, request.id, np.arange(len(request.ranks)))
            ranks = request.ranks.copy()
            if after > hit_rate:
                ranks[(ranks > 0) & (drawn < (after - hit_rate) / max(1.0 - hit_rate, _EDGE))] = 0
            else:
                ranks[(ranks == 0) & (drawn < (hit_rate - after) / max(hit_rate, _EDGE))] = 1
            changed.append(replace(request, ranks=ranks))
        return of_record(section, replace(known, requests=tuple(changed)))

    shape: dict[str, Any] = {"weight_bytes": record.weight_bytes, "about": record.about}
    context = float(np.mean([r.num_prompt + r.num_output / 2 for r in requests]))
    return Acceptance(
        section={"kind": "replay", "record": path, "method": method, "num_layers": layers},
        label=f"record of {len(requests)} prompts",
        requests=len(requests),
        hit_rate=hit_rate,
        tokens_per_pass=tokens_per_pass,
        pair=lambda: ReplayModels(RecordedSequences(record=known), num_layers=layers, **shape),
        shifted=shifted,
        context=max(1, round(context)),
    )


def _reach(request: RecordedRequest) -> np.ndarray:
    """Returns int64[L], the number of first candidates in a row that are right from there."""
    if request.reach is not None:
        return np.asarray(request.reach)
    at = np.arange(len(request.ranks))
    wrong = np.append(np.flatnonzero(request.ranks), len(at))
    result: np.ndarray = wrong[np.searchsorted(wrong, at)] - at
    return result


def _shifted(rates: FloatArray, odds: float) -> FloatArray:
    result: FloatArray = expit(logit(np.clip(rates, _EDGE, 1.0 - _EDGE)) + odds)
    return result


def acceptance_of(chosen: PlanOptions, section: Mapping[str, Any]) -> Acceptance | None:
    if chosen.acceptance is None:
        if section["kind"] == "synthetic":
            return of_law(section)
        return of_record(section) if section["kind"] == "replay" else None
    options = ReadOptions(method=chosen.method, draft_tokens=chosen.draft_tokens)
    fitted = fit_logs([read_log(chosen.acceptance, options)])
    if fitted.covers_tree:
        raise UserError(f"acceptance={chosen.acceptance} is of trees: a plan needs chains")
    known = fitted.requests if fitted.requests > 1 else 0  # a single one is a summary of many
    origin = f"law fitted to {fitted.requests} requests of {chosen.acceptance}"
    return of_law({**fitted.model_option(), "requests": known}, origin)
