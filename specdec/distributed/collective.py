"""Tensor-parallel groups of processes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from specdec.distributed.transport import FOREVER, Group, PeerLost, connected
from specdec.tensor_parallel.collective import Collective


class RankCollective(Collective):
    """A group of processes over gloo or NCCL."""

    def __init__(
        self, group: Any, *, rank: int, peers: Sequence[int], patience: timedelta = FOREVER
    ) -> None:
        """Takes a place in a connected process group.

        Args:
            group: a ProcessGroupGloo or ProcessGroupNCCL of as many processes as ``peers``.
            rank: place in ``group``.
            peers: what its processes are called outside of it.
            patience: how long to wait for the others in one operation.
        """
        super().__init__(rank=rank, size=len(peers))
        self._group = group
        self._peers = tuple(peers)
        self._patience = patience

    def _add(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            self._group.allreduce([tensor]).wait(self._patience)
        except RuntimeError as error:
            self._lost(error)
        return tensor

    def _gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [tensor]).wait(self._patience)
        except RuntimeError as error:
            self._lost(error)
        return parts

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
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}

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
            self._groups[key] = connected(
                store, index, len(peers), device=device, loopback=self._loopback
            )
        return RankCollective(self._groups[key], rank=index, peers=peers, patience=patience)
