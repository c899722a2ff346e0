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
from typing import Any, Literal

import numpy as np
import torch

from experiments.drafters.known_texts import KnownText, KnownTexts
from experiments.reproduce.lab import Lab, Outcome
from specdec.errors import UserError
from specdec.files import write_json
from specdec.metrics import RequestResult
from specdec.metrics.loops import loop_share
from specdec.pairs import ModelPair, PretrainedPair
from specdec.runs.runners import TokenPrompt

RESULTS = Path(__file__).with_name("results")
WORKLOADS = tuple((d, s) for s in ("t06", "no_repeat4") for d in ("humaneval", "gsm8k"))
"""(data, sampling) in the order of the pages."""

_RESAMPLES, _LEVEL = 2000, 0.95
Part = Callable[[RequestResult], tuple[float, float]]
Target = Literal["real", "texts", "at once", "spoiled"]


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
        loop_share: see docs/metrics.md.
        tokens: number of generated tokens.
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


class _TextsLab(Lab):
    """Runs whose target writes the texts of one run of plain decoding.

    Attributes:
        plain: runs the target itself.
    """

    def __init__(self, plain: Lab, words: Sequence[str], **planted: bool) -> None:
        """Takes the laboratory and the overrides of plain decoding.

        Args:
            plain: runs the target itself; its folder has the folders of these runs.
            words: overrides of plain decoding.
            planted: see ``KnownTexts``.
        """
        folder = plain.folder / ("-".join(planted) or "texts")
        super().__init__(folder=folder, quick=False, say=_say)
        self.plain, self._words, self._planted = plain, words, planted
        self._texts: dict[int, KnownText] = {}
        self._known: dict[int, KnownTexts] = {}

    def _prepare(self, config: Mapping[str, Any]) -> tuple[ModelPair, list[TokenPrompt]]:
        pair, prompts = super()._prepare(config)
        assert isinstance(pair, PretrainedPair)
        if not self._texts:
            outputs = {r.id: r.output for r in self.plain.run(self._words).results}
            for p in prompts:
                tokens = np.concatenate([p.tokens, np.array(outputs[p.id], np.int64)])
                self._texts[p.id] = KnownText(tokens)
        if id(pair) not in self._known:
            self._known[id(pair)] = KnownTexts(pair, self._texts, **self._planted)
        self._known[id(pair)].early = bool(config["source"].get("early"))
        return self._known[id(pair)], prompts


def _say(words: str) -> None:
    print(words, flush=True)


class Runs:
    """Runs configurations of one size; finished ones are read from disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Takes the arguments of ``parser``."""
        torch.set_num_threads(1)
        size = (f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}")
        where = (f"data={args.data}", f"sampling={args.sampling}", "model=tiny", "threads=1")
        self._common = ("clock=simulated", *where, *size)
        plain = Lab(folder=args.out, quick=False, say=_say)
        words = [*self._common, "strategy=ar"]
        self._labs: dict[Target, Lab] = {
            "real": plain,
            "texts": _TextsLab(plain, words),
            "at once": _TextsLab(plain, words, at_once=True),
            "spoiled": _TextsLab(plain, words, at_once=True, spoiled=True),
        }
        self.about = {
            "command": args.command,
            "revision": _revision(),
            "prompts": args.prompts,
            "tokens": args.tokens,
            "data": args.data,
            "sampling": args.sampling,
        }

    def counted(self, *overrides: str, target: Target = "texts") -> Outcome:
        """Runs a configuration, or reads its run.

        Args:
            overrides: of ``specdec run``.
            target: "texts": the target's tokens come from one run of plain decoding, with the same
                counts (``known_texts``); "real": for sources that compute layers of the target;
                "at once": as "texts", with hidden states that leave the first stage; "spoiled": the
                same, and they are wrong.

        Raises:
            UserError: the library refuses it.
        """
        return self._labs[target].run([*self._common, *overrides])

    def measured(self, measure: str, *overrides: str, target: Target = "texts") -> Measured | None:
        """A key of ``PARTS`` of a configuration; None if it is refused. See ``counted``."""
        start = process_time()
        try:
            outcome = self.counted(*overrides, target=target)
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


def ratio(counted: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """(ratio of the sums, bounds of its bootstrap interval) of float64[P, 2], a row per prompt."""
    return _interval(counted, lambda sums: sums[..., 0] / np.maximum(sums[..., 1], 1.0), seed)


def difference(one: Measured, other: Measured, seed: int = 0) -> tuple[float, float, float]:
    """(one - other, bounds of its bootstrap interval) over the prompts of both, in pairs."""
    both = np.concatenate([np.array(one.counts), np.array(other.counts)], axis=1)  # [P, 4]
    floor = lambda column: np.maximum(column, 1.0)  # noqa: E731
    return _interval(
        both, lambda s: s[..., 0] / floor(s[..., 1]) - s[..., 2] / floor(s[..., 3]), seed
    )


def quotient(one: Measured, other: Measured, seed: int = 0) -> tuple[float, float, float]:
    """(one / other, bounds of its bootstrap interval) over the prompts of both, in pairs."""
    both = np.concatenate([np.array(one.counts), np.array(other.counts)], axis=1)  # [P, 4]
    return _interval(both, lambda s: s[..., 0] * s[..., 3] / (s[..., 1] * s[..., 2]), seed)


def _interval(
    counted: np.ndarray, of: Callable[[np.ndarray], Any], seed: int
) -> tuple[float, float, float]:
    """(value, bounds of its bootstrap interval) of a function of sums over prompts."""
    picks = np.random.default_rng(seed).integers(len(counted), size=(_RESAMPLES, len(counted)))
    low, high = np.quantile(of(counted[picks].sum(1)), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(of(counted.sum(0))), float(low), float(high)


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
