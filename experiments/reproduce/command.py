"""``specdec reproduce``: a paper's table or figure, with the paper's values beside ours."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from experiments.reproduce.findings import Findings, claim_verdict
from experiments.reproduce.items import Item, all_items, choose
from experiments.reproduce.rendering import NONE, span_text
from experiments.reproduce.results import write_item
from specdec.cli.arguments import read_arguments
from specdec.errors import UserError
from specdec.report.provenance import provenance

HELP = """\
specdec reproduce [--list] [--all] [--quick] [--document] [NAME ...] [output_dir=DIR] [runs_dir=DIR]

Runs the experiment of a paper's table or figure and writes the results beside the paper's values:
Markdown, CSV, JSON and a PNG each. Measured, paced, simulated and computed figures have separate
columns.
Claims that cannot be reproduced are listed with the reason.

  NAME              a table or figure (specpipe/fig11), or all of a paper (specpipe)
  --all             every one
  --quick           few prompts and tokens; all of them in some minutes on two cores
  --paced           also the paced column of tables that have one: real time, a process per stage;
                    needs an otherwise idle machine
  --list            names, titles and what is missing
  --document        write docs/reproduction.md from the results checked in under experiments/
  output_dir=DIR    for <paper>/results/<name>.md, .csv, .json, .png (default outputs/reproduce)
  runs_dir=DIR      stores the runs of the tables; they are reused while models and code are
                    unchanged (default outputs/reproduce)
  record=FILE       a record.npz of your own models (`record=true`, docs/replay.md), used as a
                    further draft in every simulated table

SPECDEC_DATA names the folder of the data sets; tables that need it report if it is missing.

Examples
  specdec reproduce --list
  specdec reproduce specpipe/fig11
  specdec reproduce --all --quick
"""

_MOST_LINES = 20
_WIDTHS = (52, 34, 34, 12, 14)
"""Widest columns of the printed table: claim, paper, ours, kind, verdict."""

_FLAGS = ("--list", "--all", "--quick", "--paced", "--document")
_KEYS = {"output_dir": "outputs/reproduce", "runs_dir": "outputs/reproduce", "record": ""}


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status: 1 if a table failed."""
    arguments = read_arguments(words, flags=_FLAGS)
    if "--help" in arguments.flags:
        print(HELP, end="")
        return 0
    items = all_items()
    if "--list" in arguments.flags:
        _list(items)
        return 0
    if "--document" in arguments.flags:
        from experiments.reproduce.document import write_document

        print(write_document(items))
        return 0
    names, keys = _read_words(arguments.overrides)
    if "--all" in arguments.flags:
        names = names or list(items)
    if not names:
        raise UserError("name a table or figure, or --all: `specdec reproduce --list` shows them")
    chosen = choose(names, items)
    return _run_all(chosen, arguments.flags, keys, words)


def _read_words(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    keys = dict(_KEYS)
    names = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            names.append(word)
        elif key in _KEYS and value:
            keys[key] = value
        else:
            raise UserError(f"{word}: unknown key; use one of {', '.join(_KEYS)}")
    return names, keys


def _list(items: Mapping[str, Item]) -> None:
    width = max(len(name) for name in items)
    for name, item in items.items():
        print(f"{name:<{width}}  {item.stated.title}  [{item.status}]")


def _run_all(
    chosen: Sequence[Item], flags: Set[str], keys: Mapping[str, str], words: Sequence[str]
) -> int:
    import torch

    from experiments.reproduce.lab import Lab

    torch.set_num_threads(1)
    out, quick = Path(keys["output_dir"]), "--quick" in flags
    lab = Lab(
        folder=Path(keys["runs_dir"]),
        quick=quick,
        paced="--paced" in flags,
        own_record=_own_record(keys["record"]),
        say=lambda text: print(f"  run {text}", file=sys.stderr),
    )
    # Before any result is written, which may change the repository.
    facts = provenance(command=["specdec", "reproduce", *words], config={})
    began, cpu_began, failed = perf_counter(), process_time(), []
    for number, item in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {item.id}: {item.stated.title}", flush=True)
        start, cpu_start = perf_counter(), process_time()
        findings, error = _findings(item, lab)
        if error:
            failed.append(item.id)
        seconds, cpu_seconds = perf_counter() - start, process_time() - cpu_start
        conditions = conditions_of(item, quick, (seconds, cpu_seconds), facts)
        write_item(item, findings, out, conditions)
        for line in summary_lines(item, findings, out):
            print(f"  {line}")
        print(f"  {seconds:.1f} s ({cpu_seconds:.1f} s of CPU)", flush=True)
    spent = f"{perf_counter() - began:.0f} s ({process_time() - cpu_began:.0f} s of CPU)"
    print(f"{len(chosen)} tables and figures in {spent}, under {out}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _own_record(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text).expanduser()
    if path.suffix != ".npz" or not path.is_file():
        raise UserError(
            f"record={text}: not a record.npz; `specdec run ... record=true` writes one"
        )
    return path


def _findings(item: Item, lab: Any) -> tuple[Findings, bool]:
    """The item's findings, and whether its builder failed (the others continue)."""
    if not item.builder or item.absent:
        return Findings(missing=[item.status]), False
    try:
        return item.build(lab), False
    except UserError as error:
        return Findings(missing=[f"not run: {error}"]), True
    except Exception as error:
        traceback.print_exc()
        return Findings(missing=[f"failed: {type(error).__name__}: {error}"]), True


def conditions_of(
    item: Item, quick: bool, seconds: tuple[float, float], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Conditions of the figures: revision, command, machine, size, time.

    ``seconds`` of wall and CPU time exclude reused runs.
    """
    git, machine = facts["git"], facts["hardware"]
    revision = "unknown"
    if git:
        revision = git["revision"][:10] + (" with local changes" if git["dirty"] else "")
    prompts, tokens = item.size["quick" if quick else "full"]
    return {
        "size": f"{'quick' if quick else 'full'}: up to {prompts} prompts x {tokens} tokens",
        "revision": revision,
        "command": " ".join(facts["command"]),
        "machine": f"{machine['machine']}, {machine['cores']} cores, torch with 1 thread",
        "time": facts["time"],
        "seconds": round(seconds[0], 1),
        "cpu_seconds": round(seconds[1], 1),
    }


def summary_lines(item: Item, findings: Findings, out: Path) -> list[str]:
    """A table of at most ``_MOST_LINES`` lines: a line per claim, then what is left out."""
    page = f"page: {out / item.paper.name / 'results' / item.name}.md"
    rows = []
    for claim in item.stated.claims.values():
        outcome, kind, shown = claim_verdict(claim, findings.measures)
        rows.append(
            (claim.text, claim.stated, span_text(claim, shown) if shown else NONE, kind, outcome)
        )
    room = _MOST_LINES - 3
    more = []
    if len(rows) > room:
        left = Counter(row[-1] for row in rows[room:])
        text = ", ".join(f"{num} {outcome}" for outcome, num in left.items())
        more = [f"and {len(rows) - room} further claims: {text}"]
    if findings.missing:
        page += f"; {len(findings.missing)} parts missing, see there"
    return [*_aligned(("claim", "paper", "ours", "kind", "verdict"), rows[:room]), *more, page]


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text, each cell cut to its column's width."""
    if not rows:
        return []
    table = [headings, *rows]
    widths = [min(max(len(row[i]) for row in table), most) for i, most in enumerate(_WIDTHS)]
    return [
        "  ".join(f"{c[:w]:<{w}}" for c, w in zip(r, widths, strict=True)).rstrip() for r in table
    ]
