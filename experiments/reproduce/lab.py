"""Runs behind tables and figures: each in a folder of its own, once.

A folder is named by a hash of the resolved configuration, the models' weights and the code. It
holds config.json, requests.jsonl and summary.json; a run that is there is not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import specdec
from specdec.config.comparison import compose_comparison
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals, summarise
from specdec.metrics.compare import speed_ratio_interval
from specdec.pairs import HuggingFacePair, ModelPair, ReplayModels
from specdec.report import RequestWriter, plain, read_requests, write_json
from specdec.runs.jobs import compare_jobs, prepare, run_job, stop_rules
from specdec.runs.runners import PartsRunner, TokenPrompt

_NOT_OF_RUNS = {"cli", "report", "train", "verify", "trace", "profiling"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One finished run.

    Attributes:
        config: resolved.
        summary: every metric of DESIGN 7; ``loop_share`` is the record's for replays, None where
            tokens are made up.
        results, totals: what the summary is derived from.
        folder: where it lies.
    """

    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    results: tuple[RequestResult, ...]
    totals: RunTotals
    folder: Path

    @property
    def tbt_ms(self) -> float:
        """Mean milliseconds between tokens."""
        return float(self.summary["tbt_ms_mean"])

    @property
    def profile(self) -> str:
        """Name of the latency profile."""
        return str(self.config["clock"].get("profile", ""))


class _Silent:
    """Progress that nobody watches."""

    def phase(self, label: str, total: int | None) -> None: ...

    def advance(self, count: int = 1, detail: str = "") -> None: ...

    def note(self, text: str) -> None: ...


class Lab:
    """Runs strategies for the builders of tables and figures."""

    def __init__(
        self,
        *,
        folder: Path,
        quick: bool,
        paced: bool = False,
        own_record: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Opens a lab.

        Args:
            folder: where run folders are kept between calls.
            quick: small sizes.
            paced: also the runs on a paced clock, in real time on processes of their own.
            own_record: a record.npz of the user's models, a further draft of simulated tables.
            say: told of each run before it starts.
        """
        self.folder = folder
        self.quick = quick
        self.paced = paced
        self.own_record = own_record
        self._say = say
        self._prepared: dict[str, tuple[ModelPair, list[TokenPrompt]]] = {}

    def run(self, words: Sequence[str]) -> Outcome:
        """Runs one strategy in this process, prompts one at a time unless they share batches.

        Args:
            words: overrides of ``specdec run``; a later one wins.
        """
        config = run_job_of(_last_wins(words)).config
        pair, prompts = self._prepare(config)
        key = {"config": config, "models": _identity(pair), "code": code_hash()}
        folder = self.folder / "runs" / _hash(key)
        path, done = folder / "requests.jsonl", folder / "summary.json"
        if not done.is_file():
            self._say(" ".join(w for w in words if not w.startswith("model.record=")))
            path.unlink(missing_ok=True)
            write_json(folder / "config.json", key)
            expansions = _decode(config, pair, prompts, path)
            write_json(done, {**_summary(pair, path), "expansions": expansions})
        results, totals = _read(path)
        summary = json.loads(done.read_text(encoding="utf-8"))
        return Outcome(
            config=config, summary=summary, results=results, totals=totals, folder=folder
        )

    def compare(self, words: Sequence[str]) -> dict[str, Any]:
        """``specdec compare``: strategies interleaved on the same prompts, by measured time.

        Returns:
            The content of ``comparison.json``, with ``folder``.
        """
        comparison = compose_comparison(_last_wins(words))
        key = {"config": comparison.config, "code": code_hash()}
        folder = self.folder / "compared" / _hash(key)
        path = folder / "comparison.json"
        if not path.is_file():
            self._say(" ".join(words))
            (folder / "requests.jsonl").unlink(missing_ok=True)
            configs = [job.config for job in comparison.jobs]
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                compare_jobs(configs, folder, comparison.repeats, _Silent())
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {**found, "folder": folder}

    def traced(self, words: Sequence[str]) -> Path:
        """A run folder with trace.json and trees.json."""
        return self._job([*words, "trace=true"], "traced", "trace.json")

    def record(self, words: Sequence[str]) -> Path:
        """Records real models once; returns the path of its record.npz."""
        words = ["strategy=speculative", "model=tiny", *words, "record=true"]
        return self._job(words, "records", "record.npz") / "record.npz"

    def models(self) -> ModelPair:
        """The bundled pair, loaded."""
        config = run_job_of(["strategy=speculative", "model=tiny", "data=stdlib", "data.limit=1"])
        return self._prepare(config.config)[0]

    def _job(self, words: Sequence[str], kind: str, wanted: str) -> Path:
        config = run_job_of(_last_wins(words)).config
        pair, _ = self._prepare(config)
        key = {"config": config, "models": _identity(pair), "code": code_hash()}
        folder = self.folder / kind / _hash(key)
        if not (folder / wanted).is_file():
            self._say(f"{kind}: {' '.join(words)}")
            (folder / "requests.jsonl").unlink(missing_ok=True)
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                run_job(config, folder, _Silent())
        return folder

    def _prepare(self, config: Mapping[str, Any]) -> tuple[ModelPair, list[TokenPrompt]]:
        wanted = [config["model"], config["data"], config["max_new_tokens"], config["seed"]]
        key = json.dumps(wanted, sort_keys=True)
        if key not in self._prepared:
            pair, prompts, _ = prepare(config)
            self._prepared[key] = (pair, prompts)
        return self._prepared[key]


def speed_ratio(fast: Outcome, slow: Outcome) -> tuple[float, float | None, float | None]:
    """How many times faster ``fast`` decodes, and the 95 % interval over the prompts of both.

    Raises:
        UserError: the two decoded different tokens or prompts, so no ratio means anything.
    """
    mine = {result.id: result.output for result in fast.results}
    theirs = {result.id: result.output for result in slow.results}
    if mine != theirs:
        raise UserError("two rows of one table decoded different tokens: no ratio is printed")
    interval = speed_ratio_interval(fast.results, slow.results)
    low, high = interval if interval is not None else (None, None)
    return slow.tbt_ms / fast.tbt_ms, low, high


@cache
def code_hash() -> str:
    """Of the package's source, without what no run's tokens or times come from."""
    root = Path(specdec.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in _NOT_OF_RUNS:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> tuple[tuple[RequestResult, ...], RunTotals]:
    records = read_requests(path)
    totals = RunTotals.merge([r.totals for r in records if r.totals is not None])
    return tuple(record.result for record in records), totals


def _summary(pair: ModelPair, path: Path) -> dict[str, Any]:
    """The run's metrics; ``loop_share`` is the record's, or None where tokens are made up."""
    summary = summarise(*_read(path))
    if isinstance(pair, ReplayModels):
        summary["loop_share"] = pair.about.get("loop_share")
    elif not isinstance(pair, HuggingFacePair):
        summary["loop_share"] = None
    return summary


def _decode(
    config: Mapping[str, Any], pair: ModelPair, prompts: Sequence[TokenPrompt], path: Path
) -> Any:
    """Runs and writes down the requests; returns the growth rounds of policies that count them."""
    runner = PartsRunner(cfg=config, pair=pair, stop=stop_rules(config, pair))
    groups = [[p] for p in prompts] if config["batch_size"] == 1 else [list(prompts)]
    try:
        with RequestWriter(path) as writer:
            for group in groups:
                found: list[RequestResult] = []
                totals = runner.run(group, found.append)
                for i, result in enumerate(found):
                    writer.write(runner.name, result, totals=totals if i == 0 else None)
    finally:
        runner.close()
    return getattr(runner.parts.policy, "expansions", None)


def _identity(pair: ModelPair) -> Any:
    """What tells one training run or record from another; None where nothing is loaded."""
    if isinstance(pair, ReplayModels):
        return plain(pair.about)
    if not isinstance(pair, HuggingFacePair):
        return None
    models = (pair.target, pair.draft)
    return [float(sum(p.double().abs().sum() for p in m.parameters())) for m in models if m]


def _last_wins(words: Sequence[str]) -> list[str]:
    """Overrides without those that a later one of the same key replaces."""
    return list({word.partition("=")[0]: word for word in words}.values())


def _hash(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
