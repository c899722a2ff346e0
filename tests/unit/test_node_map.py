"""Per-node values follow the commits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specdec.types import Commit, CommitKind, IntArray, NodeMap, Nodes


def ids(*values: int) -> IntArray:
    return np.array(values, np.int64)


def commit_of(step: int, *, retired: IntArray, kept: IntArray) -> Commit:
    return Commit(
        request=5,
        step=step,
        kind=CommitKind.HIT,
        retired_ids=retired,
        retired_tokens=retired,
        next_token=1,
        root_id=int(kept[0]),
        prefix_len=9,
        kept_ids=kept,
    )


def test_a_commit_keeps_the_values_of_surviving_nodes_only() -> None:
    values: NodeMap[str] = NodeMap()
    values.open(5)
    values.open(6)
    values.update(5, ids(0, 1, 2, 3), "abcd")
    values.update(6, ids(0, 1), "xy")
    first = commit_of(2, retired=ids(0), kept=ids(1, 3))
    values.commit([first, replace(first, request=7)])  # request 7 was never opened
    assert values[5] == {1: "b", 3: "d"}
    assert values.get(Nodes(((6, ids(1)), (5, ids(2, 3))))) == ["y", None, "d"]


def test_a_repeated_commit_does_not_drop_newer_nodes() -> None:
    values: NodeMap[str] = NodeMap()
    values.open(5)
    values.update(5, ids(0, 1), "ab")
    first = commit_of(2, retired=ids(0), kept=ids(1))
    values.commit([first])
    values.update(5, ids(4), "e")
    values.commit([first])
    assert values[5] == {1: "b", 4: "e"}
    values.commit([commit_of(3, retired=ids(1), kept=ids(4))])
    assert values[5] == {4: "e"}


def test_values_of_a_closed_request_are_ignored() -> None:
    values: NodeMap[str] = NodeMap()
    values.open(5)
    values.close(5)
    values.close(5)
    values.update(5, ids(0), "a")  # a pass that ends after the request
    assert 5 not in values
    values.open(5)
    assert values[5] == {}
