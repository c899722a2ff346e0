"""A pairwise sample of the matrix on real processes, one persistent group per number of stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from specdec.distributed import GroupHandle
from tests.matrix.cells import NUM_COPIES, Cell, all_cells, cover, met, option
from tests.matrix.outcomes import check, runs

pytestmark = pytest.mark.distributed

STAGES = (2, 3)
NUM_PARTS = 8


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    """The groups stay up for all tests of the module."""
    handles = [GroupHandle(stages, threads=1) for stages in STAGES]
    handles += [GroupHandle(1, threads=1, number=copy) for copy in range(1, NUM_COPIES + 1)]
    yield
    for handle in handles:
        handle.release()


@cache
def sample() -> list[Cell]:
    """Cells that run on processes: what meets in any of them meets in these."""
    staged = (c for c in all_cells() if "transport" in option("executor", c.executor))
    return cover(staged, _met, runs)


def _met(cell: Cell) -> set[Any]:
    """What meets in a cell; of copies of the target every policy and verifier alone."""
    if "replicas" in option("executor", cell.executor):
        return {("copies", cell.policy), ("copies", cell.verifier)}
    return met(cell)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_cells_on_processes(part: int) -> None:
    numbered = list(enumerate(sample()))[part::NUM_PARTS]
    assert numbered
    for number, cell in numbered:
        check(cell, transport="distributed", stages=STAGES[number // NUM_PARTS % len(STAGES)])
