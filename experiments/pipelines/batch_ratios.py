"""SpecPipe-DB's ratios over plain decoding beside those of the paper (section 4.4, Fig. 16)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.reproduce.stated import read_paper
from specdec.report.tables import number

_BATCH_SIZES = (4, 8)  # of the paper's statement


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines for the page of ``specdec compare batch_size=[...]``.

    Args:
        rows: of the comparison, with their ratios (``specdec.runs.batch_sizes.add_ratios``).
    """
    claims = read_paper("specpipe").items["fig16"].claims
    lines = []
    for row in rows:
        if row["strategy"] != "specpipe_db" or row["batch_size"] not in _BATCH_SIZES:
            continue
        for metric in ("throughput", "tbt"):
            same, other = row.get(f"{metric}_over_ar"), row.get(f"{metric}_over_cross")
            lines.append(
                f"- specpipe_db at batch {row['batch_size']}, {metric}: {number(same)}x over ar on"
                f" the same profile, {number(other)}x cross-profile; the paper"
                f" {claims[metric].stated} over PP-vLLM"
            )
    return lines
