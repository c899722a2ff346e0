"""How often a plan expects draft tokens to be accepted: by an acceptance model or recorded run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.fitting import ReadOptions, fit_logs, read_log
from specdec.models.bundled import record_path
from specdec.pairs import ModelPair, build_pair
from specdec.pairs.record import RecordedRequest, read_record, read_traces
from specdec.pairs.recorded import RecordedSequences, ReplayModels, SyntheticModels
from specdec.planning.options import PlanOptions
from specdec.sources.synthetic import SyntheticPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    section: Mapping[str, Any]  # the section ``model`` of a configuration that chooses it
    label: str
    requests: int  # number of measured requests that it is based on; 0 if unknown or none
    hit_rate: float  # share of positions whose first candidate is right
    pair: ModelPair  # models that reproduce it
    draft_name: str | None = None  # a profile must have its time; None accepts any
    drawn: bool = False  # whether any number of prompts can be drawn from it
    context: int = 0  # mean number of tokens before a decoded one, of a record

    @property
    def overrides(self) -> list[str]:
        keys = {k: v for k, v in self.section.items() if k not in ("kind", "draft_name", "origin")}
        words = (f"model.{key}={json.dumps(value)}" for key, value in keys.items())
        return [f"model={self.section['kind']}", *words]


def of_law(section: Mapping[str, Any], label: str = "") -> Acceptance:
    section = {**section, "kind": "synthetic"}
    pair = build_pair({**section, "draft_name": None})
    assert isinstance(pair, SyntheticModels)
    assert isinstance(pair.hidden, SyntheticPair)
    return Acceptance(
        section=section,
        label=label or f"law of {section.get('origin', 'assumed')}",
        requests=int(section.get("requests", 0)),
        hit_rate=float(pair.hidden.rank_probabilities()[0]),
        pair=pair,
        draft_name=section.get("draft_name"),
        drawn=True,
    )


def of_record(section: Mapping[str, Any]) -> Acceptance:
    path, method = str(section["record"]), section.get("method")
    layers = int(section.get("num_layers", 80))
    is_trace = path.endswith((".jsonl", ".jsonl.gz"))
    record = read_traces(path, method) if is_trace else read_record(record_path(path))
    shape: dict[str, Any] = {"weight_bytes": record.weight_bytes, "about": record.about}
    context = float(np.mean([r.num_prompt + r.num_output / 2 for r in record.requests]))
    return Acceptance(
        section={"kind": "replay", "record": path, "method": method, "num_layers": layers},
        label=f"record of {len(record.requests)} prompts",
        requests=len(record.requests),
        hit_rate=float(np.concatenate([*map(_hits, record.requests)]).mean()),
        pair=ReplayModels(RecordedSequences(record=record), num_layers=layers, **shape),
        context=max(1, round(context)),
    )


def _hits(request: RecordedRequest) -> np.ndarray:
    """Returns bool[L]: whether the draft's best candidate for each of L output tokens is right."""
    return np.asarray(request.ranks == 0 if request.reach is None else request.reach > 0)


def acceptance_of(chosen: PlanOptions, section: Mapping[str, Any]) -> Acceptance | None:
    if chosen.acceptance is None:
        if section["kind"] == "synthetic":
            return of_law(section)
        return of_record(section) if section["kind"] == "replay" else None
    options = ReadOptions(method=chosen.method, draft_tokens=chosen.draft_tokens)
    fitted = fit_logs([read_log(chosen.acceptance, options)])
    known = fitted.requests if fitted.requests > 1 else 0  # a single one is a summary of many
    origin = f"law fitted to {fitted.requests} requests of {chosen.acceptance}"
    return of_law({**fitted.model_option(), "requests": known}, origin)
