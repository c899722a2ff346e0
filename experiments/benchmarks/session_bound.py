"""What is left to gain outside ONNX Runtime: ``python -m experiments.benchmarks.session_bound``.

Decodes the same prompts in turn with some strategies on ``model.backend=onnx`` and, where ONNX
Runtime GenAI is installed (``specdec rivals install ort``), with that, plainly and with its draft
model. Prints per row the tokens per target pass, tokens per second, and those that it would have if
nothing but the sessions' own calls took time; each also over ``ar``. All are of the decode phase
and wall times, of which only the ratios count on a machine with other work.

    python -m experiments.benchmarks.session_bound --sampling t06 --strategies ar speculative \\
        "speculative policy.gamma=4" best_first --draft-tokens 3 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.metrics import RequestResult
from specdec.metrics.times import decode_phase
from specdec.pairs import PretrainedPair
from specdec.rivals import RivalProcess
from specdec.rivals.environments import converted
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.sampling.transform import SamplingParams

DEFAULT = ("ar", "speculative", "speculative policy.gamma=4", "best_first", "mixture")


@dataclass
class Row:
    """Sums over the decode phases of requests.

    Attributes:
        tokens, passes: emitted, and target passes that gave them.
        seconds: wall time.
        session_s: of these inside ONNX Runtime; 0 where it is not known.
    """

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    session_s: float = 0.0


class Sessions:
    """Wall time inside all sessions of this process.

    Attributes:
        calls: start and duration of each, in seconds.
    """

    def __init__(self) -> None:
        """Replaces the session's method, for the life of the process."""
        from onnxruntime import InferenceSession

        self.calls: list[tuple[float, float]] = []
        run = InferenceSession.run_with_iobinding

        def timed(session: Any, *arguments: Any) -> None:
            start = perf_counter()
            run(session, *arguments)
            self.calls.append((start, perf_counter() - start))

        InferenceSession.run_with_iobinding = timed


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=list(DEFAULT), metavar="WORDS")
    parser.add_argument("--draft-tokens", nargs="*", type=int, default=[3, 4])
    parser.add_argument("--sampling", default="greedy")
    parser.add_argument("--data", default="humaneval")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = ["model.backend=onnx", "threads=1", f"max_new_tokens={args.tokens}"]
    words += [f"data={args.data}", f"data.limit={args.prompts}", f"sampling={args.sampling}"]
    config = run_job_of(words).config
    pair, loaded, _ = prepare(config)
    assert isinstance(pair, PretrainedPair)
    sessions = Sessions()
    runners = [_runner([*words, *f"strategy={name}".split()], pair) for name in args.strategies]
    with rivals(pair, args.draft_tokens) as others:
        for repeat in range(args.repeats + 1):
            if repeat < 2:  # the first one warms up
                rows = {name: Row() for name in (*args.strategies, *others)}
            for prompt in loaded:
                for name, runner in zip(args.strategies, runners, strict=True):
                    _decode(runner, prompt, rows[name], sessions)
                for name, rival in others.items():
                    found = rival.generate(
                        prompt.tokens.tolist(),
                        max_new_tokens=args.tokens,
                        sampling=_options(config, prompt.id),
                    )
                    row = rows[name]
                    row.tokens += len(found.tokens) - 1
                    row.passes += found.rounds - 1
                    row.seconds += found.times_s[-1] - found.times_s[0]
    _print(rows)
    return 0


def _runner(words: list[str], pair: PretrainedPair) -> PartsRunner:
    cfg = run_job_of(words).config
    return PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair))


def _decode(runner: PartsRunner, prompt: TokenPrompt, row: Row, sessions: Sessions) -> None:
    """Adds one request of ours to its row."""
    sessions.calls.clear()
    finished: list[tuple[RequestResult, float]] = []
    totals = runner.run([prompt], lambda result: finished.append((result, perf_counter())))
    ((result, ended),) = finished
    phase = decode_phase(result)
    row.tokens += phase.tokens
    row.passes += totals.target_passes - 1
    row.seconds += phase.seconds
    row.session_s += sum(s for start, s in sessions.calls if start > ended - phase.seconds)


@contextmanager
def rivals(pair: PretrainedPair, draft_tokens: list[int]) -> Iterator[dict[str, RivalProcess]]:
    """Name of a row -> process of the other runtime; none where it is not installed."""
    processes: dict[str, RivalProcess] = {}
    try:
        for count in (0, *draft_tokens):
            settings: dict[str, Any] = {
                "target": str(converted("ort", pair.folder("target"), print)),
                "draft": str(converted("ort", pair.folder("draft"), print)) if count else None,
                "method": "draft" if count else "generate",
                "threads": 1,
                "eos": sorted(pair.eos_ids),
                "options": {"num_draft_tokens": count} if count else {},
            }
            name = f"ort_draft {count}" if count else "ort_generate"
            processes[name] = RivalProcess("ort", settings)
    except UserError as error:
        print(f"without the other runtime: {error}")
    try:
        yield processes
    finally:
        for process in processes.values():
            process.close()


def _options(config: dict[str, Any], number: int) -> dict[str, Any]:
    """The sampling of one request for the other runtime."""
    params = SamplingParams(**config["sampling"])
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": number,
    }


def _print(rows: dict[str, Row]) -> None:
    plain = next(row for name, row in rows.items() if name.split()[0] == "ar")
    print(f"{'row':34s}tokens/pass  tokens/s  of ar  sessions only  of ar")
    for name, row in rows.items():
        speed = row.tokens / row.seconds
        line = f"{name:34s}{row.tokens / row.passes:11.2f}{speed:10.0f}"
        line += f"{speed * plain.seconds / plain.tokens:7.2f}"
        if row.session_s:
            bound = row.tokens / row.session_s
            line += f"{bound:15.0f}{bound * plain.session_s / plain.tokens:7.2f}"
        print(line)


if __name__ == "__main__":
    sys.exit(main())
