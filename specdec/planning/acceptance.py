"""What is known about which draft tokens the target accepts: a hit law, or the record of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import expit, logit

from specdec.errors import UserError
from specdec.fitting import HitLaw, ReadOptions, fit_logs, read_log
from specdec.fitting.tails import RankTail, class_decays
from specdec.models.bundled import record_path
from specdec.pairs import ModelPair, build_pair
from specdec.pairs.record import Record, read_record, read_traces
from specdec.pairs.recorded import RecordedSequences, ReplayModels
from specdec.sources.hashing import hash_uniform
from specdec.types import FloatArray

if TYPE_CHECKING:
    from specdec.planning.job import PlanOptions

_SHIFT = 7  # stream of the hash that changes a record's ranks
_LONGEST = 16  # draft tokens of the chains in ``chain_table``
_EDGE = 1e-9  # hit rates are kept this far from 0 and 1 in log odds


class Acceptance:
    """Base of laws and records.

    Attributes:
        section: the configuration's section ``model`` that reproduces it.
        label: describes its origin.
        requests: number of measured requests behind it; 0 if it is assumed or does not say.
        drawn: whether any number of prompts can be drawn from it.
        draft_name: a profile must have the time of this draft; None accepts any.
    """

    section: Mapping[str, Any]
    label: str
    requests: int
    drawn = False
    draft_name: str | None = None

    @property
    def overrides(self) -> list[str]:
        """Overrides of a configuration that choose it as the model.

        Leaves out the draft's name, since its time has been looked up before.
        """
        keys = {k: v for k, v in self.section.items() if k not in ("kind", "draft_name", "origin")}
        words = [f"model.{key}={json.dumps(value)}" for key, value in keys.items()]
        return [f"model={self.section['kind']}", *words]

    def pair(self) -> ModelPair:
        """Returns models that reproduce it."""
        return build_pair({**self.section, "draft_name": None})

    def hit_rate(self) -> float:
        """Returns the share of positions whose first candidate is right."""
        raise NotImplementedError

    def tokens_per_pass(self, draft_tokens: int) -> float:
        """Returns the expected emitted tokens of a target pass over a chain of draft tokens."""
        raise NotImplementedError

    def shifted(self, odds: float) -> Acceptance:
        """Adds to the log odds that the first candidate is right."""
        raise NotImplementedError


class OfLaw(Acceptance):
    """A hit law; ``section`` has the keys of ``model=synthetic``."""

    drawn = True

    def __init__(self, section: Mapping[str, Any], label: str = "") -> None:
        self.section = {**section, "kind": "synthetic"}
        self.label = label or f"law of {section.get('origin', 'assumed')}"
        self.requests = int(section.get("requests", 0))
        self.draft_name = section.get("draft_name")
        rows = np.asarray(section.get("group_weights") or [section["weights"]], float)
        shares = np.asarray(section.get("group_shares") or [1.0], float)
        law = HitLaw(
            group_shares=shares / shares.sum(),
            weights=rows / rows.sum(axis=1, keepdims=True),
            stay=np.asarray(section.get("stay") or [0.0] * rows.shape[1], float),
            top1=np.asarray(section["top1"], float),
            depth=np.asarray(section.get("depth") or [0.0], float),
        )
        self.law = law

    def hit_rate(self) -> float:
        return self.law.hit_rate()

    def tokens_per_pass(self, draft_tokens: int) -> float:
        return self.law.tokens_per_pass(draft_tokens)

    def shifted(self, odds: float) -> OfLaw:
        """Shifts all classes alike; the ranks below the first keep their distribution."""
        top1 = _shifted(self.law.top1, odds)
        tails = zip(top1, self.section["decay"], self.section["miss"], strict=True)
        decay = [
            float(class_decays(np.array([rate]), RankTail(decay=at, miss=miss))[0])
            for rate, at, miss in tails
        ]
        return OfLaw({**self.section, "top1": top1.tolist(), "decay": decay}, self.label)


class OfRecord(Acceptance):
    """A recorded run, or a trace of accepted lengths; ``num_layers`` is that of the target."""

    def __init__(
        self, path: str, method: str | None = None, num_layers: int = 80, record: Record | None = None
    ) -> None:
        """Reads a record unless it is given, or a trace if the file is JSON lines."""
        if record is None:
            is_trace = path.endswith((".jsonl", ".jsonl.gz"))
            record = read_traces(path, method) if is_trace else read_record(record_path(path))
        names = {"record": path, "method": method, "num_layers": num_layers}
        self.section = {"kind": "replay", **names}
        self.record, self.requests = record, len(record.requests)
        self.label = f"record of {self.requests} prompts"
'''
