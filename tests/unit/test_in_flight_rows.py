"""Which rows in flight are alive on every rank."""

from __future__ import annotations

import numpy as np

from specdec.executors.stage import InFlightRows
from specdec.types import Batch, Commit, CommitKind, PrefillChunk, TreeRows


def tree_rows(request: int, ids: np.ndarray) -> TreeRows:
    return TreeRows(
        request=request,
        prefix_len=1,
        tokens=np.zeros_like(ids),
        paths=ids[None],
    )


def nodes(batch: Batch) -> dict[int, list[int]]:
    return {tree.request: tree.node_ids.tolist() for tree in batch.trees}


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


def test_live_rows_are_those_that_the_latest_commit_keeps() -> None:
    """Random batches of three requests, commits, one request that ends and one that is reopened."""
    rng = np.random.default_rng(5)
    rows, latest, entered = InFlightRows(), 0, dict[int, dict[int, list[int]]]()
    live, finished, pruned = {0: set[int](), 1: set[int](), 2: set[int]()}, set[int](), 0
    for tick in range(16):
        trees = []
        for request in live.keys() - finished:
            ids = np.arange(latest, latest + rng.integers(1, 9))
            latest += len(ids)
            trees.append(tree_rows(request, ids))
            live[request] |= set(ids.tolist())
        entered[tick] = {tree.request: tree.node_ids.tolist() for tree in trees}
        chunks = [PrefillChunk(request=2, start=0, tokens=np.arange(3))] if tick == 10 else []
        # Request 2 is closed and opened again: its earlier rows are not the new request's.
        opens, closes = {0: ((0, 1, 2), ()), 10: ((2,), (2,))}.get(tick, ((), ()))
        if closes:
            live[2] = set(entered[tick][2])
        batch = Batch(step=tick, trees=tuple(trees), prefills=tuple(chunks))
        for request in closes:
            rows.close(request)
        for request in opens:
            rows.open(request, tick)
        rows.enter(tick, batch)
        for request in sorted(live.keys() - finished):
            if tick > 3 and rng.random() < 0.5:
                left = np.array(sorted(live[request]))
                left = left[rng.random(len(left)) < 0.8]
                if not len(left):
                    continue
                pruned += len(live[request]) - len(left)
                ends = request == 1 and tick >= 7
                rows.commit(tick, [kept_by_commit(request, tick, left, finished=ends)])
                live[request] = set() if ends else set(left[1:].tolist())
                finished |= {request} if ends else set()
        for at in range(tick + 1):
            alive = rows.alive(at)
            found = {} if alive is None else nodes(alive.batch)
            kept = {r: [i for i in ids if i in live[r]] for r, ids in entered[at].items()}
            assert found == {r: ids for r, ids in kept.items() if ids}
    assert finished == {1}
    assert pruned > 20
    assert rows.take(15) is not None
    assert rows.take(15) is None
