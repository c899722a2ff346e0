"""What is left to gain outside ONNX Runtime: ``python -m experiments.benchmarks.session_bound``.

Decodes the same prompts in turn with some strategies on ``model.backend=onnx`` and with ONNX
Runtime GenAI (``specdec rivals install ort``), plainly and with its draft model. Prints per row the
tokens per target pass, tokens per second, and those that it would have if nothing but the calls of
ONNX Runtime sessions took time; each also over ``ar``. All are of the decode phase and wall times,
of which only the ratios count on a machine with other work. A strategy may have words of its own:

    python -m experiments.benchmarks.session_bound --sampling t06 --strategies ar speculative \\
        "speculative policy.gamma=4" "ort_draft strategy.options.num_draft_tokens=3"

The last two columns are the median times from the end of a session call to the next call, which are
this library's Python: after passes of the target, and after those of the draft. ``--flush-mb 64``
reads as many megabytes after every call, outside of these times (but within those of tokens/s):
what Python then takes longer is the cost of caches that are filled with something else.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.metrics import RequestResult
from specdec.metrics.times import decode_phase
from specdec.runs.jobs import build_runner, prepare, stop_rules
from specdec.runs.runners import Runner, TokenPrompt

PLAIN = "ar"
DEFAULT = (
    *("speculative", "speculative policy.gamma=4", "best_first", "mixture", "ort_generate"),
    *("ort_draft strategy.options.num_draft_tokens=3", "ort_draft"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a numbered session; ``left``: when Python went on."""

    session: int
    start: float
    seconds: float
    left: float


@dataclass
class Row:
    """Sums over the decode phases of requests.

    Attributes:
        session_s: of the wall time, seconds inside ONNX Runtime; 0 where it is not known.
        after: number of the session -> seconds from each of its calls to the next call.
        in_session: number of the session -> total seconds inside it.
    """

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    session_s: float = 0.0
    after: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    in_session: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, calls: list[Call]) -> None:
        for call, following in zip_longest(calls, calls[1:]):
            self.session_s += call.seconds
            self.in_session[call.session] += call.seconds
            if following is not None:
                self.after[call.session].append(following.start - call.left)


class Sessions:
    """Calls of all sessions of this process.

    Attributes:
        calls: in their order.
    """

    def __init__(self, flush_mb: int) -> None:
        """Replaces the session's method, for the life of the process.

        Args:
            flush_mb: megabytes that are read after every call; 0: none.
        """
        from onnxruntime import InferenceSession

        self.calls: list[Call] = []
        run, flushed = InferenceSession.run_with_iobinding, np.ones(flush_mb << 17)

        def timed(session: Any, *arguments: Any) -> None:
            start = perf_counter()
            run(session, *arguments)
            seconds = perf_counter() - start
            if flush_mb:
                flushed.sum()
            self.calls.append(Call(id(session), start, seconds, perf_counter()))

        InferenceSession.run_with_iobinding = timed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=list(DEFAULT), metavar="WORDS")
    parser.add_argument("--sampling", default="greedy")
    parser.add_argument("--data", default="humaneval")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flush-mb", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = ["model.backend=onnx", "threads=1", f"max_new_tokens={args.tokens}"]
    words += [f"data={args.data}", f"data.limit={args.prompts}", f"sampling={args.sampling}"]
    pair, prompts, _ = prepare(run_job_of(words).config)
    sessions = Sessions(args.flush_mb)
    runners: dict[str, Runner] = {}
    for name in dict.fromkeys([PLAIN, *args.strategies]):
        cfg = run_job_of([*words, *f"strategy={name}".split()]).config
        try:
            runners[name] = build_runner(cfg, pair, stop_rules(cfg, pair))
        except UserError as error:
            print(f"without {name}: {error}")
    rows = {name: Row() for name in runners}
    for repeat in range(args.repeats + 1):
        if repeat == 1:  # the first one warms up
            rows = {name: Row() for name in runners}
        for prompt in prompts:
            for name, runner in runners.items():
                _decode(runner, prompt, rows[name], sessions)
    for runner in runners.values():
        runner.close()
    _print(rows)
    return 0


def _decode(runner: Runner, prompt: TokenPrompt, row: Row, sessions: Sessions) -> None:
    sessions.calls.clear()
    finished: list[tuple[RequestResult, float]] = []
    totals = runner.run([prompt], lambda result: finished.append((result, perf_counter())))
    ((result, ended),) = finished
    phase = decode_phase(result)
    row.tokens += phase.tokens
    row.passes += totals.target_passes - 1
    row.seconds += phase.seconds
    row.add([call for call in sessions.calls if call.start > ended - phase.seconds])


def _print(rows: dict[str, Row]) -> None:
    plain, width = rows[PLAIN], max(map(len, rows))
    print(
        f"{'row':{width}s}  tokens/pass  tokens/s  of ar  sessions only  of ar"
        "  Python after target, draft (us)"
    )
    for name, row in rows.items():
        speed = row.tokens / row.seconds
        line = f"{name:{width}s}{row.tokens / row.passes:13.2f}{speed:10.0f}"
        line += f"{speed * plain.seconds / plain.tokens:7.2f}"
        if row.session_s:  # sessions of another process are not seen
            bound = row.tokens / row.session_s
            line += f"{bound:15.0f}{bound * plain.session_s / plain.tokens:7.2f}"
            # Most of the time is inside the target's session.
            sessions = sorted(row.in_session, key=row.in_session.__getitem__, reverse=True)
            line += "".join(f"{1e6 * median(row.after[each]):12.0f}" for each in sessions)
        print(line)


if __name__ == "__main__":
    sys.exit(main())
