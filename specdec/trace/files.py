"""The files of a trace: ``trace.json`` (Chrome's format, for Perfetto) and ``trees.json``."""

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
    Work.HEAD: "compute",
    Work.EXIT: "compute",
    Work.PRUNE: "prune",
    Work.TRANSFER: "transmit",
}
"""Kind of work -> phase of a step (SpecPipe Fig. 12); what is between two pieces is ``wait``."""

WAIT = "wait"
_MIN_WAIT_S = 1e-6  # shorter gaps are the clock's own rounding


def write_trace(
    folder: Path,
    trace: RunTrace,
    *,
    latency: int,
    places: Mapping[int, int] | None = None,
    text: Callable[[int], str] | None = None,
) -> list[Path]:
    """Writes what a run has on record into its folder; returns the files' paths.

    Args:
        folder: the run folder.
        trace: the record.
        latency: the executor's.
        places: rank -> its stage, from 1; None where every rank from 1 on is a stage.
        text: token id -> text; None where there is no tokenizer.
    """
    if places is None:
        places = {rank: rank for rank in range(1, latency + 1)} if latency > 1 else {}
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
        spans: all ranks', in order of time.
        fed: step -> what it submitted (``TreeRecorder.fed``).
        places: rank -> its stage; stage i works in step s on what was fed in step s - (i - 1).
    """
    ranks = sorted({span.rank for span in spans})
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "specdec"}}
    ]
    for rank in ranks:
        name = {"name": rank_label(rank, places)}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name})
        order = {"sort_index": rank}
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": order}
        )
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append(span)
        events.append(_event(span, fed, places.get(span.rank, 1)))
    end = max((s.start_s + s.seconds for s in spans), default=0.0)
    for rank in ranks:
        events += list(_waits(rank, by_rank[rank], end))
    return events


def rank_label(rank: int, places: Mapping[int, int]) -> str:
    """What a rank does, for a row of the timeline."""
    if rank == CONTROLLER:
        return "rank 0: controller, draft" if places else "rank 0: draft, target"
    return f"rank {rank}: stage {places[rank]}"


def _event(span: Span, fed: Mapping[int, Mapping[str, Any]], stage: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.step, "tokens": span.tokens}
    if span.work_s:
        args["work_ms"] = round(span.work_s * 1e3, 4)
    if span.kind in (Work.STAGE, Work.HEAD, Work.EXIT):
        # A batch moves on by one stage per step, so its age tells its stage.
        level = span.step - (stage - 1)
        args["level"] = level
        found = fed.get(level)
        if found is not None:
            args["requests"], args["depths"] = found["requests"], found["depths"]
            args["prefill"] = found["prefill"]
    return _complete(span.kind, PHASES[span.kind], span.rank, span.start_s, span.seconds, args)


def _waits(rank: int, spans: Iterable[Span], end: float) -> Iterable[dict[str, Any]]:
    """The gaps between a rank's spans, up to the end of the run."""
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
    """One line per entry would be larger than what there is to say: no indentation."""
    return write_text(path, json.dumps(plain(value), allow_nan=False, separators=(",", ":")) + "\n")
