from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from specdec.types.arrays import IntArray
from specdec.types.decisions import Commit
from specdec.types.nodes import Nodes

Value = TypeVar("Value")


class NodeMap(Generic[Value]):
    """Stores a value per live node of open requests, by node id.

    A commit removes the values of retired and pruned nodes. Repeating a commit has no effect, so
    the values of nodes that were created in between are safe.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[int, Value]] = {}
        self._steps: dict[int, int] = {}

    def open(self, request_id: int) -> None:
        self._values[request_id] = {}
        self._steps[request_id] = -1

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._values

    def __getitem__(self, request_id: int) -> dict[int, Value]:
        """Returns a dict from node id to value, which the caller may modify."""
        return self._values[request_id]

    def update(self, request_id: int, node_ids: IntArray, values: Iterable[Value]) -> None:
        """Sets one value per node; does nothing if the request is not open."""
        if request_id in self._values:
            self._values[request_id].update(zip(node_ids.tolist(), values, strict=True))

    def get(self, nodes: Nodes) -> list[Value | None]:
        """Returns the values of nodes of open requests in packed order, None where missing."""
        return [self._values[r].get(i) for r, ids in nodes.items for i in ids.tolist()]

    def commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.step <= self._steps.get(commit.request, commit.step):
                continue
            self._steps[commit.request] = commit.step
            values = self._values[commit.request]
            for node_id in values.keys() - set(commit.kept_ids.tolist()):
                del values[node_id]

    def clear(self) -> None:
        """Removes all values; the requests stay open."""
        for values in self._values.values():
            values.clear()

    def close(self, request_id: int) -> None:
        self._values.pop(request_id, None)
        self._steps.pop(request_id, None)
