"""Runs of one strategy on the virtual clock, for the scripts of this folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.pipelines.theory import decode_counts, implied_tbt_ms
from specdec.cli.jobs import run_job_of
from specdec.compose import build_profile
from specdec.engine import prepare, stop_rules
from specdec.metrics import RequestResult, RunTotals, summarise
from specdec.pairs import HuggingFacePair, ModelPair
from specdec.report import write_json
from specdec.runners import PartsRunner, TokenPrompt


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy.

    Attributes:
        name: as printed.
        words: overrides of ``specdec run``.
        beside, between_hit, between_miss: draft passes, see ``decode_counts``.
    """

    name: str
    words: tuple[str, ...]
    beside: int = 0
    between_hit: float = 0.0
    between_miss: float = 0.0


class Bench:
    """Runs rows one by one, keeps what is finished in a folder, and loads models once."""

    def __init__(self, *, common: Sequence[str], out: Path) -> None:
        """Sets what all rows share.

        Args:
            common: overrides of every row.
            out: gets one JSON per row; a row that is there with the same configuration and weights
                is not run again.
        """
        self._common = tuple(common)
        self._out = out
        self._prepared: dict[str, tuple[ModelPair, list[TokenPrompt]]] = {}

    def run(self, row: Row, *extra: str) -> dict[str, Any]:
        """The row's summary, with ``implied_tbt_ms``, ``profile`` and ``outputs`` added.

        Also ``decode_tokens`` and ``decode_answers``, those after each request's first answer, and
        ``expansions``, where the policy counts its growth rounds.

        Args:
            row: what to run.
            extra: further overrides, e.g. the sampling.
        """
        words = ["clock=simulated", *self._common, *row.words, *extra]
        config = run_job_of(words).config
        label = "_".join([row.name, *extra]).translate(str.maketrans(" =.,/[]", "-------"))
        path = self._out / f"{label}.json"
        pair, prompts = self._prepare(config)
        key = {"config": config, "weights": _weights(pair)}
        if path.is_file():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found["key"] == key:
                return dict(found["summary"])
        runner = PartsRunner(cfg=config, pair=pair, stop=stop_rules(config, pair))
        results: list[RequestResult] = []
        totals = RunTotals.merge([runner.run([p], results.append) for p in prompts])
        runner.close()
        counts = decode_counts(
            results,
            totals,
            beside=row.beside,
            between_hit=row.between_hit,
            between_miss=row.between_miss,
        )
        summary = summarise(results, totals)
        summary["implied_tbt_ms"] = implied_tbt_ms(counts, build_profile(config["clock"]))
        summary["profile"] = config["clock"]["profile"]
        summary["expansions"] = getattr(runner.parts.policy, "expansions", None)
        summary["decode_tokens"], summary["decode_answers"] = counts.tokens, counts.answers
        summary["outputs"] = [list(result.output) for result in results]
        write_json(path, {"key": key, "summary": summary})
        return summary

    def _prepare(self, config: dict[str, Any]) -> tuple[ModelPair, list[TokenPrompt]]:
        key = json.dumps([config["model"], config["data"]], sort_keys=True)
        if key not in self._prepared:
            pair, prompts, _ = prepare(config)
            self._prepared[key] = (pair, prompts)
        return self._prepared[key]


def _weights(pair: ModelPair) -> list[float]:
    """Sums over the models' weights, which tell one training run from another; none without."""
    if not isinstance(pair, HuggingFacePair):
        return []
    models = (pair.target, pair.draft)
    return [float(sum(p.double().abs().sum() for p in m.parameters())) for m in models]
