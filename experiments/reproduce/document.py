"""Writes ``docs/reproduction.md``: every claim, our figure and why they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reproduce.findings import MISSING, Findings, Measure, of_claim, verdict
from experiments.reproduce.items import Item
from experiments.reproduce.rendering import NONE, grid, value_text
from experiments.reproduce.results import read_item
from experiments.reproduce.stated import ROOT, Claim
from specdec.files import write_text

_HEAD = """\
# Reproduction of the papers

Here you can look up every table and figure of the five papers beside the result of this library,
and run any of them again:

    specdec reproduce --quick specpipe/fig7

writes `outputs/reproduce/specpipe/results/fig7.md` (and .csv, .json, .png) and prints a line per
claim. `specdec reproduce --all --quick` runs all of them at a small size. The flag `--document`
writes this page from the results under `experiments/<paper>/results/`, where each table and figure
has its page.

The kinds of figures are not comparable with each other:

- *measured*: real models on one machine's CPU, times or exact counts;
- *paced*: real processes paced by a latency profile;
- *simulated*: a profile's virtual clock, with hits that are replayed from records of the bundled
  pair (7M target, 1.2M draft; they show the effect of a schedule, not the acceptance of Llama),
  synthetic by a stated law, or traced (accepted lengths of Llama-3.1-8B);
- *formula*: arithmetic on the paper's own figures or on a law.

Intervals are 95 % bootstrap intervals over prompts; all rows of a table decode the same prompts.
`loop_share` is the share of generated tokens that end an 8-gram generated before: loops flatter
every speculative method. A range includes its ends; a single number is met within 5 %, unless
`experiments/<paper>/stated.yaml` states another tolerance. *known* and *reconstructed* mark
stated values that the available text lacks; *independent* are measurements of other groups.

No profile and no law was fitted to a stated ratio.
"""


def write_document(items: Mapping[str, Item], root: Path = ROOT) -> Path:
    """Writes the page; returns its path."""
    lines = [_HEAD]
    results = {name: read_item(item, root) for name, item in items.items()}
    lines += [*_spent(results), *_summary(items, results)]
    for paper in dict.fromkeys(item.paper.name for item in items.values()):
        of_paper = [item for item in items.values() if item.paper.name == paper]
        lines += [f"## {of_paper[0].paper.title} ({of_paper[0].paper.reference})", ""]
        for item in of_paper:
            lines += _section(item, results[item.id])
    path = root.parent / "docs" / "reproduction.md"
    return write_text(path, "\n".join(lines))


def _spent(results: Mapping[str, Any]) -> list[str]:
    """The number of results, and the CPU time of the quick ones."""
    shown = [entry[1] for entry in results.values() if entry]
    quick = [c for c in shown if c["size"].startswith("quick")]
    seconds = sum(float(c.get("cpu_seconds", 0.0)) for c in quick)
    text = f"{len(shown)} results, {len(quick)} of them quick: {seconds:.0f} s of CPU time in all"
    return [f"{text}; shared runs count once.", ""]


def _summary(items: Mapping[str, Item], results: Mapping[str, Any]) -> list[str]:
    """The number of verdicts of each kind per paper, one per claim and figure."""
    names = ("inside", "above", "below", "holds", "does not hold", "formula check", MISSING)
    rows = []
    for paper in dict.fromkeys(item.paper.name for item in items.values()):
        counts: Counter[str] = Counter()
        for item in items.values():
            if item.paper.name == paper:
                findings = results[item.id][0] if results[item.id] else Findings()
                for claim in item.stated.claims.values():
                    counts.update(_verdicts(claim, findings))
        if counts:
            rows.append([paper, *(str(counts[name]) for name in names)])
    return ["## Verdicts, one per claim and figure of ours", "", *grid(("paper", *names), rows), ""]


def _verdicts(claim: Claim, findings: Findings) -> list[str]:
    measures: Sequence[Measure | None] = of_claim(findings.measures, claim.id) or [None]
    return [verdict(claim, measure).partition(":")[0] for measure in measures]


def _section(item: Item, result: tuple[Findings, dict[str, Any]] | None) -> list[str]:
    lines = [f"### {item.id}: {item.stated.title}", ""]
    if result is None:
        return [*lines, f"No result yet: run `specdec reproduce {item.id}`.", ""]
    findings, conditions = result
    rows = []
    for claim in item.stated.claims.values():
        for measure in of_claim(findings.measures, claim.id) or [None]:
            rows.append(_row(claim, measure))
    if rows:
        headings = ("claim", "paper", "ours", "kind", "verdict", "on")
        lines += [*grid(headings, rows), ""]
    if item.config.get("why"):
        lines += [f"Why: {str(item.config['why']).strip()}", ""]
    if findings.missing:
        missing = [text.removeprefix("missing: ").rstrip(".") for text in findings.missing]
        lines += [f"Missing: {'; '.join(missing)}.", ""]
    page = f"../experiments/{item.paper.name}/results/{item.name}.md"
    return [
        *lines,
        f"[Table]({page}); {conditions['size']}; revision {conditions['revision']}.",
        "",
    ]


def _row(claim: Claim, measure: Measure | None) -> list[str]:
    mark = "" if claim.mark == "original" else f" ({claim.mark})"
    stated = f"{claim.stated}{mark}"
    if measure is None:
        return [claim.text, stated, NONE, NONE, MISSING, NONE]
    loops = "" if measure.loop_share is None else f"; loops {100 * measure.loop_share:.0f} %"
    where = f"{measure.conditions}{loops}"
    kind = measure.kind
    return [claim.text, stated, value_text(claim, measure), kind, verdict(claim, measure), where]
