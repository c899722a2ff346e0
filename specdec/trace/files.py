"""Writes a trace: ``trace.json`` (Chrome trace format, for Perfetto) and ``trees.json``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.clocks import CONTROLLER, Span, Work
from specdec.files import plain, write_text
from specdec.trace.recorder import RunTrace

TIMELINE_FILE = "trace.json"
TREES_FILE = "trees.json"

PHASES: Mapping[str, str] = {
    Work.STAGE: "compute",
    Work.DRAFT: "compute",
    Work.MIDDLE: "compute",
    Work.HEAD: "compute",
    Work.EXIT: "compute",
    Work.PRUNE: "prune",
    Work.TRANSFER: "transmit",
}
"""Kind of work -> phase of a step (SpecPipe Fig. 12); gaps between events are ``wait``."""

WAIT = "wait"
_MIN_WAIT_S = 1e-6  # shorter gaps are rounding errors of the clock


def write_trace(
    folder: Path,
    trace: RunTrace,
    *,
    latency: int | None,
    places: Mapping[int, int] | None = None,
    text: Callable[[int], str] | None = None,
) -> list[Path]:
    """Writes the recorded trace into the run folder; returns the files' paths.

    Args:
        folder: the run folder.
        trace: the recorded trace.
        latency: the executor's latency, or None.
        places: rank -> stage, from 1 (default: each rank from 1 is the stage of that number).
        text: token id -> text (default: no texts are written).
    """
    if places is None:
        places = {rank: rank for rank in range(1, (latency or 1) + 1)} if latency != 1 else {}
    value = {
        "traceEvents": chrome_events(trace.spans(), trace.trees.fed, places),
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": trace.clock.kind.value,
            "latency": latency,
            "dropped_spans": trace.num_dropped,
        },
    }
    requests = trace.trees.requests
    tokens = {node[2] for r in requests for step in r["steps"] for node in step["nodes"]}
    trees = {
        "clock": trace.clock.kind.value,
        "latency": latency,
        "truncated": trace.trees.truncated,
        "text": {} if text is None else {str(token): text(token) for token in sorted(tokens)},
        "requests": requests,
    }
    return [_dump(folder / TIMELINE_FILE, value), _dump(folder / TREES_FILE, trees)]


def chrome_events(
    spans: Sequence[Span], fed: Mapping[int, Mapping[str, Any]], places: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Chrome trace events: one thread per rank, complete events in microseconds.

    Args:
        spans: of all ranks, ordered by time.
        fed: step -> its submission (``TreeRecorder.fed``).
        places: rank -> stage. In step s, stage i computes the submission of step s - (i - 1).
    """
    ranks = sorted({span.rank for span in spans})
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "specdec"}}
    ]
    for rank in ranks:
        thread = {"ph": "M", "pid": 0, "tid": rank}
        events += [
            thread | {"name": "thread_name", "args": {"name": rank_label(rank, places)}},
            thread | {"name": "thread_sort_index", "args": {"sort_index": rank}},
        ]
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append(span)
        events.append(_event(span, fed, places.get(span.rank, 1)))
    end = max((s.start_s + s.seconds for s in spans), default=0.0)
    for rank in ranks:
        events += list(_waits(rank, by_rank[rank], end))
    return events


def rank_label(rank: int, places: Mapping[int, int]) -> str:
    """Label of a rank's row in the timeline."""
    if rank == CONTROLLER:
        return "rank 0: controller, draft" if places else "rank 0: draft, target"
    return f"rank {rank}: stage {places[rank]}"


def _event(span: Span, fed: Mapping[int, Mapping[str, Any]], stage: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.step, "tokens": span.tokens}
    if span.work_s:
        args["work_ms"] = round(span.work_s * 1e3, 4)
    if span.kind in (Work.STAGE, Work.HEAD, Work.EXIT):
        # A batch advances by one stage per step.
        level = span.step - (stage - 1)
        args["level"] = level
        args |= {key: fed[level][key] for key in ("requests", "depths", "prefill") if level in fed}
    return _complete(span.kind, PHASES[span.kind], span.rank, span.start_s, span.seconds, args)


def _waits(rank: int, spans: Iterable[Span], end: float) -> Iterable[dict[str, Any]]:
    """``wait`` events for the gaps between a rank's spans, up to the end of the run."""
    free, step = 0.0, 0
    for span in spans:
        if span.start_s - free > _MIN_WAIT_S:
            yield _complete(WAIT, WAIT, rank, free, span.start_s - free, {"step": span.step})
        free, step = max(free, span.start_s + span.seconds), span.step
    if end - free > _MIN_WAIT_S:
        yield _complete(WAIT, WAIT, rank, free, end - free, {"step": step})


def _complete(
    name: str, phase: str, rank: int, start_s: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": str(name),
        "cat": phase,
        "pid": 0,
        "tid": rank,
        "ts": round(start_s * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "args": args,
    }


def _dump(path: Path, value: Any) -> Path:
    """Writes compact JSON without indentation, because traces are large."""
    return write_text(path, json.dumps(plain(value), allow_nan=False, separators=(",", ":")) + "\n")
