"""``specdec reproduce``: a paper's table or figure, with the paper's values beside ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter

from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item, all_items, choose
from experiments.reproduce.rendering import SUMMARY, summary_rows
from experiments.reproduce.results import read_item, write_picture
from experiments.reproduce.running import Settings, revision_facts, run_items
from specdec.cli.arguments import Arguments, read_values
from specdec.errors import UserError
from specdec.parts.fields import Count, Text
from specdec.report.provenance import provenance

HELP = """\
specdec reproduce [--list] [--all] [--quick] [--paced] [--resume] [--redraw] [--document] [NAME ...]
                  [output_dir=DIR] [runs_dir=DIR] [jobs=N] [record=FILE]

Runs the experiment of a paper's table or figure and writes the results beside the paper's values:
Markdown, CSV, JSON and a PNG each. Measured, paced, simulated and computed figures have separate
columns.
Claims that cannot be reproduced are listed with the reason.

  NAME              a table or figure (specpipe/fig11), or all of a paper (specpipe)
  --all             every one
  --quick           few prompts and tokens; all of them in some minutes on two cores
  --paced           also the paced column of tables that have one: real time, a process per stage;
                    needs an otherwise idle machine
  --resume          keep results in output_dir that this revision, code and size have written
  --list            names, titles and what is missing
  --redraw          draw the pictures of stored results again, and run nothing
  --document        write docs/reproduction.md and the items' pages from the results checked in
                    under experiments/;
                    fails if a sentence in a stated.yaml contradicts the verdict of its claim
  output_dir=DIR    for <paper>/results/<name>.md, .csv, .json, .png (default outputs/reproduce)
  runs_dir=DIR      stores the runs of the tables; they are reused while models and code are
                    unchanged (default outputs/reproduce)
  jobs=N            items that measure no times run in N processes, one thread each (default 1)
  record=FILE       a record.npz of your own models (`record=true`, docs/replay.md), used as a
                    further draft in every simulated table

SPECDEC_DATA names the folder of the data sets; tables that need it report if it is missing.

Examples
  specdec reproduce --list
  specdec reproduce specpipe/fig11
  specdec reproduce --all --quick jobs=2
  specdec reproduce --all --paced --resume jobs=2 output_dir=experiments
"""

_WIDTHS = (52, 34, 34, 12, 14)
"""Widest columns of the printed table: claim, paper, ours, kind, verdict."""

_KEY = """\
kinds: measured and calibrated (simulated with fitted hits of such a pair) count; what-if: other
data, pair or baseline; stand-in: other models; input: the profile's own figure; construction,
formula: no run. inside, outside: the whole 95 % interval is, of the paper's window; undecided: it
crosses an end, or figures disagree"""

FLAGS = ("--list", "--all", "--quick", "--paced", "--resume", "--redraw", "--document")


@dataclass(frozen=True, kw_only=True)
class Keys:
    output_dir: Text = "outputs/reproduce"
    runs_dir: Text = "outputs/reproduce"
    record: Text | None = None
    jobs: Count = 1


def main(arguments: Arguments) -> int:
    """Runs the command; returns the exit status: 1 if a table failed."""
    items = all_items()
    if "--list" in arguments.flags:
        _list(items)
        return 0
    if "--document" in arguments.flags:
        from experiments.reproduce.document import write_document

        path, wrong = write_document(items)
        print(path)
        for line in wrong:
            print(f"a sentence of stated.yaml no longer holds: {line}", file=sys.stderr)
        return 1 if wrong else 0
    names, keys = read_values(arguments.overrides, Keys, "tables", most=inf, least=0)
    if "--all" in arguments.flags:
        names = names or list(items)
    if not names:
        raise UserError("name a table or figure, or --all: `specdec reproduce --list` shows them")
    if "--redraw" in arguments.flags:
        return _redraw(choose(names, items), Path(keys.output_dir))
    facts = provenance(command=["specdec", *sys.argv[1:]], config={})
    settings = Settings(
        out=Path(keys.output_dir),
        runs=Path(keys.runs_dir),
        facts={**facts, **revision_facts(facts)},
        quick="--quick" in arguments.flags,
        paced="--paced" in arguments.flags,
        resume="--resume" in arguments.flags,
        jobs=keys.jobs,
        record=_own_record(keys.record),
    )
    return _run_all(choose(names, items), settings)


def _list(items: Mapping[str, Item]) -> None:
    width = max(len(name) for name in items)
    for name, item in items.items():
        print(f"{name:<{width}}  {item.stated.title}  [{item.status}]")


def _redraw(chosen: Sequence[Item], out: Path) -> int:
    """Draws the items' pictures from their results in ``out``."""
    for item in chosen:
        stored = read_item(item, out)
        if stored is None:
            raise UserError(f"{item.id} has no results in {out}: run it, or name output_dir=")
        picture = item.draw(stored[0])
        print(write_picture(item, picture, out))
    return 0


def _run_all(chosen: Sequence[Item], settings: Settings) -> int:
    import torch

    torch.set_num_threads(1)
    began, failed, num = perf_counter(), [], 0
    for number, (item, done) in enumerate(run_items(chosen, settings), start=1):
        num = number
        print(f"[{number}] {item.id}: {item.stated.title}")
        for line in summary_lines(item, done.findings, settings.out):
            print(f"  {line}")
        seconds = f"{done.conditions['seconds']:.1f} s"
        kept = "; kept from an earlier run" if done.kept else ""
        print(f"  {seconds} ({done.conditions['cpu_seconds']:.1f} s of CPU){kept}", flush=True)
        if done.failed:
            failed.append(item.id)
    print(_KEY)
    print(f"{num} tables and figures in {perf_counter() - began:.0f} s, under {settings.out}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _own_record(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).expanduser()
    if path.suffix != ".npz" or not path.is_file():
        raise UserError(
            f"record={text}: not a record.npz; `specdec run ... record=true` writes one"
        )
    return path


def summary_lines(item: Item, findings: Findings, out: Path) -> list[str]:
    """A table with a line for each of the first claims, then what is left out."""
    page = f"page: {out / item.paper.name / 'results' / item.name}.md"
    rows, more = summary_rows(item, findings)
    if findings.missing:
        page += f"; {len(findings.missing)} parts missing, see there"
    return [*_aligned(SUMMARY, rows), *filter(None, [more]), page]


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text, each cell cut to its column's width."""
    if not rows:
        return []
    table = [headings, *rows]
    widths = [min(max(len(row[i]) for row in table), most) for i, most in enumerate(_WIDTHS)]
    return [
        "  ".join(f"{c[:w]:<{w}}" for c, w in zip(r, widths, strict=True)).rstrip() for r in table
    ]
