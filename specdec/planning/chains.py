"""Finds how many draft tokens of a chain pay, for each batch size and context, by a formula.

All requests of a batch share each pass, and drafting precedes it (Leviathan et al. 2023, section
3.3, with measured tokens per pass and times that depend on the rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec.clocks.profile import CostCurve
from specdec.planning.layouts import Layout, layouts
from specdec.planning.machines import DoesNotFit, Machine
from specdec.types import FloatArray

_MOST_REQUESTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCell:
    """The best chain for a batch and a context.

    ``draft_tokens`` is 0 if plain decoding is best. The speeds are those of all requests together,
    and ``layout`` is that of the best chain.
    """

    batch: int
    context: int
    draft_tokens: int
    tokens_per_s: float
    plain_tokens_per_s: float
    layout: Layout

    @property
    def gain(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layout": self.layout.told(), "gain": self.gain}


def chain_cell(
    machine: Machine, tokens_per_pass: FloatArray, batch: int, context: int
) -> ChainCell | None:
    """Returns the fastest chain over all layouts; None if no layout fits.

    ``tokens_per_pass`` is float64[K + 1], for chains of 0, 1, ..., K draft tokens.
    """
    best: tuple[float, int, Layout] | None = None
    plain = 0.0
    for layout in layouts(machine.devices, own_draft=False, staged=True, copies=False):
        try:
            costs = machine.costs(layout, batch, context)
        except DoesNotFit:
            continue
        for draft_tokens, tokens in enumerate(tokens_per_pass.tolist()):
            seconds = 1e-3 * round_ms(costs, layout, batch, draft_tokens)
            speed = batch * tokens / seconds
            if not draft_tokens:
                plain = max(plain, speed)
            if best is None or speed > best[0]:
                best = (speed, draft_tokens, layout)
    if best is None:
        return None
    return ChainCell(
        batch=batch,
        context=context,
        draft_tokens=best[1],
        tokens_per_s=best[0],
        plain_tokens_per_s=plain,
        layout=best[2],
    )


def round_ms(costs: Mapping[str, Any], layout: Layout, batch: int, draft_tokens: int) -> float:
    """Returns the milliseconds of all draft passes and one target pass over all stages."""
    curves = {kind: CostCurve.of(curve) for kind, curve in costs.items()}

    def ms(kind: str, rows: int) -> float:
        return curves[kind](rows) if kind in curves else 0.0

    rows = batch * (draft_tokens + 1)
    stage = ms("stage", rows) + (ms("transfer", rows) if layout.stages > 1 else 0.0)
    after = ms("head", rows) + (ms("prune", rows) if draft_tokens else 0.0)
    return layout.stages * stage + after + draft_tokens * ms("draft", batch)


def chain_cells(
    machine: Machine, tokens_per_pass: FloatArray, batches: Sequence[int], contexts: Sequence[int]
) -> list[ChainCell]:
    found = [chain_cell(machine, tokens_per_pass, b, c) for c in contexts for b in batches]
    return [cell for cell in found if cell is not None]


def crossover(machine: Machine, tokens_per_pass: FloatArray, context: int) -> int | None:
    """Returns the least number of requests from which on plain decoding stays best.

    Only powers of two are tried. None if chains pay up to ``_MOST_REQUESTS``, or up to what fits.
    """
    start, batch = None, 1
    while batch <= _MOST_REQUESTS:
        cell = chain_cell(machine, tokens_per_pass, batch, context)
        if cell is None:
            break
        if cell.draft_tokens:
            start = None
        elif start is None:
            start = batch
        batch *= 2
    return start
