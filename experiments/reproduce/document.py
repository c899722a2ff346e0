"""``docs/reproduction.md``: every claim, what we get, why they differ; from checked-in results."""

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
# What the papers state, and what we get

Written by `specdec reproduce --document` from the results under `experiments/<paper>/results/`,
where each table and figure has its page (Markdown, CSV, PNG). `specdec reproduce NAME` makes one
again, `specdec reproduce --all --quick` all of them, small.

Read the columns apart. *measured*: real models on one machine's CPU, times or exact counts;
*paced*: real processes held to a latency profile; *simulated*: a profile's virtual clock, with
hits that are replayed from records of the bundled pair (7M target, 1.2M draft: it says where a
schedule goes, not what Llama does), synthetic by a stated law, or traced (accepted lengths of
Llama-3.1-8B); *formula*: arithmetic on the paper's own figures or on a law. Intervals are 95 %
bootstrap intervals over prompts; all rows of a table decode the same prompts. `loop_share` is the
share of generated tokens that end an 8-gram generated before: loops flatter every speculative
method. A range is met at its ends, a single number within 5 % unless its stated value says
otherwise in `experiments/<paper>/stated.yaml`. *known* and *reconstructed* mark stated values
that the text at hand has lost; *independent* are others' measurements.

No profile and no law was fitted to a stated ratio.
"""


def write_document(items: Mapping[str, Item], root: Path = ROOT) -> Path:
    """Writes the page; returns its path."""
    lines = [_HEAD]
    found = {name: read_item(item, root) for name, item in items.items()}
    lines += [*_spent(found), *_summary(items, found)]
    for paper in dict.fromkeys(item.paper.name for item in items.values()):
        mine = [item for item in items.values() if item.paper.name == paper]
        lines += [f"## {mine[0].paper.title} ({mine[0].paper.reference})", ""]
        for item in mine:
            lines += _section(item, found[item.id])
    path = root.parent / "docs" / "reproduction.md"
    return write_text(path, "\n".join(lines))


def _spent(found: Mapping[str, Any]) -> list[str]:
    """How many results there are, and the CPU time of the quick ones."""
    shown = [entry[1] for entry in found.values() if entry]
    quick = [c for c in shown if c["size"].startswith("quick")]
    seconds = sum(float(c.get("cpu_seconds", 0.0)) for c in quick)
    told = f"{len(shown)} results, {len(quick)} of them quick: {seconds:.0f} s of CPU time in all"
    return [f"{told}, runs that several share counted once.", ""]


def _summary(items: Mapping[str, Item], found: Mapping[str, Any]) -> list[str]:
    """How many claims got which verdict, per paper; a claim counts with its best-known figure."""
    names = ("inside", "above", "below", "holds", "does not hold", "formula check", MISSING)
    rows = []
    for paper in dict.fromkeys(item.paper.name for item in items.values()):
        counts: Counter[str] = Counter()
        for item in items.values():
            if item.paper.name == paper:
                findings = found[item.id][0] if found[item.id] else Findings()
                for claim in item.stated.claims.values():
                    counts.update(_verdicts(claim, findings))
        if counts:
            rows.append([paper, *(str(counts[name]) for name in names)])
    return ["## Verdicts, one per claim and figure of ours", "", *grid(("paper", *names), rows), ""]


def _verdicts(claim: Claim, findings: Findings) -> list[str]:
    measures: Sequence[Measure | None] = of_claim(findings.measures, claim.id) or [None]
    said = [verdict(claim, measure) for measure in measures]
    return ["formula check" if text.startswith("formula check") else text for text in said]


def _section(item: Item, found: tuple[Findings, dict[str, Any]] | None) -> list[str]:
    lines = [f"### {item.id}: {item.stated.title}", ""]
    if found is None:
        return [*lines, f"Not run for this page: `specdec reproduce {item.id}` does.", ""]
    findings, conditions = found
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
        told = [what.removeprefix("missing: ").rstrip(".") for what in findings.missing]
        lines += [f"Missing: {'; '.join(told)}.", ""]
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
