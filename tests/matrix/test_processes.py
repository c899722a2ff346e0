"""Samples of the matrix on real processes, one persistent group per number of stages.

In the suite every source, policy, verifier and sampling on every executor; with
``pytest -m exhaustive`` every option with every other one.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.matrix.cells import NUM_COPIES, Cell, all_cells, cover, met, option
from tests.matrix.outcomes import check, runs
from tests.sampled import sampled

pytestmark = pytest.mark.distributed

STAGES = (2, 3)
NUM_PARTS = 3
NUM_PARTS_OF_PAIRS = 8


@pytest.fixture(autouse=True)
def _ranks(keep_ranks: Callable[..., None]) -> None:
    keep_ranks()
    for copy in range(1, NUM_COPIES + 1):
        keep_ranks(number=copy)


def sample(meetings: Callable[[Cell], set[Any]]) -> list[Cell]:
    """Cells that run on processes: what meets in any of them meets in these."""
    staged = (c for c in all_cells() if "transport" in option("executor", c.executor))
    return cover(staged, meetings, runs)


@cache
def by_executor() -> list[Cell]:
    """Every option of the other axes on every executor."""
    return sample(lambda cell: {pair for pair in _met(cell) if "executor" in dict(pair)})


@cache
def by_pairs() -> list[Cell]:
    """Every option with every other one."""
    return sample(_met)


def _met(cell: Cell) -> set[Any]:
    """What meets in a cell; of copies of the target every policy and verifier alone."""
    pairs = met(cell)
    if "replicas" in option("executor", cell.executor):
        kept = ({"policy", "executor"}, {"verifier", "executor"})
        return {pair for pair in pairs if dict(pair).keys() in kept}
    return pairs


def _check(cells: list[Cell], part: int, num_parts: int) -> None:
    numbered = list(enumerate(cells))[part::num_parts]
    assert numbered
    for number, cell in numbered:
        check(cell, transport="distributed", stages=STAGES[number // num_parts % len(STAGES)])


@pytest.mark.parametrize("part", sampled(range(NUM_PARTS), every=2))
def test_cells_on_processes(part: int) -> None:
    _check(by_executor(), part, NUM_PARTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(NUM_PARTS_OF_PAIRS))
def test_pairs_on_processes(part: int) -> None:
    _check(by_pairs(), part, NUM_PARTS_OF_PAIRS)
