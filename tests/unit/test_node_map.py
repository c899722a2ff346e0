"""Per-node values follow the commits."""

from dataclasses import replace

import numpy as np

from specdec.types import IntArray, NodeMap, Nodes
from tests.states import new_commit


def ids(*values: int) -> IntArray:
    return np.array(values, np.int64)


def test_a_commit_keeps_the_values_of_surviving_nodes_only() -> None:
    values: NodeMap[str] = NodeMap()
    values.open(5)
    values.open(6)
    values.update(5, ids(0, 1, 2, 3), "abcd")
    values.update(6, ids(0, 1), "xy")
    first = new_commit(5, 2, kept=(1, 3))
    values.commit([first, replace(first, request=7)])  # request 7 was never opened
    assert values[5] == {1: "b", 3: "d"}
    assert values.get(Nodes(((6, ids(1)), (5, ids(2, 3))))) == ["y", None, "d"]


def test_a_repeated_commit_does_not_drop_newer_nodes() -> None:
    values: NodeMap[str] = NodeMap()
    values.open(5)
    values.update(5, ids(0, 1), "ab")
    first = new_commit(5, 2)
    values.commit([first])
    values.update(5, ids(4), "e")
    values.commit([first])
    assert values[5] == {1: "b", 4: "e"}
    values.commit([new_commit(5, 3, retired=(1,), kept=(4,))])
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
