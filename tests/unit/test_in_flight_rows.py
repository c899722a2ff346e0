"""The number of live rows of batches in flight is that of the rows that pruning leaves."""

from __future__ import annotations

import numpy as np

from specdec.distributed.in_flight_rows import InFlightRows
from specdec.types import Batch, Commit, CommitKind, PrefillChunk, TreeRows


def tree_rows(request: int, ids: np.ndarray) -> TreeRows:
    return TreeRows(
        request=request,
        prefix_len=1,
        node_ids=ids,
        tokens=np.zeros_like(ids),
        parent_ids=ids - 1,
        depths=np.zeros_like(ids),
    )


def kept_by_commit(request: int, step: int, kept: np.ndarray, *, finished: bool) -> Commit:
    return Commit(
        request=request,
        step=step,
        kind=CommitKind.HIT,
        retired_ids=kept[:1],
        retired_tokens=np.zeros(1, np.int64),
        next_token=0,
        root_id=int(kept[0]),
        prefix_len=1,
        kept_ids=kept[1:],
        finished=finished,
    )


def test_numbers_of_live_rows_are_those_of_the_pruned_batches():
    """Random batches of three requests, commits between them, and one request that ends."""
    rng = np.random.default_rng(3)
    rows, latest = InFlightRows(), 0
    for tick in range(12):
        trees = []
        for request in range(3):
            ids = np.arange(latest, latest + rng.integers(1, 9))
            latest += len(ids)
            trees.append(tree_rows(request, ids))
        chunk = PrefillChunk(request=int(rng.integers(3)), start=0, tokens=np.arange(tick % 4))
        batch = Batch(step=tick, trees=tuple(trees), prefills=(chunk,))
        rows.enter(tick, batch, opens=range(3) if tick == 0 else ())
        for request in range(3):
            if rng.random() < 0.5:
                kept = np.flatnonzero(rng.random(latest) < 0.6)
                ends = (tick, request) == (8, 1)
                rows.commit(tick, [kept_by_commit(request, tick, kept, finished=ends)])
    ticks = [11, 3, 20, 7, 8, 9, 0]
    expected = [0 if (batch := rows.alive(tick)) is None else batch.num_tokens for tick in ticks]
    assert rows.num_alive(ticks) == expected
    assert len(set(expected)) > 3
    assert rows.num_alive([]) == []
