"""Writes ``docs/reproduction.md``, a row per claim, and the pages of the items from their results.

The sentences on the papers (``summary`` of ``stated.yaml``) are checked against the verdicts.
"""

from __future__ import annotations

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
    claim_verdict,
    kind_of,
    of_claim,
)
from experiments.reproduce.items import Item
from experiments.reproduce.rendering import (
    NONE,
    Figures,
    csv_text,
    filled,
    grid,
    markdown,
    span_text,
)
from experiments.reproduce.results import read_item
from experiments.reproduce.stated import COUNTED, KINDS, ROOT, Paper, Sentence, own_yaml
from specdec.files import write_text

_HEAD = """\
What of each paper holds, what does not, and what could not be tested here. Each table or figure has
its own page with every figure, its window, its conditions and the reason where they differ: the
links in the tables below. `specdec reproduce --quick specpipe/fig7` runs one of them.

## Rules

1. A verdict compares like with like: the paper's data set, its sampling, a pair of the kind that it
   states, and a baseline that could be built. A simulated figure that differs in one of them is a
   *what-if*: it is printed and never counted.
2. Baseline, data and counted drafts of an item are fixed in its YAML (`fixed`), its windows in
   `stated.yaml`, before it is run. A later change is listed there with its date and reason, and
   on the item's page.
3. The row of a baseline has what the paper's text gives it, and nothing more. Other forms have rows
   of their own, such as hidden drafting, a limit that no implementation reaches.
4. The *window* of a claim is the stated range, or 5 % on either side of a single figure; a claim
   with another window says why. A claim in words has a criterion. A figure with an interval is
   *inside* only if all of the interval is, *above* or *below* only if none of it is, and otherwise
   *undecided*.
5. A reason that was not measured is called a guess.
6. Measured, paced, simulated and computed figures have columns of their own. No profile and no
   acceptance model was fitted to a stated ratio.

Kinds of verdicts, of which only the first two count:
"""

_KINDS = (
    "*measured*: on the same kind of thing as the paper's;",
    """*calibrated*: simulated with hits that were fitted to measured acceptance of a real pair of
    the stated kind on the stated data and sampling ([acceptance models](calibration.md)), on a
    latency profile whose figures are stated, measured or assumed; where stage times are assumed, at
    both ends of their band;""",
    """*what-if*: as calibrated, but other data, another sampling, a pair of another kind, or
    another form of the baseline;""",
    """*stand-in*: measured or simulated with other models (the bundled pair, 7M and 1.2M), another
    machine or assumed hits: shows the effect of a schedule, not the paper's acceptance;""",
    "*input*: a figure of the profile that a simulation only returns;",
    "*construction*: true by construction of the schedule, a check of the program;",
    "*formula*: arithmetic on the paper's own figures or on an equation.",
)

_MARKS = """\
Intervals are 95 % bootstrap intervals over prompts; all rows of a table decode the same prompts.
`loop_share` is the share of generated tokens that end an 8-gram generated before: loops flatter
every speculative method, and synthetic hits have none. *known* and *reconstructed* mark stated
values that the available text lacks; *independent* are measurements of other groups.

`specdec reproduce --all --paced --resume jobs=2 output_dir=experiments` runs everything at full
size: measurements of this machine first and alone, paced columns last; `--document` writes this
page and the items' pages from their results.
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
    """Writes the pages; returns the first one, and where its sentences contradict the verdicts."""
    results = {name: read_item(item, root) for name, item in items.items()}
    for item in items.values():
        if found := results[item.id]:
            write_text(_folder(root, item) / f"{item.name}.md", markdown(item, *found))
            write_text(_folder(root, item) / f"{item.name}.csv", csv_text(item, found[0]))
    path = root.parent / "docs" / "reproduction.md"
    return write_text(path, page_text(items, results)), contradictions(items, results)


def page_text(items: Mapping[str, Item], results: Results) -> str:
    """``docs/reproduction.md``."""
    papers = list({item.paper.name: item.paper for item in items.values()}.values())
    head = _HEAD.splitlines()
    kinds = [line for kind in _KINDS for line in _prose(kind, bullet="- ")]
    lines = ["# Reproduction of the papers", "", *head, "", *kinds, "", *_prose(_MARKS)]
    for paper in papers:
        lines += _opening(paper, _by_claim(paper.name, items, results))
    lines += [*_claims(items, results), *_summary(items, results)]
    for paper in papers:
        of_paper = [item for item in items.values() if item.paper is paper]
        lines += [f"## {paper.title} ({paper.reference})", ""]
        rows = [row for item in of_paper for row in _rows(item, results[item.id])]
        lines += [*grid(("item", "claim", "paper", "ours", "kind", "origin", "verdict"), rows), ""]
    return "\n".join(lines)


def _folder(root: Path, item: Item) -> Path:
    return root / item.paper.name / "results"


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


def _by_claim(paper: str, items: Mapping[str, Item], results: Results) -> dict[str, Any]:
    return {
        f"{item.name}/{claim}": (item, entry[0])
        for name, item in items.items()
        if item.paper.name == paper and (entry := results[name]) is not None
        for claim in item.stated.claims
    }


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
                text = f"{filled(s.text, figures)} ({', '.join(s.claims)})"
                lines += _prose(text, bullet="- ")
            lines.append("")
    return lines


def _claims(items: Mapping[str, Item], results: Results) -> list[str]:
    """README's table: ``claims.yaml`` with the figures of the results."""
    papers = dict.fromkeys(item.paper.name for item in items.values())
    found = {f"{p}/{name}": at for p in papers for name, at in _by_claim(p, items, results).items()}
    rows = []
    for row in own_yaml("claims.yaml"):
        item, findings = found[row["of"]]
        claim = item.stated.claims[row["of"].rpartition("/")[2]]
        outcome, _, shown = claim_verdict(claim, findings.measures)
        counted = bool(shown) and kind_of(claim, shown[0]) in COUNTED
        said = {"outside": "does not hold", "inside": "holds"}.get(outcome, outcome)
        texts = (filled(row[key], found) for key in ("here", "real"))
        page = f"[page](../experiments/{item.paper.name}/results/{item.name}.md)"
        stated = row.get("stated", claim.stated.replace("-", " to "))
        rows.append([row["name"], stated, *texts, said if counted else "not tested", page])
    headings = ("claim", "the paper says", "here, simulated with measured hits")
    more = ("here, measured or in real processes", "verdict", "figures")
    return ["## One claim per paper", "", *grid((*headings, *more), rows), ""]


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


def _rows(item: Item, result: tuple[Findings, dict[str, Any]] | None) -> list[list[str]]:
    """A row per claim, kind and origin, the strongest kind first."""
    link = f"[{item.name}](../experiments/{item.paper.name}/results/{item.name}.md)"
    names = iter([f"{link}: {item.stated.title}"])
    measures = result[0].measures if result else []
    rows = []
    for claim in item.stated.claims.values():
        mark = "" if claim.mark == "original" else f" ({claim.mark})"
        texts = iter([(claim.text, f"{claim.stated}{mark}")])
        of = of_claim(measures, claim.id)
        groups = {(kind_of(claim, m), m.origin) for m in of}
        for kind, origin in sorted(groups, key=lambda group: (KINDS.index(group[0]), group[1])):
            group = [m for m in of if (kind_of(claim, m), m.origin) == (kind, origin)]
            outcome = claim_verdict(claim, group)[0]
            said = (*next(texts, ("", "")), span_text(claim, group))
            rows.append([next(names, ""), *said, kind, origin, outcome])
        if not groups:
            rows.append([next(names, ""), *next(texts), NONE, NONE, NONE, MISSING])
    return rows or [[next(names), *[NONE] * 6]]


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
