"""Tensor-parallel groups of processes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from specdec.distributed.transport import (
    FOREVER,
    Group,
    PeerLost,
    connected,
    settle,
    wire_device,
)
from specdec.tensor_parallel.collective import Collective


class RankCollective(Collective):
    """A group of processes over gloo or NCCL; gloo is given copies of what lies on a GPU."""

    def __init__(
        self,
        group: Any,
        *,
        rank: int,
        peers: Sequence[int],
        patience: timedelta = FOREVER,
        wire: torch.device | None = None,
    ) -> None:
        """Takes a place in a connected process group.

        Args:
            group: a ProcessGroupGloo or ProcessGroupNCCL of as many processes as ``peers``.
            rank: place in ``group``.
            peers: what its processes are called outside of it.
            patience: how long to wait for the others in one operation; over gloo.
            wire: where the group takes tensors; None: where they are.
        """
        super().__init__(rank=rank, size=len(peers))
        self._group = group
        self._peers = tuple(peers)
        self._patience = patience
        self._wire = wire

    def _add(self, tensor: torch.Tensor) -> torch.Tensor:
        sent = tensor.to(self._wire or tensor.device)
        try:
            settle(self._group.allreduce([sent]), sent, self._patience)
        except RuntimeError as error:
            self._lost(error)
        return sent.to(tensor.device)

    def _gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        sent = tensor.to(self._wire or tensor.device)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        try:
            settle(self._group.allgather([parts], [sent]), sent, self._patience)
        except RuntimeError as error:
            self._lost(error)
        return [part.to(tensor.device) for part in parts]

    def _lost(self, error: RuntimeError) -> NoReturn:
        """A broken group does not say who left it: the neighbour stands for them."""
        raise PeerLost(self._peers[(self.rank + 1) % self.size]) from error


class Connections:
    """The tensor-parallel groups that one process has joined; each is connected once."""

    def __init__(self, *, store: dist.Store, rank: int, loopback: bool) -> None:
        """Joins nothing yet.

        Args:
            store: shared by all ranks.
            rank: of this process.
            loopback: whether all ranks are on this machine.
        """
        self._store = store
        self._rank = rank
        self._loopback = loopback
        self._groups: dict[tuple[str, tuple[int, ...]], tuple[Group, torch.device]] = {}

    def join(
        self, peers: Sequence[int], device: torch.device, patience: timedelta = FOREVER
    ) -> RankCollective:
        """The group of ``peers``, which all of them must join at about the same time.

        Args:
            peers: ranks, this one among them.
            device: where the tensors are that it will be given.
            patience: see ``RankCollective``.
        """
        key = (device.type, tuple(peers))
        index = peers.index(self._rank)
        if key not in self._groups:
            name = f"tp-{device.type}-" + "-".join(map(str, peers))
            store = dist.PrefixStore(name, self._store)
            wire = wire_device(store, index, range(len(peers)), device)
            group = connected(store, index, len(peers), device=wire, loopback=self._loopback)
            self._groups[key] = group, wire
        group, wire = self._groups[key]
        return RankCollective(group, rank=index, peers=peers, patience=patience, wire=wire)
