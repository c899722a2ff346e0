"""Writes docs/support.md: which combinations run, which are refused, and why.

    make support        (or: python -m tests.matrix.support)

runs every cell of the composition matrix and writes the page only if all of them hold.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from specdec.config.options import options
from tests.matrix.cells import MAX_NEW_TOKENS, PROMPTS, Cell, all_cells, executors
from tests.matrix.outcomes import Kind, Outcome, check, composed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"


def survey() -> list[Outcome]:
    """Composes every cell without running it."""
    return [composed(cell) for cell in all_cells()]


def page(outcomes: Sequence[Outcome]) -> str:
    """The page's text; it depends on the outcomes and on nothing else."""
    lines = [_head(outcomes)]
    reasons: dict[str, int] = {}
    groups: dict[str, list[str]] = {}
    for verifier in options("verifier"):
        found = {o.cell: o for o in outcomes if o.cell.verifier == verifier}
        groups.setdefault(_table(found, reasons), []).append(verifier)
    for table, verifiers in groups.items():
        title = ", ".join(f"`verifier={name}`" for name in verifiers)
        lines += [f"## {title}\n", table]
    lines.append("## Why a combination is refused\n\nWhat the command line says:\n")
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


def _head(outcomes: Sequence[Outcome]) -> str:
    refused = sum(o.kind is Kind.REFUSED for o in outcomes)
    prompts = f"{len(PROMPTS)} prompts of {', '.join(str(len(p.tokens)) for p in PROMPTS)} tokens"
    return f"""\
# Which parts go together

Written by `make support` from the composition matrix (`tests/matrix`); do not edit. The matrix is
every source x policy x verifier x executor x sampling in `conf/`: {len(outcomes)} cells, of which
{len(outcomes) - refused} run and {
        refused
    } are refused when they are composed, with the reason. None is skipped.
Each runs {prompts} in one batch for {MAX_NEW_TOKENS} tokens, in float64, on tiny random models.
A sample in which every option runs on every executor that has processes also runs on these.

- **exact**: every token equals plain decoding by transformers' own forward, with the same seed.
- **distribution**: under sampling, every token is distributed as under the target, so it need not
  equal plain decoding (greedily it does: exact). The matrix checks that the output is the same on
  every executor and in every batch, and possible; `specdec verify` tests the distribution.
- **lossy**: runs, and is labelled lossy wherever results are printed.
- a number: refused, for the reason under that number below.

Executors: {", ".join(f"`{name}`" for name in executors())}. Samplings: {
        ", ".join(f"`{name}`" for name in options("sampling"))
    }. Where they make no
difference they are not named; that is everywhere unless a table says otherwise.
"""


def _table(found: Mapping[Cell, Outcome], reasons: dict[str, int]) -> str:
    """One verifier's table, sources down and policies across; numbers new reasons."""
    policies = list(options("policy"))
    lines = [
        "| source | " + " | ".join(policies) + " |",
        "| --- |" + " --- |" * len(policies),
    ]
    here: dict[tuple[str, str], list[Outcome]] = {}
    for cell, outcome in found.items():
        here.setdefault((cell.source, cell.policy), []).append(outcome)
    for source in options("source"):
        cells = (here.get((source, policy), []) for policy in policies)
        texts = [_text(outcomes, ("executor", "sampling"), reasons) for outcomes in cells]
        lines.append(f"| {source} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def _text(here: Sequence[Outcome], axes: tuple[str, ...], reasons: dict[str, int]) -> str:
    """What to print for outcomes that differ in ``axes`` only; names the axes that matter."""
    kinds = {o.kind for o in here}
    refusals = {o.reason for o in here if o.kind is Kind.REFUSED}
    if kinds <= {Kind.EXACT, Kind.DISTRIBUTION}:
        return str(Kind.DISTRIBUTION if Kind.DISTRIBUTION in kinds else Kind.EXACT)
    if len(kinds) == 1 and len(refusals) <= 1:
        for reason in refusals:
            return str(reasons.setdefault(reason, len(reasons) + 1))
        return str(kinds.pop())
    axis, *rest = axes
    names = dict.fromkeys(getattr(o.cell, axis) for o in here)
    parts = {n: [o for o in here if getattr(o.cell, axis) == n] for n in names}
    texts = {n: _text(part, tuple(rest) or axes, reasons) for n, part in parts.items()}
    if len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def main() -> int:
    """Runs every cell, then writes the page."""
    start, outcomes = time.perf_counter(), []
    for number, cell in enumerate(all_cells(), 1):
        outcomes.append(check(cell))
        if number % 100 == 0 or number == len(all_cells()):
            seconds = time.perf_counter() - start
            print(f"{number} of {len(all_cells())} cells, {seconds:.0f} s", flush=True)
    PAGE.write_text(page(outcomes), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
