"""Requirements and counters of sources that are composed of other sources."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.metrics.counters import SourceCounters
from specdec.types import Needs


def joined_needs(needs: Iterable[Needs]) -> Needs:
    """The union of the requirements."""
    parts = list(needs)
    return Needs(
        target_probs=any(n.target_probs for n in parts),
        draft_probs=any(n.draft_probs for n in parts),
        target_draws=any(n.target_draws for n in parts),
        hidden=tuple(sorted({name for n in parts for name in n.hidden})),
        early_hidden=tuple(sorted({name for n in parts for name in n.early_hidden})),
        exits=max((n.exits for n in parts), default=0),
        further_exits=tuple(sorted({layer for n in parts for layer in n.further_exits})),
        real_nodes=any(n.real_nodes for n in parts),
        all_answers=any(n.all_answers for n in parts),
    )


def tally(total: SourceCounters, parts: Iterable[SourceCounters]) -> None:
    """Sets ``total`` to the sum of ``parts`` in place; levels in the order of the parts."""
    total.passes = total.rows = total.catch_up_rows = 0
    total.by_level.clear()
    for part in parts:
        total.passes += part.passes
        total.rows += part.rows
        total.catch_up_rows += part.catch_up_rows
        for name, passes in part.by_level.items():
            total.by_level[name] = total.by_level.get(name, 0) + passes
