"""Writes ``docs/reproduction.md``: every claim, our figure and why they differ.

The sentences on the papers (``summary`` of ``stated.yaml``) are checked against the verdicts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from experiments.reproduce.findings import (
    INSIDE,
    MISSING,
    UNDECIDED,
    Findings,
    Measure,
    claim_verdict,
    kind_of,
    of_claim,
    verdict,
)
from experiments.reproduce.items import Item
from experiments.reproduce.rendering import NONE, grid, span_of, value_text
from experiments.reproduce.results import read_item
from experiments.reproduce.stated import COUNTED, KINDS, ROOT, Claim, Paper, Sentence
from specdec.errors import UserError
from specdec.files import write_text

_HEAD = """\
What of each paper holds, what does not, and what could not be tested here. A sentence counts as
tested only if its figures are measured on the same kind of thing, or simulated with the hits of a
law that was fitted to measured acceptance of a real pair. Stage times of SpecPipe and PipeDec are
partly assumed: calibrated figures are given at both ends of the band that the papers leave. All
figures, with their windows and conditions, follow behind.
"""

_USE = """\
writes `outputs/reproduce/specpipe/results/fig7.md` (and .csv, .json, .png) and prints a line per
claim. `specdec reproduce --all --quick` runs all of them at a small size. The flag `--document`
writes this page from the results under `experiments/<paper>/results/`, where each table and figure
has its page.
"""

_LEGEND = """\
The window decides a verdict and stands beside the value with its reason. One rule holds for all
papers: a stated range is its own window, and a single figure has 5 % on either side; a claim that
differs says why. A sentence has a criterion. A figure with an interval is *inside* only if all of
the interval is, *above* or *below* only if none of it is, and otherwise *undecided*.

Kinds of verdicts, of which only the first two count:
"""

_KINDS = (
    "*measured*: on the same kind of thing as the paper's;",
    """*calibrated*: simulated with the hits of a law fitted to measured acceptance of a real pair
    of that size ([Laws of hits](calibration.md)), on a latency profile whose figures are stated,
    measured or assumed; where stage times are assumed, at both ends of their band;""",
    """*stand-in*: measured or simulated with other models (the bundled pair, 7M and 1.2M), another
    machine or an assumed law: shows the effect of a schedule, not the paper's acceptance;""",
    "*input*: a figure of the profile that comes back;",
    "*construction*: true by construction of the schedule, a check of the program;",
    "*formula*: arithmetic on the paper's own figures or on a law.",
)

_MARKS = """\
Intervals are 95 % bootstrap intervals over prompts; all rows of a table decode the same prompts.
`loop_share` is the share of generated tokens that end an 8-gram generated before: loops flatter
every speculative method. *known* and *reconstructed* mark stated values that the available text
lacks; *independent* are measurements of other groups. No profile and no law was fitted to a stated
ratio.
"""

_TIMES = """\
Seconds without runs that an earlier item had made; an item with a paced column has both runs. The
full size is `specdec reproduce --all --paced --resume jobs=2 output_dir=experiments`: what measures
this machine runs alone first, the rest in two processes, paced columns last; started again it goes
on where it stopped.
"""

Results = Mapping[str, tuple[Findings, Mapping[str, Any]] | None]
"""Findings and conditions by the item's id."""

_WIDTH = 100

_GROUPS = {
    "holds": "Holds",
    "fails": "Does not hold",
    "open": "Undecided",
    "untested": "Not tested",
}


def write_document(items: Mapping[str, Item], root: Path = ROOT) -> tuple[Path, list[str]]:
    """Writes the page; returns its path, and what its sentences and the verdicts contradict in."""
    results = {name: read_item(item, root) for name, item in items.items()}
    papers = list({item.paper.name: item.paper for item in items.values()}.values())
    lines = ["# Reproduction of the papers", "", *_prose(_HEAD)]
    for paper in papers:
        lines += _opening(paper, _by_claim(paper.name, items, results))
    lines += [*_summary(items, results), *_reading()]
    for paper in dict.fromkeys(item.paper.name for item in items.values()):
        of_paper = [item for item in items.values() if item.paper.name == paper]
        lines += [f"## {of_paper[0].paper.title} ({of_paper[0].paper.reference})", ""]
        for item in of_paper:
            lines += _section(item, results[item.id])
    lines += _run_times(results)
    path = root.parent / "docs" / "reproduction.md"
    return write_text(path, "\n".join(lines)), contradictions(items, results)


def _prose(text: str, *, bullet: str = "") -> list[str]:
    """Wrapped lines of each paragraph, an empty line after it; bullets have none."""
    lines = []
    for paragraph in text.strip().split("\n\n"):
        words = " ".join(paragraph.split())
        indents = {"initial_indent": bullet, "subsequent_indent": " " * len(bullet)}
        whole = {"break_long_words": False, "break_on_hyphens": False}
        lines += wrap(words, _WIDTH, **indents, **whole)  # type: ignore[arg-type]
        lines += [] if bullet else [""]
    return lines


def _reading() -> list[str]:
    command = "    specdec reproduce --quick specpipe/fig7"
    kinds = [line for kind in _KINDS for line in _prose(kind, bullet="- ")]
    lines = ["## How to read the tables", "", command, "", *_prose(_USE), *_prose(_LEGEND)]
    return [*lines, *kinds, "", *_prose(_MARKS)]


def _run_times(results: Results) -> list[str]:
    found = {name: entry[1] for name, entry in results.items() if entry}
    keys, rows = ("seconds", "cpu_seconds"), []
    for name, c in found.items():
        size = (c["size"].partition(":")[0], "yes" if c.get("paced") else NONE)
        rows.append([name, *size, *(f"{c[key]:.0f}" for key in keys), c["revision"]])
    sums = (sum(float(c[key]) for c in found.values()) for key in keys)
    rows.append(["all", NONE, NONE, *(f"{value:.0f}" for value in sums), NONE])
    revisions = {conditions["revision"] for conditions in found.values()}
    num = "one revision" if len(revisions) == 1 else f"{len(revisions)} revisions"
    headings = ("item", "size", "paced", "seconds", "CPU seconds", "revision")
    text = f"{len(found)} results on {num}. {_TIMES}"
    return ["## Run times", "", *_prose(text), *grid(headings, rows), ""]


Figures = Mapping[str, tuple[Item, Findings]]
"""Name in a sentence -> the item and its findings; the claim is the part after the last slash."""


def _by_claim(paper: str, items: Mapping[str, Item], results: Results) -> dict[str, Any]:
    return {
        f"{item.name}/{claim}": (item, entry[0])
        for name, item in items.items()
        if item.paper.name == paper and (entry := results[name]) is not None
        for claim in item.stated.claims
    }


def _filled(text: str, figures: Figures) -> str:
    """A sentence with the figures of the claims that it names in braces.

    Raises:
        UserError: it names no claim with a figure.
    """

    def figure(match: re.Match[str]) -> str:
        name = match[1]
        item, findings = figures.get(name, (None, Findings()))
        claim = item.stated.claims[name.rpartition("/")[2]] if item else None
        shown = claim_verdict(claim, findings.measures)[2] if claim else []
        if claim is None or not shown:
            raise UserError(f"{{{name}}} in {text[:60]!r} is no claim with a figure")
        return span_of(claim, shown)

    return re.sub(r"\{([a-z0-9_/]+)\}", figure, text)


def _opening(paper: Paper, figures: Figures) -> list[str]:
    """What holds, what does not and what was not tested, in sentences."""
    if not any(paper.summary.values()):
        return []
    lines = [f"## {paper.title}: in short", ""]
    for group, heading in _GROUPS.items():
        sentences = paper.summary.get(group, ())
        if sentences:
            lines += [f"**{heading}.**", ""]
            for s in sentences:
                text = f"{_filled(s.text, figures)} ({', '.join(s.claims)})"
                lines += _prose(text, bullet="- ")
            lines.append("")
    return lines


def _summary(items: Mapping[str, Item], results: Mapping[str, Any]) -> list[str]:
    """Claims by verdict over the counted kinds, and figures by kind, per paper."""
    claims_of: dict[str, Counter[str]] = {}
    figures_of: dict[str, Counter[str]] = {}
    for name, item in items.items():
        findings = results[name][0] if results[name] else Findings()
        claims = claims_of.setdefault(item.paper.name, Counter())
        for claim in item.stated.claims.values():
            outcome, _, shown = claim_verdict(claim, findings.measures)
            counted = bool(shown) and kind_of(claim, shown[0]) in COUNTED
            claims[outcome if counted else "not tested"] += 1
            kinds = (kind_of(claim, m) for m in of_claim(findings.measures, claim.id))
            figures_of.setdefault(item.paper.name, Counter()).update(kinds)
    columns = INSIDE, ("outside", "does not hold"), (UNDECIDED,), ("not tested",)
    rows = [
        [paper, *(str(sum(claims[outcome] for outcome in column)) for column in columns)]
        for paper, claims in claims_of.items()
        if claims
    ]
    headings = ("paper", "inside or holds", "outside or does not hold", UNDECIDED, "not tested")
    rule = "Counted kinds only; a claim is inside or outside if all of its figures agree."
    lines = ["## Claims by verdict", "", rule, "", *grid(headings, rows), ""]
    rows = [[p, *(str(k[kind]) for kind in KINDS)] for p, k in figures_of.items() if k]
    return [*lines, "Figures by kind:", "", *grid(("paper", *KINDS), rows), ""]


def _section(item: Item, result: tuple[Findings, dict[str, Any]] | None) -> list[str]:
    lines = [f"### {item.id}: {item.stated.title}", ""]
    if result is None:
        return [*lines, f"No result yet: run `specdec reproduce {item.id}`.", ""]
    findings, conditions = result
    rows = [
        _row(claim, measure)
        for claim in item.stated.claims.values()
        for measure in of_claim(findings.measures, claim.id) or [None]
    ]
    if rows:
        headings = ("claim", "paper", "window", "ours", "kind", "verdict", "on")
        lines += [*grid(headings, rows), ""]
    if item.config.get("why"):
        why = _filled(item.config["why"], dict.fromkeys(item.stated.claims, (item, findings)))
        lines += _prose(f"Why: {why}")
    if findings.missing:
        missing = [text.removeprefix("missing: ").rstrip(".") for text in findings.missing]
        lines += _prose(f"Missing: {'; '.join(missing)}.")
    page = f"../experiments/{item.paper.name}/results/{item.name}.md"
    text = f"[Table]({page}); {conditions['size']}; revision {conditions['revision']}."
    return [*lines, text, ""]


def _row(claim: Claim, measure: Measure | None) -> list[str]:
    mark = "" if claim.mark == "original" else f" ({claim.mark})"
    stated = f"{claim.stated}{mark}"
    if measure is None:
        return [claim.text, stated, str(claim.window), NONE, NONE, MISSING, NONE]
    loops = "" if measure.loop_share is None else f"; loops {100 * measure.loop_share:.0f} %"
    where = f"{measure.conditions}{loops}"
    return [
        *(claim.text, stated, str(claim.window), value_text(claim, measure)),
        *(kind_of(claim, measure), verdict(claim, measure), f"{where} ({measure.origin})"),
    ]


_ALLOWED = {
    "holds": {"inside", "holds"},
    "fails": {"outside", "does not hold"},
    "open": {"undecided"},
}
"""Group of a sentence -> verdicts that its claims may have."""


def contradictions(items: Mapping[str, Item], results: Results) -> list[str]:
    """Sentences that a verdict contradicts, a line for each claim.

    A sentence under "holds", "fails" or "open" needs that verdict of every claim that it names, by
    the counted kinds; one under "untested" may name no claim with such a figure.
    """
    lines = []
    for paper in {item.paper.name: item.paper for item in items.values()}.values():
        for group, sentences in paper.summary.items():
            for sentence in sentences:
                where = f"{paper.name} {group}: {sentence.text[:50]}..."
                if not sentence.claims:
                    lines.append(f"{where} names no claim")
                found = _contradicting(paper.name, group, sentence, items, results)
                lines += [f"{where} {text}" for text in found]
    return lines


def _contradicting(
    paper: str,
    group: str,
    sentence: Sentence,
    items: Mapping[str, Item],
    results: Results,
) -> Iterator[str]:
    for claim_id in sentence.claims:
        name, _, of = claim_id.partition("/")
        item = items[f"{paper}/{name}"]
        read = results[item.id]
        if read is None:
            yield f"{claim_id} has no result"
            continue
        stated = item.stated.claims
        for claim in [stated[of]] if of else stated.values():
            outcome, _, shown = claim_verdict(claim, read[0].measures)
            counted = bool(shown) and kind_of(claim, shown[0]) in COUNTED
            if group == "untested":
                if counted:
                    yield f"{name}/{claim.id} is tested: {outcome}"
            elif not counted:
                yield f"{name}/{claim.id} is not tested"
            elif outcome not in _ALLOWED[group]:
                yield f"{name}/{claim.id} is {outcome}"
