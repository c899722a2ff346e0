"""Runs of one strategy on the virtual clock, for the scripts that hold them against bars."""

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
        name: as printed.
        words: overrides of ``specdec run``.
        beside, between_hit, between_miss: draft passes, see ``decode_counts``.
    """

    name: str
    overrides: tuple[str, ...]
    beside: int = 0
    between_hit: float = 0.0
    between_miss: float = 0.0


class Bench:
    """Runs rows one by one; a row that is in its folder with the same models is not run again."""

    def __init__(self, *, common: Sequence[str], out: Path) -> None:
        """Sets what all rows share.

        Args:
            common: overrides of every row.
            out: keeps the runs.
        """
        self._common = tuple(common)
        self._lab = Lab(folder=out, quick=False)

    def run(self, row: Row, *extra: str) -> dict[str, Any]:
        """The row's summary, with ``implied_tbt_ms``, ``profile`` and ``outputs`` added.

        Also ``decode_tokens`` and ``decode_answers``, those after each request's first answer, and
        ``expansions``, where the policy counts its growth rounds.

        Args:
            row: what to run.
            extra: further overrides, e.g. the sampling.
        """
        done = self._lab.run(["clock=simulated", *self._common, *row.overrides, *extra])
        counts = decode_counts(
            done.results,
            done.totals,
            beside=row.beside,
            between_hit=row.between_hit,
            between_miss=row.between_miss,
        )
        return {
            **done.summary,
            "loop_share": done.summary["loop_share"] or 0.0,  # None where tokens are made up
            "implied_tbt_ms": implied_tbt_ms(counts, build_profile(done.config["clock"])),
            "profile": done.profile,
            "decode_tokens": counts.tokens,
            "decode_answers": counts.answers,
            "outputs": [list(result.output) for result in done.results],
        }


def say_bar(text: str, holds: bool, wanted: str) -> None:
    """Prints whether a bar is met."""
    print(f"  {'ok  ' if holds else 'MISS'} {text} (bar: {wanted})", flush=True)
