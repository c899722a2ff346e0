"""The number of live rows of batches in flight is that of the rows that pruning leaves."""

from __future__ import annotations

import numpy as np

from specdec.distributed.in_flight_rows import InFlightRows
from specdec.executors.row_packing import Submitted
from specdec.types import Batch, Commit, CommitKind, PrefillChunk, TreeRows


def tree_rows(request: int, ids: np.ndarray) -> TreeRows:
    return TreeRows(
        request=request,
        prefix_len=1,
        tokens=np.zeros_like(ids),
        paths=ids[None],
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
    """Random batches of three requests, prompts first, commits, and one request that ends."""
    rng = np.random.default_rng(5)
    rows, submitted, latest = InFlightRows(), Submitted(by_tick=True), 0
    for request in range(3):
        submitted.open(request)
    live = [np.zeros(0, np.int64) for _ in range(3)]
    committed, finished, seen = set[int](), set[int](), set[int]()
    for tick in range(12):
        trees, chunks = [], []
        for request in set(range(3)) - finished:
            if request in committed or rng.random() < 0.7:
                ids = np.arange(latest, latest + rng.integers(1, 9))
                latest += len(ids)
                trees.append(tree_rows(request, ids))
                live[request] = np.concatenate([live[request], ids])
            if request not in committed:
                tokens = np.arange(rng.integers(1, 4))
                chunks.append(PrefillChunk(request=request, start=0, tokens=tokens))
        batch = Batch(step=tick, trees=tuple(trees), prefills=tuple(chunks))
        rows.enter(tick, batch, opens=range(3) if tick == 0 else ())
        submitted.add(batch, tick)
        for request in set(range(3)) - finished:
            if tick > 3 and len(live[request]) and rng.random() < 0.5:
                committed.add(request)
                left = live[request][rng.random(len(live[request])) < 0.8]
                left = left if len(left) else live[request][:1]
                ends = request == 1 and tick >= 7
                commit = kept_by_commit(request, tick, left, finished=ends)
                live[request] = left[1:]
                finished |= {request} if ends else set()
                rows.commit(tick, [commit])
                submitted.commit(commit)
        # Prompt rows of a request are in flight no longer once it has had a commit.
        ticks = [t for t in (11, 3, 20, 7, 8, 9, 0, 5) if t > 3 or not committed]
        expected = []
        for at in ticks:
            batch = rows.alive(at)
            nodes = 0 if batch is None else batch.num_nodes
            prompts = () if batch is None else batch.prefills
            waiting = [len(c.tokens) for c in prompts if c.request not in committed]
            expected.append(nodes + sum(waiting))
        assert submitted.num_rows(ticks) == expected
        seen.update(expected)
    assert len(seen) > 5
    assert finished == {1}
    assert submitted.num_rows([]) == []
    submitted.close(0)
    submitted.close(2)
    assert expected[0] > submitted.num_rows([11])[0] == 0


def test_pruning_examines_all_live_nodes_but_the_verified_path():
    """Of six nodes one is retired and two survive, whose number the next commit begins with."""
    submitted = Submitted()
    submitted.open(0)
    submitted.add(Batch(step=0, trees=(tree_rows(0, np.arange(6)),)))
    commit = kept_by_commit(0, 0, np.array([0, 2, 5]), finished=False)
    assert submitted.commit(commit) == 5
    again = kept_by_commit(0, 1, np.array([2, 5]), finished=True)
    assert submitted.commit(again) == 1
