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
    """The section ``profiling``: what ``specdec profile`` measures and simulates.

    Attributes:
        name: name of the measured profile.
        use: a profile to use instead of measuring one.
        tokens: numbers of rows per pass to measure.
        context: committed tokens before the tree.
        transfer: whether to measure transfers between two processes.
        widths, children, groups: tree widths, candidates per node and devices per stage to
            simulate.
        devices: number of devices to split between SwiftSpec's target and draft; None profiles a
            pipeline.
        targets, bs, w: for SwiftSpec, the target's devices, the nodes per target pass and the
            leaves per draft pass to try.
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
