"""Raw counts of requests and runs, also of baselines, from which all rates are derived."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from specdec.metrics.counters import RequestCounters, total
from specdec.metrics.speedup import SpeedupLaw


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One finished request; times are seconds on the run's clock."""

    id: int  # of the prompt
    num_prompt: int  # prompt tokens after truncation
    output: tuple[int, ...]  # generated tokens, the end token included
    origins: tuple[int, ...]  # index of the source that proposed each token; -1 for none
    finish_reason: str  # eos, stop_string, length or cancelled
    text: str
    emitted_s: tuple[float, ...]  # per token, not decreasing
    arrival_s: float
    admitted_s: float
    counters: RequestCounters

    def __post_init__(self) -> None:
        lengths = {len(self.output), len(self.origins), len(self.emitted_s)}
        assert len(lengths) == 1, f"request {self.id}: token, origin and time counts {lengths}"


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Raw totals of one strategy over some prompts, without loading and warm-up.

    Target passes are those that answered at least one token position: those with tree nodes, and a
    baseline's prefill, whose last row is answered.
    """

    steps: int = 0  # iterations of the decode loop (baselines: target passes)
    target_passes: int = 0
    prefill_passes: int = 0  # passes with prompt rows only
    target_rows: int = 0  # tree nodes sent to the target
    prefill_rows: int = 0  # prompt rows sent to the target
    draft_passes: int = 0
    draft_rows: int = 0
    draft_catch_up_rows: int = 0  # see ``SourceCounters``
    draft_passes_by_level: dict[str, int] = field(default_factory=dict)  # see ``SourceCounters``
    wall_s: float = 0.0  # of the controller process in decode calls, with prefill
    clock_s: float = 0.0  # the same on the run's clock; differs on a simulated one only
    model_s: dict[str, float] = field(default_factory=dict)  # seconds in model calls, by model name
    model_calls: dict[str, int] = field(default_factory=dict)
    wait_s: float = 0.0  # for paced clocks and transport, see ``Meter``
    target_bytes: int = 0  # of its weights
    draft_bytes: int = 0  # of weights that a draft pass reads; 0 without a draft model
    latency: int | None = 1  # steps from submission to answer; None if it varies
    level_per_step: bool = False  # an answer emits exactly one token
    whole_tree: bool = True  # the whole tree is submitted and answered at once
    clock: str = "measured"  # measured, paced or simulated
    paced_pieces: int | None = None  # of work on a paced clock, over all ranks; else None
    overruns: int | None = None  # those that took longer than the profile says
    stage_busy_s: dict[int, float] | None = None  # stage's rank -> seconds of work, if known
    draft_total_s: float = 0.0  # of draft work on the run's clock; if measured, of model calls
    draft_hidden_s: float | None = None  # the part beside target work; None on a measured clock
    law: SpeedupLaw | None = None  # theoretical speed-up, if the source states one
    bytes_sent: int | None = None  # between ranks; None in one process
    request_steps: int = 0  # open requests, summed over steps
    kv_token_steps: int = 0  # tokens and nodes in the target's cache, summed over steps
    kv_peak_tokens: int = 0  # the most of them in any step
    kv_budget_tokens: int | None = None  # capacity of a stage's cache; None for no limit

    @property
    def total_model_s(self) -> float:
        return sum(self.model_s.values())

    @staticmethod
    def merge(parts: Iterable[RunTotals]) -> RunTotals:
        """Sums totals of parts of one run; ValueError for no parts or parts of different runs."""
        items = list(parts)
        if not items:
            raise ValueError("no totals to merge: the run has no finished prompts")
        merged: dict[str, Any] = {}
        for name in (f.name for f in fields(RunTotals)):
            values = [getattr(item, name) for item in items]
            if name in _SAME and any(value != values[0] for value in values):
                raise ValueError(f"totals of different runs: {name} is {values}")
            merged[name] = values[0] if name in _SAME else total(values)
        merged["kv_peak_tokens"] = max(item.kv_peak_tokens for item in items)
        return RunTotals(**merged)


_SAME = (  # flags of the run, not summed
    *("target_bytes", "draft_bytes", "latency", "level_per_step", "whole_tree", "clock"),
    *("kv_budget_tokens", "law"),
)


@dataclass(frozen=True, slots=True)
class Run:
    results: tuple[RequestResult, ...]
    totals: RunTotals
