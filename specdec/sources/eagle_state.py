"""What ``EagleSource`` stores per request: the target's features, and the head's own outputs.

Shape letters: S feature size, E hidden size of the head, T positions, W nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.attention.kv_cache import TreeCache
from specdec.device import to_device
from specdec.sampling.transform import SamplingTransform
from specdec.types import HiddenName, IntArray

_DROPPED = 32  # positions forgotten at a time: every step would take a copy per stream


class Features:
    """The target's hidden states of consecutive positions that are still needed.

    The streams of one position may arrive at different times (early hidden states).

    Attributes:
        names: the streams, concatenated in this order.
        first: position of the first stored row.
    """

    def __init__(self, names: Sequence[HiddenName]) -> None:
        """Stores the streams ``names``; one may occur twice."""
        self.names = tuple(names)
        self._streams: dict[HiddenName, list[Tensor]] = {name: [] for name in names}
        self._counts = dict.fromkeys(self._streams, 0)
        self.first = 0

    @property
    def known(self) -> int:
        """Number of positions, from 0, whose streams have all arrived."""
        return self.first + min(self._counts.values())

    def add(self, hidden: Mapping[HiddenName, Tensor], start: int) -> None:
        """Appends rows [T, ..] of the positions from ``start`` on, of any of the streams."""
        for name, rows in hidden.items():
            if name in self._streams:
                end = self.first + self._counts[name]
                assert start == end, f"states of position {start} follow those of {end - 1}"
                self._streams[name].append(rows)
                self._counts[name] += len(rows)

    def rows(self, start: int, stop: int) -> Tensor:
        """[stop - start, S]: features of the positions ``start`` .. ``stop`` - 1."""
        at = slice(start - self.first, stop - self.first)
        assert 0 <= at.start <= at.stop <= min(self._counts.values()), "positions not stored"
        return torch.cat([self._joined(name)[at] for name in self.names], -1)

    def drop(self, start: int) -> None:
        """Forgets the positions before ``start``, once they are more than a few."""
        num = min(start, self.known) - self.first
        if num < _DROPPED:
            return
        for name in self._streams:
            rest = self._joined(name)[num:]
            # A copy: the rows may be a view of a whole chunk, or of a whole batch.
            self._streams[name] = [rest.clone()]
            self._counts[name] -= num
        self.first += num

    def _joined(self, name: HiddenName) -> Tensor:
        parts = self._streams[name]
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]


class StateBank:
    """The head's own output at live nodes: the states that their children read."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None  # [T, E]
        self._index: dict[int, int] = {}

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._index

    def put(self, ids: Sequence[int], rows: Tensor) -> None:
        """Stores rows [W, E] of the nodes ``ids``; a later row of a node replaces the older."""
        if not len(ids):
            return
        start = 0 if self._rows is None else len(self._rows)
        self._rows = rows if self._rows is None else torch.cat([self._rows, rows])
        self._index.update(zip(ids, range(start, start + len(ids)), strict=True))

    def get(self, ids: Sequence[int]) -> Tensor:
        """[W, E]: the rows of the nodes ``ids``, which are stored and at least one."""
        assert self._rows is not None
        rows = np.array([self._index[node] for node in ids])
        return self._rows[to_device(rows, self._rows.device)]

    def keep(self, ids: IntArray) -> None:
        """Drops all nodes but ``ids``."""
        live = [node for node in ids.tolist() if node in self._index]
        self._rows = self.get(live) if live else None
        self._index = {node: row for row, node in enumerate(live)}


@dataclass(slots=True)
class Draft:
    """The head's state for one request.

    Attributes:
        cache: keys and values; slot s has the token at position s + 1.
        transform: the request's sampling transform.
        features: the target's.
        true_len: entries of the cache's prefix that were computed from the target's features.
        true_nodes: nodes whose entries were.
        states: the head's own outputs.
        logits: node id -> [U], of nodes computed as ancestors and not expanded yet.
    """

    cache: TreeCache
    transform: SamplingTransform
    features: Features
    true_len: int = 0
    true_nodes: set[int] = field(default_factory=set)
    states: StateBank = field(default_factory=StateBank)
    logits: dict[int, Tensor] = field(default_factory=dict)

    def needed_from(self, prefix_len: int) -> int:
        """First position whose feature a later pass can read."""
        return min(self.true_len, prefix_len - 1)
