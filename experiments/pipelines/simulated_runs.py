"""Runs of single strategies on the simulated clock, for scripts that check requirements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.pipelines.theory import decode_counts, implied_tbt_ms
from experiments.reproduce.lab import Lab
from specdec.clocks.build import build_profile


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy.

    Attributes:
        name: name in tables.
        overrides: overrides of ``specdec run``.
        beside, between_hit, between_miss: draft passes, see ``decode_counts``.
    """

    name: str
    overrides: tuple[str, ...]
    beside: int = 0
    between_hit: float = 0.0
    between_miss: float = 0.0


class Bench:
    """Runs rows; existing results of the same configuration, models and code are reused."""

    def __init__(self, *, common: Sequence[str], out: Path) -> None:
        """Sets the common overrides and the folder of the runs.

        Args:
            common: overrides of every row.
            out: folder of the runs.
        """
        self._common = tuple(common)
        self._lab = Lab(folder=out, quick=False)

    def run(self, row: Row, *extra: str) -> dict[str, Any]:
        """The row's summary, with ``implied_tbt_ms``, ``profile`` and ``outputs`` added.

        Also ``decode_tokens`` and ``decode_answers``, the tokens and answers after each request's
        first answer, and ``expansions`` if the policy counts its growth rounds.

        Args:
            row: the strategy.
            extra: further overrides, e.g. the sampling.
        """
        outcome = self._lab.run(["clock=simulated", *self._common, *row.overrides, *extra])
        counts = decode_counts(
            outcome.results,
            outcome.totals,
            beside=row.beside,
            between_hit=row.between_hit,
            between_miss=row.between_miss,
        )
        return {
            **outcome.summary,
            "loop_share": outcome.summary["loop_share"] or 0.0,  # None for synthetic tokens
            "implied_tbt_ms": implied_tbt_ms(counts, build_profile(outcome.config["clock"])),
            "profile": outcome.profile,
            "decode_tokens": counts.tokens,
            "decode_answers": counts.answers,
            "outputs": [list(result.output) for result in outcome.results],
        }


def print_check(text: str, holds: bool, required: str) -> None:
    """Prints whether a requirement is met."""
    print(f"  {'ok  ' if holds else 'MISS'} {text} (required: {required})", flush=True)
