"""Counts of runs on the simulated clock, with intervals over prompts; tables and result files."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.reproduce.lab import Lab
from specdec.errors import UserError
from specdec.files import write_json
from specdec.metrics import RequestResult

RESULTS = Path(__file__).with_name("results")
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
_RESAMPLES, _LEVEL = 2000, 0.95
Part = Callable[[RequestResult], tuple[float, float]]


def _hits(result: RequestResult) -> tuple[float, float]:
    counts = result.counters
    return counts.hits, counts.hits + counts.misses


def _tokens(result: RequestResult) -> tuple[float, float]:
    lengths = result.counters.path_lengths
    return sum(length * num for length, num in lengths.items()), lengths.total()


PARTS: dict[str, Part] = {"hit rate": _hits, "tokens per pass": _tokens}
"""What is counted per prompt: (numerator, denominator)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run.

    Attributes:
        measure: a key of ``PARTS``.
        value, low, high: over all prompts, and its 95 % bootstrap interval over prompts.
        steps_per_token: of the executor; a fill of the pipeline per prompt is included.
        loop_share: see docs/metrics.md.
        tokens: number of generated tokens.
    """

    measure: str
    value: float
    low: float
    high: float
    steps_per_token: float
    loop_share: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}-{self.high:.3f})"


class Runs:
    """Runs configurations of one size; finished ones are read from disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Takes the arguments of ``parser``."""
        torch.set_num_threads(1)
        self._lab = Lab(folder=args.out, quick=False, say=lambda words: print(words, flush=True))
        self._size = (f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}")
        self.about = {
            "command": args.command,
            "revision": _revision(),
            "prompts": args.prompts,
            "tokens": args.tokens,
            "data": args.data,
            "sampling": args.sampling,
        }
        self._where = (f"data={args.data}", f"sampling={args.sampling}", "model=tiny", "threads=1")

    def measured(self, measure: str, *overrides: str) -> Measured | None:
        """Runs a configuration; None if it is refused."""
        try:
            outcome = self._lab.run(["clock=simulated", *self._where, *self._size, *overrides])
        except UserError as error:
            print(f"refused: {error}", flush=True)
            return None
        counted = np.array([PARTS[measure](result) for result in outcome.results], float)
        value, low, high = ratio(counted)
        return Measured(
            measure=measure,
            value=value,
            low=low,
            high=high,
            steps_per_token=float(outcome.summary["steps_per_token"]),
            loop_share=float(outcome.summary["loop_share"]),
            tokens=int(outcome.summary["new_tokens"]),
        )


def ratio(counted: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """(ratio of the sums, bounds of its bootstrap interval) of float64[P, 2], a row per prompt."""
    picks = np.random.default_rng(seed).integers(len(counted), size=(_RESAMPLES, len(counted)))
    sums = counted[picks].sum(1)
    low, high = np.quantile(
        sums[:, 0] / np.maximum(sums[:, 1], 1.0), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2]
    )
    total = counted.sum(0)
    return float(total[0] / max(total[1], 1.0)), float(low), float(high)


def parser(doc: str, module: str) -> argparse.ArgumentParser:
    """The arguments that all scripts have."""
    found = argparse.ArgumentParser(description=doc.splitlines()[0])
    found.add_argument("--prompts", type=int, default=16)
    found.add_argument("--tokens", type=int, default=128)
    found.add_argument("--data", default="humaneval")
    found.add_argument("--sampling", default="t06")
    found.add_argument("--out", type=Path, default=Path("outputs/drafters"), help="run folders")
    found.add_argument("--results", type=Path, default=RESULTS, help="tables and figures' data")
    found.add_argument("--images", type=Path, default=IMAGES, help="figures")
    found.set_defaults(module=module)
    return found


def parsed(found: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, and keeps the command for the result file."""
    args = found.parse_args(words)
    given = " ".join(sys.argv[1:] if words is None else words)
    args.command = f"python -m {args.module} {given}".strip()
    return args


def write(name: str, about: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes ``name``.json: what was run, and a row per run."""
    plain = [
        {k: asdict(v) if isinstance(v, Measured) else v for k, v in row.items()} for row in rows
    ]
    write_json(folder / f"{name}.json", {**about, "clock": "simulated", "rows": plain})


def _revision() -> str:
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
