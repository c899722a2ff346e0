"""Tensor-parallel groups of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from specdec.distributed.transport import (
    NO_TIMEOUT,
    Group,
    PeerLost,
    collective_group,
    wait_for,
    wire_device,
)
from specdec.tensor_parallel.collective import Collective


class RankCollective(Collective):
    """Collectives of a group of processes over gloo or NCCL.

    Attributes:
        num_bytes: bytes that this process has sent to the others, not counting what a ring
            algorithm forwards.
    """

    def __init__(
        self,
        group: Any,
        *,
        rank: int,
        peers: Sequence[int],
        timeout: timedelta = NO_TIMEOUT,
        wire: torch.device | None = None,
    ) -> None:
        """Wraps a connected process group.

        Args:
            group: a ProcessGroupGloo or ProcessGroupNCCL with as many processes as ``peers``.
            peers: global ranks of the group's processes.
            timeout: per operation; gloo only.
            wire: device to which tensors are copied for the operation (default: none, in place).
        """
        super().__init__(rank=rank, size=len(peers))
        self._group = group
        self._peers = tuple(peers)
        self._timeout = timeout
        self._wire = wire
        self.num_bytes = 0

    def _gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        def start(received: torch.Tensor, own: torch.Tensor) -> dist.Work:
            return self._group._allgather_base(received.flatten(), own.flatten())  # views

        return self._run(tensor, (self.size, *tensor.shape), start).unbind()

    def _exchange(self, slices: torch.Tensor) -> torch.Tensor:
        def start(received: torch.Tensor, own: torch.Tensor) -> dist.Work:
            return self._group.alltoall_base(received, own, [], [])  # equal parts

        return self._run(slices, slices.shape, start)

    def _run(
        self,
        tensor: torch.Tensor,
        shape: Sequence[int],
        start: Callable[[torch.Tensor, torch.Tensor], dist.Work],
    ) -> torch.Tensor:
        """Runs a collective on ``tensor`` and returns the received values in ``shape``."""
        own = tensor.to(self._wire or tensor.device)
        received = torch.empty(shape, dtype=own.dtype, device=own.device)
        try:
            wait_for(start(received, own), own, self._timeout)
        except RuntimeError as error:
            self._raise_lost(error)
        num_others = received.numel() * received.element_size() // self.size * (self.size - 1)
        self.num_bytes += num_others
        return received.to(tensor.device)

    def _raise_lost(self, error: RuntimeError) -> NoReturn:
        """Blames the next rank, since a broken group does not say which of its processes left."""
        raise PeerLost(self._peers[(self.rank + 1) % self.size]) from error


class Connections:
    """The tensor-parallel groups of one process; each group is connected only once."""

    def __init__(self, *, store: dist.Store, rank: int, loopback: bool) -> None:
        self._store = store
        self._rank = rank
        self._loopback = loopback
        self._groups: dict[tuple[str, tuple[int, ...]], tuple[Group, torch.device]] = {}
        self._joined: list[RankCollective] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that this process has sent in collectives."""
        return sum(joined.num_bytes for joined in self._joined)

    def join(
        self, peers: Sequence[int], device: torch.device, timeout: timedelta = NO_TIMEOUT
    ) -> RankCollective:
        """Joins the group of ``peers``; blocks until all of them have joined.

        Args:
            peers: global ranks, this one included.
        """
        key = (device.type, tuple(peers))
        index = peers.index(self._rank)
        if key not in self._groups:
            name = f"tp-{device.type}-" + "-".join(map(str, peers))
            store = dist.PrefixStore(name, self._store)
            wire = wire_device(store, index, range(len(peers)), device)
            group = collective_group(store, index, len(peers), device=wire, loopback=self._loopback)
            self._groups[key] = group, wire
        group, wire = self._groups[key]
        joined = RankCollective(group, rank=index, peers=peers, timeout=timeout, wire=wire)
        self._joined.append(joined)
        return joined
