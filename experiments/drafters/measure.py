"""Counts of runs on the simulated clock, with intervals over prompts; tables and result files."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from experiments.reproduce.intervals import interval
from experiments.reproduce.lab import Lab, Outcome
from specdec.errors import UserError
from specdec.files import write_json
from specdec.metrics import RequestResult
from specdec.metrics.loops import loop_share

RESULTS = Path(__file__).with_name("results")
WORKLOADS = tuple((d, s) for s in ("t06", "no_repeat4") for d in ("humaneval", "gsm8k"))
"""(data, sampling) in the order of the pages."""

Part = Callable[[RequestResult], tuple[float, float]]


def _hits(result: RequestResult) -> tuple[float, float]:
    counts = result.counters
    return counts.hits, counts.hits + counts.misses


def _later_hits(result: RequestResult) -> tuple[float, float]:
    hits, verdicts = _hits(result)
    return hits - (result.origins[0] >= 0), verdicts - 1


def _tokens(result: RequestResult) -> tuple[float, float]:
    return len(result.output), result.counters.answers


PARTS: dict[str, Part] = {
    "hit rate": _hits,
    "later hit rate": _later_hits,
    "tokens per pass": _tokens,
}
"""What is counted per prompt: (numerator, denominator). "later": without the first verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run.

    Attributes:
        measure: a key of ``PARTS``.
        value, low, high: over all prompts, and its 95 % bootstrap interval over prompts.
        counts: [numerator, denominator] of each prompt.
        steps_per_token: of the executor; a fill of the pipeline per prompt is included.
        cpu_s: seconds of CPU time; about 0 for a run that was read from disk.
    """

    measure: str
    value: float
    low: float
    high: float
    counts: list[list[float]]
    steps_per_token: float
    loop_share: float
    tokens: int
    cpu_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}-{self.high:.3f})"


class Runs:
    """Runs configurations of one size; finished ones are read from disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        size = (f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}")
        where = (f"data={args.data}", f"sampling={args.sampling}", "model=tiny", "threads=1")
        self._common = ("clock=simulated", *where, *size)
        self._lab = Lab(folder=args.out, quick=False, say=lambda words: print(words, flush=True))
        size_of_run = {key: getattr(args, key) for key in ("prompts", "tokens", "data", "sampling")}
        self.about = {"command": args.command, "revision": _revision(), **size_of_run}

    def counted(self, *overrides: str) -> Outcome:
        """Runs a configuration, or reads its run.

        Raises:
            UserError: the library refuses it.
        """
        return self._lab.run([*self._common, *overrides])

    def measured(self, measure: str, *overrides: str) -> Measured | None:
        """A key of ``PARTS`` of a configuration; None if it is refused. See ``counted``."""
        start = process_time()
        try:
            outcome = self.counted(*overrides)
        except UserError as error:
            print(f"refused: {error}", flush=True)
            return None
        counts = np.array([PARTS[measure](result) for result in outcome.results], float)
        value, low, high = ratio(counts)
        return Measured(
            measure=measure,
            value=value,
            low=low,
            high=high,
            counts=counts.tolist(),
            steps_per_token=float(outcome.summary["steps_per_token"]),
            loop_share=loop_share([result.output for result in outcome.results]),
            tokens=int(outcome.summary["new_tokens"]),
            cpu_s=round(process_time() - start, 1),
        )


Interval = tuple[float, float, float]
"""A figure and the ends of its bootstrap interval over prompts."""


def ratio(counts: np.ndarray) -> Interval:
    """The ratio of the sums of float64[P, 2], a row per prompt."""
    return _with_interval(counts, lambda s: s[0] / np.maximum(s[1], 1.0))


def difference(one: Measured, other: Measured) -> Interval:
    """one - other over the prompts of both, in pairs."""
    floor = lambda sums: np.maximum(sums, 1.0)  # noqa: E731
    return _with_interval(_beside(one, other), lambda s: s[0] / floor(s[1]) - s[2] / floor(s[3]))


def quotient(one: Measured, other: Measured) -> Interval:
    """one / other over the prompts of both, in pairs."""
    return _with_interval(_beside(one, other), lambda s: s[0] * s[3] / (s[1] * s[2]))


def _beside(one: Measured, other: Measured) -> np.ndarray:
    return np.concatenate([np.array(one.counts), np.array(other.counts)], axis=1)  # [P, 4]


def _with_interval(counts: np.ndarray, of: Callable[[np.ndarray], Any]) -> Interval:
    value = float(of(counts.sum(0)))
    low, high = interval(counts, of)
    return value, value if low is None else low, value if high is None else high


def parser(doc: str, module: str) -> argparse.ArgumentParser:
    """The arguments that all scripts have."""
    found = argparse.ArgumentParser(description=doc.splitlines()[0])
    found.add_argument("--prompts", type=int, default=16)
    found.add_argument("--tokens", type=int, default=128)
    found.add_argument("--data", default="humaneval")
    found.add_argument("--sampling", default="t06")
    found.add_argument("--out", type=Path, default=Path("outputs/drafters"), help="run folders")
    found.add_argument("--results", type=Path, default=RESULTS, help="tables and figures' data")
    found.set_defaults(module=module)
    return found


def parsed(found: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, and keeps the command for the result file, without its folders."""
    args = found.parse_args(words)
    given = sys.argv[1:] if words is None else words
    kept = [word for word in given if not word.startswith(("--out=", "--results="))]
    args.command = shlex.join(["python", "-m", args.module, *kept])
    return args


def write(name: str, about: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes ``name``-DATA-SAMPLING.json: what was run, and a row per run.

    Rows of an earlier file of the same size that were not run again stay, with their revision.
    """
    path = folder / f"{name}-{about['data']}-{about['sampling']}.json"
    made = {key: about[key] for key in ("revision", "command")}
    shared = {key: value for key, value in about.items() if key not in made}
    plain = [
        {k: asdict(v) if isinstance(v, Measured) else v for k, v in row.items()} | made
        for row in rows
    ]
    if path.is_file():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if {key: earlier.get(key) for key in shared} == shared:
            again = {_key(row): row for row in plain}
            old = [again.pop(_key(row), row) for row in earlier["rows"]]
            plain = old + list(again.values())
    write_json(path, {**shared, "clock": "simulated", "rows": plain})


def _key(row: Mapping[str, Any]) -> str:
    """What was run in a row."""
    left_out = ("measured", "revision", "command", "steps_gained", "shared", "target_rows", "kinds")
    return json.dumps({k: v for k, v in row.items() if k not in left_out}, sort_keys=True)


def read(
    name: str, folder: Path = RESULTS, workloads: Sequence[tuple[str, str]] = WORKLOADS
) -> list[dict[str, Any]]:
    """The contents of a script's results of ``workloads``, with ``Measured`` in their rows."""
    found = []
    for data, sampling in workloads:
        path = folder / f"{name}-{data}-{sampling}.json"
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            for row in content["rows"]:
                row["measured"] = row["measured"] and Measured(**row["measured"])
            found.append(content)
    return found


def _revision() -> str:
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
