"""Writes ``trace.json`` (Chrome trace format, for Perfetto), ``trees.json``, and pages of trees."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from specdec.clocks import CONTROLLER, Span, Work
from specdec.files import plain, write_text
from specdec.trace.recorder import RunTrace

TIMELINE_FILE = "trace.json"
TREES_FILE = "trees.json"

PHASES: Mapping[str, str] = {
    **dict.fromkeys((Work.STAGE, Work.DRAFT, Work.MIDDLE, Work.HEAD, Work.EXIT), "compute"),
    **{Work.PRUNE: "prune", Work.TRANSFER: "transmit"},
}
"""Maps each kind of work to a phase of a step (SpecPipe Fig. 12); other time is ``wait``."""

_MIN_WAIT_S = 1e-6  # shorter gaps are rounding errors of the clock


def write_trace(
    folder: Path,
    trace: RunTrace,
    *,
    latency: int | None,
    places: Mapping[int, int] | None = None,
    text: Callable[[int], str] | None = None,
) -> None:
    """Writes the trace files into the run folder.

    ``latency`` is the executor's, in steps; ``places`` maps each rank to the number of its stage,
    from 1 (default: rank r has stage r); without ``text`` (token id -> text) no texts are written.
    """
    if places is None:
        places = {rank: rank for rank in range(1, (latency or 1) + 1)} if latency != 1 else {}
    head = {"clock": trace.clock.kind.value, "latency": latency}
    timeline = {
        "traceEvents": chrome_events(trace.spans(), trace.fed, places),
        "displayTimeUnit": "ms",
        "otherData": {**head, "dropped_spans": trace.num_dropped},
    }
    steps = (step for request in trace.requests for step in request["steps"])
    tokens = sorted({node[2] for step in steps for node in step["nodes"]})
    texts = {} if text is None else {str(token): text(token) for token in tokens}
    trees = head | {"truncated": trace.truncated, "text": texts, "requests": trace.requests}
    # Compact, because traces are large.
    form: dict[str, Any] = {"allow_nan": False, "separators": (",", ":")}
    for name, value in ((TIMELINE_FILE, timeline), (TREES_FILE, trees)):
        write_text(folder / name, json.dumps(plain(value), **form) + "\n")


def chrome_events(
    spans: Sequence[Span], fed: Mapping[int, Mapping[str, Any]], places: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Converts spans to Chrome trace events: one thread per rank, times in microseconds.

    Args:
        fed: step -> what was submitted in it. Stage i computes it i - 1 steps later.
        places: rank -> stage, from 1.
    """
    ranks = sorted({span.rank for span in spans})
    process = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "specdec"}}
    events: list[dict[str, Any]] = [process]
    for rank in ranks:
        what = "controller, draft" if places else "draft, target"
        if rank != CONTROLLER:  # a rank that has no stage is that of a source in the background
            what = f"stage {places[rank]}" if rank in places else "draft"
        thread = {"ph": "M", "pid": 0, "tid": rank}
        events += [
            thread | {"name": "thread_name", "args": {"name": f"rank {rank}: {what}"}},
            thread | {"name": "thread_sort_index", "args": {"sort_index": rank}},
        ]
    for span in spans:
        args: dict[str, Any] = {"step": span.step, "tokens": span.tokens}
        if span.work_s:
            args["work_ms"] = round(span.work_s * 1e3, 4)
        if span.kind in (Work.STAGE, Work.HEAD, Work.EXIT):
            # A batch advances by one stage per step.
            args["level"] = level = span.step - (places.get(span.rank, 1) - 1)
            keys = ("requests", "depths", "prefill") if level in fed else ()
            args |= {key: fed[level][key] for key in keys}
        phase = PHASES[span.kind]
        events.append(_event(span.rank, span.kind, phase, span.start_s, span.seconds, args))
    end = max((s.start_s + s.seconds for s in spans), default=0.0)
    for rank in ranks:  # waits: the gaps between a rank's spans, up to the end of the run
        free = 0.0
        own = [(s.start_s, s.seconds, s.step) for s in spans if s.rank == rank]
        for start, seconds, step in [*own, (end, 0.0, own[-1][2])]:
            if start - free > _MIN_WAIT_S:
                events.append(_event(rank, "wait", "wait", free, start - free, {"step": step}))
            free = max(free, start + seconds)
    return events


def _event(
    rank: int, name: str, phase: str, start_s: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    head = {"ph": "X", "name": str(name), "cat": phase, "pid": 0, "tid": rank}
    return head | {"ts": round(start_s * 1e6, 3), "dur": round(seconds * 1e6, 3), "args": args}


def html_template(package: str, name: str) -> Template:
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(name)


def tree_page(trees: Mapping[str, Any], *, title: str) -> str:
    """Renders all steps' trees of ``trees.json`` (``trees``) as one HTML page.

    Raises KeyError if ``trees`` has another format, and ValueError if no step is recorded.
    """
    if not any(request["steps"] for request in trees["requests"]):
        raise ValueError("no step is on record: the run had no prompts left to decode")
    data = {key: trees[key] for key in ("text", "clock", "latency", "truncated", "requests")}
    # The filter ``tojson`` escapes <, >, & and ': a token cannot end the script.
    return html_template("specdec.trace", "tree_page.html").render(title=title, data=data)


def commit_kinds(trees: Mapping[str, Any]) -> dict[int, str]:
    """Maps steps with commits to "miss" if a tree lacked the next token, else to "hit"."""
    steps = (step for request in trees["requests"] for step in request["steps"])
    # A miss comes after the hits of its step, and replaces them.
    return dict(sorted((s["step"], s["commit"]["kind"]) for s in steps if s["commit"]))
