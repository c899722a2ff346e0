"""Reports the outcomes of the checks, as a printed table and as ``verify.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from specdec.types import Lossless

if TYPE_CHECKING:
    from pandas import DataFrame

RESULT_FILE = "verify.json"

_LABELS = {"skipped": "[dim]-[/]", "passed": "[green]passed[/]", "failed": "[bold red]FAILED[/]"}
_WIDTH = 110  # columns, if the output is not a terminal


class Skipped(Exception):
    """Says why a check does not apply to this configuration."""


Outcome = tuple[bool | None, str]  # of a check function: ``passed`` and ``detail`` of ``Check``


@dataclass(frozen=True, slots=True)
class Check:
    name: str  # see docs/verify.md
    passed: bool | None  # None if it was skipped
    detail: str  # what was compared, or the first differences

    @property
    def result(self) -> str:
        if self.passed is None:
            return "skipped"
        return "passed" if self.passed else "failed"


@dataclass(frozen=True, slots=True)
class Crash:
    checks: tuple[str, ...]  # names of the checks that it ended
    error: str  # type and message in one line
    part: str  # the part that raised, with class and method; empty if unknown
    request: int | None  # the request being processed; None if unknown
    step: int | None  # the decode loop's (a commit counts it up); None outside the loop
    traceback: str  # as Python prints it

    @property
    def hung(self) -> bool:
        return self.error.startswith(TimeoutError.__name__)

    @property
    def where(self) -> str:
        known = [self.part] if self.part else []
        known += [f"request {self.request}"] if self.request is not None else []
        known += [f"step {self.step}"] if self.step is not None else []
        return f" ({', '.join(known)})" if known else ""


@dataclass(frozen=True, slots=True)
class Report:
    strategy: str
    claims: Lossless  # what the verifier declares
    checks: tuple[Check, ...]  # in the order in which they ran
    seconds: float = 0.0
    errors: tuple[Crash, ...] = ()  # each error of the strategy once

    @property
    def lossless(self) -> bool:
        return self.claims is not Lossless.LOSSY and not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if check.passed is False)

    @property
    def verdict(self) -> str:
        if self.claims is Lossless.LOSSY:
            return f"{self.strategy} is lossy: its verifier does not keep the target's output"
        if self.failed:
            return f"{self.strategy} is NOT lossless: {', '.join(self.failed)} failed"
        how = "token for token" if self.claims is Lossless.TOKEN else "in distribution"
        return f"{self.strategy} is lossless {how}"

    def frame(self) -> DataFrame:
        """Returns a pandas frame with one row per check: ``check``, ``result``, ``detail``."""
        import pandas as pd

        rows = [(c.name, c.result, c.detail) for c in self.checks]
        return pd.DataFrame(rows, columns=["check", "result", "detail"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "lossless": self.lossless,
            "strategy": self.strategy,
            "claims": self.claims.value,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 2),
            "checks": [{**asdict(check), "result": check.result} for check in self.checks],
            "errors": [asdict(crash) for crash in self.errors],
        }


def print_report(
    report: Report, conditions: Mapping[str, Any], console: Console | None = None
) -> None:
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH)
    settings = ", ".join(f"{key}={value}" for key, value in conditions.items())
    console.print(f"specdec verify: {settings}", highlight=False, markup=False)
    columns = Column("check", no_wrap=True), Column("result", no_wrap=True), "detail"
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for check in report.checks:
        table.add_row(check.name, _LABELS[check.result], escape(check.detail))
    console.print(table)
    if report.errors:
        console.print(f"tracebacks are in {RESULT_FILE}, under errors", highlight=False)
    style = "bold green" if report.lossless else "bold red"
    console.print(f"{report.verdict} ({report.seconds:.0f} s)", style=style, highlight=False)


def joined_details(details: Sequence[str], *, limit: int = 3) -> str:
    more = [f"and {len(details) - limit} more"] if len(details) > limit else []
    return "; ".join([*details[:limit], *more])


def outcome(problems: Sequence[str], detail: str) -> Outcome:
    """Returns a pass with ``detail`` if ``problems`` is empty, else a failure with the first."""
    return (False, joined_details(problems)) if problems else (True, detail)
