"""The section ``profiling`` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field

from specdec.parts.fields import Count, Text, expects, validated


def _rises(counts: list[int]) -> list[int]:
    assert all(a < b for a, b in pairwise(counts))
    return counts


Counts = Annotated[
    list[Count],
    Field(min_length=1),
    AfterValidator(_rises),
    expects("it must be a list of increasing whole numbers of at least 1"),
]
FileName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_-]+$"),
    expects("it must be a name of letters, digits, - and _"),
]


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingOptions:
    """What ``specdec profile`` measures and simulates.

    Attributes:
        name: of the measured profile.
        use: a profile to propose for instead of measuring one.
        tokens: rows per measured pass.
        repeats: of every measurement.
        context: committed tokens before the tree.
        transfer: whether transfers between two processes are measured.
        widths, children, groups: tree widths, candidates per node and devices per stage to
            simulate.
        devices: number of devices to split between SwiftSpec's target and draft; None profiles a
            pipeline.
        targets, bs, w: devices of the target, nodes per target pass and leaves per draft pass to
            try.
    """

    name: FileName
    use: Text | None
    tokens: Counts
    repeats: Count
    context: Count
    transfer: bool
    widths: Counts
    children: Counts
    groups: Counts
    devices: Annotated[int, Field(ge=2)] | None
    targets: Counts
    bs: Counts
    w: Counts
