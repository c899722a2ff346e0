"""Writes docs/support.md: which combinations are refused, and why.

    make support        (or: python -m tests.matrix.support)

runs every cell of the composition matrix and writes the page only if all of them hold.
"""

import re
import sys
import time
from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path

from specdec.config.options import options
from tests.matrix.cells import AXES, MAX_NEW_TOKENS, PROMPTS, all_cells, executors
from tests.matrix.outcomes import Kind, Outcome, check, composed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
_AXES = AXES[:-1]  # whether a cell is refused does not depend on its sampling
# Class names, options and layers in a message.
_DETAIL = re.compile(r"\b[A-Z]\w*[a-z]\w*|\b(?:source|policy|verifier|executor)=\w+|\[[\d, ]+\]")

Parts = tuple[str, ...]  # source, policy, verifier, executor
Box = tuple[tuple[str, ...], ...]  # options of each: all combinations of them


def survey() -> list[Outcome]:
    """Composes every cell without running it."""
    return [composed(cell) for cell in all_cells()]


def page(outcomes: Sequence[Outcome]) -> str:
    """The page's text; it depends on the outcomes and on nothing else."""
    refused: dict[Parts, str] = {}
    for outcome in outcomes:
        if outcome.kind is Kind.REFUSED:
            refused[tuple(getattr(outcome.cell, axis) for axis in _AXES)] = outcome.reason
    by_reason: dict[str, list[Parts]] = {}
    for parts, reason in refused.items():
        by_reason.setdefault(_DETAIL.sub("X", reason), []).append(parts)
    rows = [
        [*map(_options, box, _values()), refused[members[0]].replace("|", "\\|")]
        for members in by_reason.values()
        for box in _boxes(members, refused)
    ]
    lines = ["| " + " | ".join((*_AXES, "message")) + " |", "| --- " * 5 + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return _head(outcomes) + "\n" + "\n".join(lines) + "\n"


def _head(outcomes: Sequence[Outcome]) -> str:
    refused = sum(o.kind is Kind.REFUSED for o in outcomes)
    lengths = " and ".join(str(len(p.tokens)) for p in PROMPTS)
    return f"""\
# Which parts go together

Any source, policy, verifier and executor may be combined on the command line:

    specdec run source=suffix policy=chain executor=pipeline executor.stages=4 clock=simulated

Combinations in the table below are refused: the command ends with the message before anything is
decoded. All others run. With `verifier=match` they give the tokens of plain decoding. With
`verifier=rejection` this holds for greedy decoding, and sampled tokens have the same distribution.
Results of the other verifiers are labelled lossy.

`make support` writes this page. It composes every source x policy x verifier x executor x sampling
of `conf/` ({len(outcomes):,} cells, {refused:,} refused). Each of the others decodes
{len(PROMPTS)} prompts ({lengths} tokens) in one batch for {MAX_NEW_TOKENS} tokens with tiny random
models in float64. The tokens are compared with plain decoding, or under `rejection` with the other
executors, since `specdec verify` tests the distribution. Part of the cells also runs on executors
of several processes.

## Refused

All combinations of the options in a row are refused; "all but" excludes the options after it.
A message is that of one such combination; yours names the parts of your command.
"""


def _values() -> list[tuple[str, ...]]:
    return [tuple(options(axis)) if axis != "executor" else executors() for axis in _AXES]


def _boxes(members: Sequence[Parts], refused: Collection[Parts]) -> list[Box]:
    """Boxes of refused combinations that contain the members, as few as splits by source allow."""

    def is_refused(box: Box) -> bool:
        return all(parts in refused for parts in product(*box))

    box = tuple(
        tuple(value for value in values if value in {parts[axis] for parts in members})
        for axis, values in enumerate(_values())
    )
    if not is_refused(box):
        axis = next(axis for axis, values in enumerate(box) if len(values) > 1)
        halves = [[parts for parts in members if parts[axis] == value] for value in box[axis]]
        return [found for half in halves for found in _boxes(half, refused)]
    for axis, values in enumerate(_values()):  # "all" reads better than all but those met elsewhere
        larger = (*box[:axis], values, *box[axis + 1 :])
        if is_refused(larger):
            box = larger
    return [box]


def _options(chosen: Sequence[str], values: Sequence[str]) -> str:
    """The options as text; those left out where these are fewer."""
    if len(chosen) == len(values):
        return "all"
    others = [value for value in values if value not in chosen]
    if len(others) < len(chosen):
        return "all but " + ", ".join(others)
    return ", ".join(chosen)


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
