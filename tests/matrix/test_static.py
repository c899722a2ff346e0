"""Passes over static buffers are lossless: the matrix's cells again, with ``model.graphs=replay``.

Everything of a captured pass but the capture: arenas, padded rows and masks, spare slots, one
replay per request. So what a GPU adds is the recording of the same launches.
"""

from functools import cache

import numpy as np
import pytest

from specdec.models.backends.graphs import Inputs
from specdec.pairs import RandomPair, build_pair
from specdec.runs.runners import PartsRunner
from specdec.state import StopRules
from tests.matrix.cells import Cell, all_cells, base, config, cover, decode, plain
from tests.matrix.outcomes import runs
from tests.sampled import sampled

SAMPLINGS = ("greedy", "t08")
NUM_TOKENS = 6  # of those that plain decoding gives
NUM_PARTS = 12  # of the sample, which is composed when the first one runs

pytestmark = pytest.mark.xdist_group("matrix")  # a process composes each cell once


@cache
def static_pair() -> RandomPair:
    pair = build_pair({**base()["model"], "graphs": "replay"})
    assert isinstance(pair, RandomPair)
    return pair


@cache
def chosen() -> tuple[Cell, ...]:
    """Every policy on every executor, every source, both samplings; of those that are exact."""
    cells = [
        cell
        for cell in all_cells()
        if cell.verifier == "match" and cell.sampling in SAMPLINGS
        if cell.source == "draft_model" or cell.policy in ("chain", "best_first")
    ]
    return tuple(cover(cells, lambda c: {(c.policy, c.executor), c.source, c.sampling}, runs))


def _runner(cell: Cell) -> PartsRunner:
    values = config(cell)
    values["model"]["graphs"] = "replay"
    stop = StopRules(max_new_tokens=NUM_TOKENS)
    return PartsRunner(cfg=values, pair=static_pair(), stop=stop)


def expected(sampling: str) -> dict[int, tuple[int, ...]]:
    return {prompt: tokens[:NUM_TOKENS] for prompt, tokens in plain(sampling).items()}


@pytest.mark.slow
@pytest.mark.parametrize("part", sampled(range(NUM_PARTS), every=2))
def test_static_passes_are_lossless(part: int) -> None:
    assert len(chosen()) >= NUM_PARTS
    for cell in chosen()[part::NUM_PARTS]:
        assert decode(_runner(cell)) == expected(cell.sampling), cell


def test_passes_are_replayed() -> None:
    """The target's passes really go through the buffers, the draft's too."""
    ready = _runner(Cell("draft_model", "best_first", "match", "local", "greedy"))
    outputs = decode(ready)
    target = ready.parts.executor.stages[0].stage.runner.backend
    draft = ready.parts.source._runner.backend
    assert outputs == expected("greedy")
    assert target.replays >= ready.parts.executor.counters.passes
    assert draft.replays > 0.5 * ready.parts.source.counters.passes  # prompts go in larger chunks
    assert 0 < len(target.launches) < target.replays


@pytest.mark.parametrize("fault", ["spare slot", "mask", "length"])
def test_a_fault_in_the_padding_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: padding on a slot in use, a mask that shows too much, a length off by one."""
    original = Inputs.fill

    def wrong(self, rows, spare, hidden):
        original(self, rows, 0 if fault == "spare slot" else spare, hidden)
        if fault == "mask":
            self.visible.fill_(1)
        elif fault == "length":
            self.lengths -= np.int64(1)

    monkeypatch.setattr(Inputs, "fill", wrong)
    cell = Cell("draft_model", "best_first", "match", "local", "greedy")
    try:
        outputs = decode(_runner(cell))
    except AssertionError:
        return
    assert outputs != expected("greedy")
