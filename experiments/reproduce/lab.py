"""Runs of the tables and figures, cached on disk.

Each run has a folder named by a hash of the resolved configuration, the models' weights and the
code. It contains config.json, requests.jsonl and summary.json; an existing run is not repeated.
Several processes may share a folder of runs: one at a time works on a run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import conf
import specdec
from specdec.config.job import compose_comparison, run_job_of
from specdec.errors import UserError
from specdec.files import plain, write_json
from specdec.metrics import RequestResult, RunTotals, summarise
from specdec.metrics.compare import speed_ratio_interval
from specdec.models.bundled import family_path
from specdec.pairs import HuggingFacePair, ModelPair
from specdec.pairs.recorded import ReplayModels
from specdec.report.results import RequestRecord, RequestWriter, read_requests
from specdec.runs.jobs import compare_jobs, prepare, run_job, stop_rules
from specdec.runs.progress import Progress
from specdec.runs.runners import PartsRunner, TokenPrompt

_WITHOUT_EFFECT = {"certify", "cli", "profiling", "report", "trace", "train"}
"""Packages of ``specdec`` on which no token or time of a run depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One finished run.

    Attributes:
        summary: every metric (docs/metrics.md); ``loop_share`` is the record's for replays, None
            for synthetic tokens.
        results, totals: the raw counts of the summary.
    """

    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    results: tuple[RequestResult, ...]
    totals: RunTotals
    folder: Path

    @property
    def tbt_ms(self) -> float:
        return float(self.summary["tbt_ms_mean"])

    @property
    def profile(self) -> str:
        return str(self.config["clock"].get("profile", ""))


@dataclass(kw_only=True)
class Lab:
    """Runs strategies for the builders of tables and figures.

    Attributes:
        paced: also run on a paced clock, in real time over processes.
        own_record: a record.npz of the user's models, a further draft of simulated tables.
        say: called with a line before each run.
    """

    folder: Path
    quick: bool
    paced: bool = False
    own_record: Path | None = None
    say: Callable[[str], None] = lambda _: None
    _prepared: dict[str, tuple[ModelPair, list[TokenPrompt]]] = field(default_factory=dict)

    def run(self, overrides: Sequence[str]) -> Outcome:
        """Runs one strategy in this process, one prompt at a time unless ``batch_size`` is above 1.

        Args:
            overrides: overrides of ``specdec run``; a later one wins.
        """
        config = run_job_of(_last_wins(overrides)).config
        pair, prompts = self._prepare(config)
        key = {"config": config, "models": _identity(pair, config)}

        def decode(folder: Path) -> None:
            path = folder / "requests.jsonl"
            write_json(folder / "config.json", key)
            expansions = _decode(config, pair, prompts, path)
            write_json(folder / "summary.json", {**_summary(pair, path), "expansions": expansions})

        text = " ".join(w for w in overrides if not w.startswith("model.record="))
        folder = self._once("runs", key, "summary.json", text, decode)
        results, totals = _read(folder / "requests.jsonl")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return Outcome(
            config=config, summary=summary, results=results, totals=totals, folder=folder
        )

    def compare(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Runs ``specdec compare``: strategies interleaved on the same prompts.

        Returns:
            The content of ``comparison.json``, with ``folder``.
        """
        comparison = compose_comparison(_last_wins(overrides))

        def compared(folder: Path) -> None:
            configs = [job.config for job in comparison.jobs]
            compare_jobs(configs, folder, comparison.repeats, Progress())

        key, text = {"config": comparison.config}, " ".join(overrides)
        folder = self._once("compared", key, "comparison.json", text, compared)
        content = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
        return {**content, "folder": folder}

    def traced(self, overrides: Sequence[str]) -> Path:
        """Runs with a trace; returns the folder with trace.json and trees.json."""
        return self._job([*overrides, "trace=true"], "traced", "trace.json")

    def record(self, overrides: Sequence[str]) -> Path:
        """Records real models once; returns the path of its record.npz."""
        overrides = ["strategy=speculative", "model=tiny", *overrides, "record=true"]
        return self._job(overrides, "records", "record.npz") / "record.npz"

    def models(self) -> ModelPair:
        config = run_job_of(["strategy=speculative", "model=tiny", "data=stdlib", "data.limit=1"])
        return self._prepare(config.config)[0]

    def _job(self, overrides: Sequence[str], kind: str, result_file: str) -> Path:
        config = run_job_of(_last_wins(overrides)).config
        pair, _ = self._prepare(config)
        key, text = {"config": config, "models": _identity(pair, config)}, " ".join(overrides)

        def done(folder: Path) -> None:
            run_job(config, folder, Progress())

        return self._once(kind, key, result_file, f"{kind}: {text}", done)

    def _once(
        self,
        kind: str,
        key: Mapping[str, Any],
        result: str,
        text: str,
        work: Callable[[Path], None],
    ) -> Path:
        """The folder of a run, done once; what an interrupted one has left is deleted."""
        key = {**key, "code": code_hash()}
        folder = self.folder / kind / _hash(key)
        with _locked(folder):
            if not (folder / result).is_file():
                self.say(text)
                (folder / "requests.jsonl").unlink(missing_ok=True)
                with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                    work(folder)
        return folder

    def _prepare(self, config: Mapping[str, Any]) -> tuple[ModelPair, list[TokenPrompt]]:
        values = [config[name] for name in ("model", "data", "max_new_tokens", "seed")]
        key = json.dumps(values, sort_keys=True)
        if key not in self._prepared:
            pair, prompts, _ = prepare(config)
            self._prepared[key] = (pair, prompts)
        return self._prepared[key]


def speed_ratio(fast: Outcome, slow: Outcome) -> tuple[float, float | None, float | None]:
    """How many times faster ``fast`` decodes, and the 95 % interval over the prompts of both.

    Raises:
        UserError: the two runs decoded different tokens or prompts, so a ratio is meaningless.
    """
    outputs, others = ({r.id: r.output for r in run.results} for run in (fast, slow))
    if outputs != others:
        raise UserError("two rows of one table decoded different tokens: no ratio is printed")
    interval = speed_ratio_interval(fast.results, slow.results)
    low, high = interval if interval is not None else (None, None)
    return slow.tbt_ms / fast.tbt_ms, low, high


@cache
def code_hash() -> str:
    """Hash of the latency profiles and the package's source without ``_WITHOUT_EFFECT``."""
    root = Path(specdec.__file__).parent
    sources = [p for p in root.rglob("*.py") if p.relative_to(root).parts[0] not in _WITHOUT_EFFECT]
    profiles = Path(conf.__file__).parent.glob("profile/*.yaml")
    digest = hashlib.sha256()
    for path in [*sorted(sources), *sorted(profiles)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time work on a run."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> tuple[tuple[RequestResult, ...], RunTotals]:
    records = read_requests(path)
    totals = RunTotals.merge([r.totals for r in records if r.totals is not None])
    return tuple(record.result for record in records), totals


def _summary(pair: ModelPair, path: Path) -> dict[str, Any]:
    """The run's metrics; ``loop_share`` is the record's for replays, None for synthetic tokens."""
    summary = summarise(*_read(path))
    if isinstance(pair, ReplayModels):
        summary["loop_share"] = pair.about.get("loop_share")
    elif not isinstance(pair, HuggingFacePair):
        summary["loop_share"] = None
    return summary


def _decode(
    config: Mapping[str, Any], pair: ModelPair, prompts: Sequence[TokenPrompt], path: Path
) -> Any:
    """Runs and writes the requests; returns the expansion counts of policies that have them."""
    runner = PartsRunner(cfg=config, pair=pair, stop=stop_rules(config, pair))
    groups = [[p] for p in prompts] if config["batch_size"] == 1 else [list(prompts)]
    try:
        with RequestWriter(path) as writer:
            for group in groups:
                results: list[RequestResult] = []
                totals = runner.run(group, results.append)
                for i, result in enumerate(results):
                    counted = totals if i == 0 else None
                    writer.write(RequestRecord(runner.name, 0, result, counted))
    finally:
        runner.close()
    return getattr(runner.parts.policy, "expansions", None)


def _identity(pair: ModelPair, config: Mapping[str, Any]) -> Any:
    """Distinguishes trained models, heads and records; None for synthetic models."""
    if isinstance(pair, ReplayModels):
        return plain(pair.about)
    if not isinstance(pair, HuggingFacePair):
        return None
    models = [pair.target, *([pair.draft] if config["model"].get("draft") else [])]
    sums = [float(sum(p.double().abs().sum() for p in m.parameters())) for m in models]
    folders = [config["model"].get(name) for name in ("eagle_head", "exit_heads", "translated")]
    return [*sums, *(_digest(Path(family_path(name))) for name in folders if name)]


def _digest(folder: Path) -> str:
    """Hash of the weights and configurations in a folder; of nothing if it does not exist."""
    found = hashlib.sha256()
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("config.json"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _last_wins(overrides: Sequence[str]) -> list[str]:
    return list({word.partition("=")[0]: word for word in overrides}.values())


def _hash(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
