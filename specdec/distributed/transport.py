"""Messages between ranks: words (int64 arrays of any length) and hidden states, point to point.

Built on torch.distributed's process groups without its process-wide default group, so that several
pipelines live in one process. Words go over gloo, hidden states over gloo on CPUs and NCCL on GPUs.
A receive is posted before its message is needed: gloo sends nothing before the receiver is ready.

Letters: R rows, E hidden size.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from specdec.types import IntArray

Group: TypeAlias = Any
"""A ProcessGroupGloo or ProcessGroupNCCL; torch's stubs lack their send and recv."""

FOREVER = timedelta(days=300)
"""Patience of a rank: only rank 0 gives up waiting, and ends the others."""

CONNECT = timedelta(seconds=120)
"""Patience with ranks that are to join a group."""

FRAME_WORDS = 2048
_POLL_S = 0.02
_CHUNK_ROWS = 256  # rows of one message of hidden states


class Tag(IntEnum):
    """What a message is; sessions add multiples of ``NUM_TAGS``."""

    CONTROL = 0
    REPLY = 1
    REPLY_ROWS = 2
    HIDDEN = 3


NUM_TAGS = 8
_OVERFLOW = 4  # added to the tag of words for what does not fit the first frame


class PeerLost(RuntimeError):
    """The connection to another rank broke.

    Attributes:
        peer: that rank.
    """

    def __init__(self, peer: int) -> None:
        """Names the peer."""
        self.peer = peer
        super().__init__(f"lost its connection to rank {peer}")


def control_group(store: dist.Store, rank: int, size: int, *, loopback: bool) -> Group:
    """Connects all ranks over gloo.

    Args:
        store: shared by all of them.
        rank, size: as everywhere.
        loopback: whether all ranks are on this machine. Otherwise GLOO_SOCKET_IFNAME names the
            network interface, or the machine's host name its address.
    """
    return _gloo(dist.PrefixStore("control", store), rank, size, loopback=loopback)


def data_group(store: dist.Store, rank: int, size: int) -> Group:
    """Connects the stages (ranks from 1 on) over NCCL; each has set its CUDA device."""
    return _nccl(dist.PrefixStore("data", store), rank - 1, size - 1)


def connected(
    store: dist.Store, index: int, size: int, *, device: torch.device, loopback: bool
) -> Group:
    """Connects some ranks for collectives: over gloo on CPUs, NCCL elsewhere.

    Args:
        store: of these ranks alone.
        index, size: place among them, and their number.
        device: of what is sent.
        loopback: see ``control_group``.
    """
    if device.type == "cpu":
        return _gloo(store, index, size, loopback=loopback)
    return _nccl(store, index, size)


CPU = torch.device("cpu")


def wire_device(
    store: dist.Store, me: int, others: Iterable[int], device: torch.device
) -> torch.device:
    """Where tensors have to lie that go to and come from other ranks: ``device``, or the CPU.

    NCCL refuses ranks that share a GPU, as on a machine with one. Theirs go over gloo, by the host.

    Args:
        store: shared by all; each of them asks the same question once.
        me, others: their names in it.
        device: of this rank's model.
    """
    if device.type == "cpu":
        return device
    mine = gpu_id(device)
    store.set(f"gpu/{me}", mine)
    keys = [f"gpu/{other}" for other in others if other != me]
    while not store.check(keys):  # a wait of the store's own would keep signs of life back
        time.sleep(_POLL_S)
    return CPU if mine.encode() in [store.get(key) for key in keys] else device


def gpu_id(device: torch.device) -> str:
    """What no other GPU is called, on any machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _gloo(store: dist.Store, index: int, size: int, *, loopback: bool) -> Group:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        device = gloo.create_device(interface=interface)
    elif loopback:
        device = gloo.create_device(hostname="127.0.0.1")
    else:
        device = gloo.create_default_device()
    options._devices = [device]
    options._timeout = CONNECT
    return gloo(store, index, size, options)


def _nccl(store: dist.Store, index: int, size: int) -> Group:
    nccl: Any = dist.ProcessGroupNCCL
    return nccl(store, index, size, nccl.Options())


def settle(work: dist.Work, on: torch.Tensor, patience: timedelta = FOREVER) -> None:
    """Waits until an operation on a tensor is through.

    On a GPU its stream waits and the host goes on. Asked with a time limit, NCCL's works would have
    the host look every few milliseconds instead, in every layer of a tensor-parallel group.
    """
    if on.device.type == "cpu":
        work.wait(patience)
    else:
        work.wait()


class Sender:
    """Sends without waiting; keeps what is under way.

    Attributes:
        num_bytes: sent so far.
    """

    def __init__(self, group: Group, *, max_under_way: int) -> None:
        """Sends through ``group``.

        Args:
            group: the process group.
            max_under_way: tensors kept until they are through; with more, a send waits for the
                oldest.
        """
        self._group = group
        self._max_under_way = max_under_way
        self._under_way: deque[tuple[dist.Work, torch.Tensor, int]] = deque()
        self.num_bytes = 0

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Hands a contiguous tensor over; it must not change afterwards."""
        try:
            work = self._group.send([tensor], to, tag)
            self._under_way.append((work, tensor, to))
            self.num_bytes += tensor.numel() * tensor.element_size()
            if len(self._under_way) > self._max_under_way:
                work, oldest, to = self._under_way.popleft()
                settle(work, oldest)
        except RuntimeError as error:
            raise PeerLost(to) from error

    def send_words(self, words: IntArray, to: int, tag: int) -> None:
        """Sends int64[n] whose first word is n, in one frame or in two."""
        tensor = torch.from_numpy(words)
        self.send(tensor[:FRAME_WORDS], to, tag)
        if len(words) > FRAME_WORDS:
            self.send(tensor[FRAME_WORDS:], to, tag + _OVERFLOW)


class WordReceiver:
    """Receives words from one rank into two frames, one of which is always posted ahead.

    A frame that was read is posted again before the next wait, not at once: posting costs a message
    to the sender, and what has just come is urgent.
    """

    def __init__(self, group: Group, source: int, tag: int) -> None:
        """Posts the first receives."""
        self._group = group
        self._source = source
        self._tag = tag
        self._frames = [torch.zeros(FRAME_WORDS, dtype=torch.int64) for _ in range(2)]
        self._works: list[dist.Work | None] = [None, None]
        self._at = 0
        self._post()

    def receive(self) -> IntArray:
        """Waits for the next message; int64[n], the caller's own.

        Raises:
            PeerLost: if the source has gone.
        """
        try:
            self._post()
            work, frame = self._works[self._at], self._frames[self._at].numpy()
            assert work is not None, "both are posted"
            work.wait(FOREVER)
            size = int(frame[0])
            words = frame[:size].copy()
            self._works[self._at] = None
            self._at = 1 - self._at
            if size > FRAME_WORDS:
                rest = torch.empty(size - FRAME_WORDS, dtype=torch.int64)
                tag = self._tag + _OVERFLOW
                self._group.recv([rest], self._source, tag).wait(FOREVER)
                words = np.concatenate([words, rest.numpy()])
        except RuntimeError as error:
            raise PeerLost(self._source) from error
        return words

    def _post(self) -> None:
        """Posts what is not, in the order in which messages will come."""
        for i in (self._at, 1 - self._at):
            if self._works[i] is None:
                self._works[i] = self._group.recv([self._frames[i]], self._source, self._tag)


class RowReceiver:
    """Receives hidden states from one rank into two fixed buffers, one of which is posted ahead.

    Where rows are cut into chunks is known to both sides. Over NCCL, whose receives must match the
    sends in size, a receive is posted when the number of rows is known.
    """

    def __init__(
        self,
        group: Group,
        source: int,
        tag: int,
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Makes the buffers.

        Args:
            group: gloo for a CPU, NCCL for a GPU.
            source: the sender, as ``group`` numbers it.
            tag: of the session.
            width: E.
            dtype, device: of the rows.
        """
        self._group = group
        self._source = source
        self._tag = tag
        self._ahead = device.type == "cpu"
        shape = (_CHUNK_ROWS, width)
        self._buffers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
        self._works: list[dist.Work | None] = [None, None]
        self._at = 0
        self.release()

    def receive(self, num_rows: int) -> torch.Tensor:
        """[num_rows, E], valid until ``release`` or the next call.

        Raises:
            PeerLost: if the source has gone.
        """
        if num_rows <= _CHUNK_ROWS:
            return self._chunk(num_rows)
        starts = range(0, num_rows, _CHUNK_ROWS)
        return torch.cat([self._chunk(min(_CHUNK_ROWS, num_rows - s)).clone() for s in starts])

    def release(self) -> None:
        """What was received is not needed any more: posts its buffer again.

        Raises:
            PeerLost: if the source has gone.
        """
        if not self._ahead:
            return
        try:
            for i in (self._at, 1 - self._at):
                if self._works[i] is None:
                    self._works[i] = self._post(i, _CHUNK_ROWS)
        except RuntimeError as error:
            raise PeerLost(self._source) from error

    def _chunk(self, num_rows: int) -> torch.Tensor:
        at = self._at
        try:
            work = self._works[at] or self._post(at, num_rows if not self._ahead else _CHUNK_ROWS)
            settle(work, self._buffers[at])
        except RuntimeError as error:
            raise PeerLost(self._source) from error
        self._works[at] = None
        self._at = 1 - at
        return self._buffers[at][:num_rows]

    def _post(self, at: int, num_rows: int) -> dist.Work:
        return self._group.recv([self._buffers[at][:num_rows]], self._source, self._tag)


def send_rows(sender: Sender, rows: torch.Tensor, to: int, tag: int) -> None:
    """Sends [R, E] in the chunks that ``RowReceiver`` expects."""
    rows = rows.contiguous()
    for start in range(0, len(rows), _CHUNK_ROWS):
        sender.send(rows[start : start + _CHUNK_ROWS], to, tag)
