"""Checks the sentences on the papers (``summary`` of ``stated.yaml``) against the verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.reproduce.findings import Findings, claim_verdict, kind_of
from experiments.reproduce.items import Item
from experiments.reproduce.stated import COUNTED, Sentence

_ALLOWED = {
    "holds": {"inside", "holds"},
    "fails": {"outside", "does not hold"},
    "open": {"undecided"},
}
"""Group of a sentence -> verdicts that its claims may have."""

Results = Mapping[str, tuple[Findings, Mapping[str, Any]] | None]


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
