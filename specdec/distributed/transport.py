"""Process groups, and control messages over them (int64 arrays).

Uses torch.distributed's process groups without the process-wide default group, so that one process
can be part of several pipelines. Receives are posted before their message is needed, because gloo
does not send before the receiver is ready.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from specdec.types import IntArray

Group: TypeAlias = Any
"""A ProcessGroupGloo or ProcessGroupNCCL; torch's type stubs lack their send and recv."""

NO_TIMEOUT = timedelta(days=300)
"""Timeout of ranks other than 0: only rank 0 gives up waiting and ends the group."""

CONNECT_TIMEOUT = timedelta(seconds=120)

CPU = torch.device("cpu")
FRAME_WORDS = 2048
_POLL_S = 0.02
_INTERFACE = "GLOO_SOCKET_IFNAME"


class Tag(IntEnum):
    """Message types; each session adds its own multiple of ``NUM_TAGS``."""

    CONTROL = 0
    REPLY = 1
    TENSOR = 2
    HIDDEN = 3


NUM_TAGS = 8
_OVERFLOW = 4  # added to the tag of the part of a control message beyond its first frame


class PeerLost(RuntimeError):
    """The connection to rank ``peer`` broke."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        super().__init__(f"lost its connection to rank {peer}")


def control_group(store: dist.Store, rank: int, size: int, *, loopback: bool) -> Group:
    """Connects all ranks over gloo.

    ``loopback`` says whether all ranks are on this machine. If not, the environment variable
    GLOO_SOCKET_IFNAME names the network interface (default: that of the host name).
    """
    return _gloo(dist.PrefixStore("control", store), rank, size, loopback=loopback)


def data_group(store: dist.Store, rank: int, size: int) -> Group:
    """Connects the stages (ranks from 1) over NCCL; each has set its CUDA device."""
    return _nccl(dist.PrefixStore("data", store), rank - 1, size - 1)


def collective_group(
    store: dist.Store, index: int, size: int, *, device: torch.device, loopback: bool
) -> Group:
    """Connects a subset of the ranks for collectives, over gloo on CPUs and NCCL on GPUs.

    Only these ranks may share ``store``; ``index`` and ``size`` are within the subset.
    """
    if device.type == "cpu":
        return _gloo(store, index, size, loopback=loopback)
    return _nccl(store, index, size)


_NO_GPU = "cpu"


def wire_device(
    store: dist.Store, me: int, others: Iterable[int], device: torch.device
) -> torch.device:
    """Returns the device on which tensors are exchanged with other ranks: ``device``, or the CPU.

    NCCL refuses ranks that share a GPU. If any two of the participants do, or one has none, all of
    them exchange tensors over gloo, on the host: each decides from the GPUs of all. Every
    participant calls this once; ``me`` and ``others`` are their names in the store.
    """
    is_cpu = device.type == "cpu"
    store.set(f"gpu/{me}", _NO_GPU if is_cpu else gpu_id(device))
    if is_cpu:
        return device
    keys = [f"gpu/{name}" for name in {me, *others}]
    while not store.check(keys):  # Store.wait would block this process's heartbeats
        time.sleep(_POLL_S)
    gpus = [store.get(key) for key in keys]
    return CPU if _NO_GPU.encode() in gpus or len(set(gpus)) < len(gpus) else device


def gpu_id(device: torch.device) -> str:
    """Returns a globally unique name of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _gloo(store: dist.Store, index: int, size: int, *, loopback: bool) -> Group:
    with _loopback_interface() if loopback and not os.environ.get(_INTERFACE) else nullcontext():
        return dist.ProcessGroupGloo(store, index, size, CONNECT_TIMEOUT)


@contextmanager
def _loopback_interface() -> Iterator[None]:
    """Makes gloo use the loopback interface, whatever the host name resolves to.

    The environment is the only public way to choose the interface.
    """
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ[_INTERFACE] = names[0] if names else ""
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _nccl(store: dist.Store, index: int, size: int) -> Group:
    nccl: Any = dist.ProcessGroupNCCL
    return nccl(store, index, size, nccl.Options())


def wait_for(work: dist.Work, on: torch.Tensor, timeout: timedelta = NO_TIMEOUT) -> None:
    """Waits until an operation on tensor ``on`` has completed.

    On a GPU only the stream waits. ``timeout`` is not passed to NCCL, which would then have the
    host poll every few milliseconds in each layer of a tensor-parallel group.
    """
    if on.device.type == "cpu":
        work.wait(timeout)
    else:
        work.wait()


class Sender:
    """Sends asynchronously and keeps tensors alive until they have been sent."""

    def __init__(self, group: Group, *, max_pending: int) -> None:
        """``max_pending``: number of incomplete sends beyond which a send waits for the oldest."""
        self._group = group
        self._max_pending = max_pending
        self._pending: deque[tuple[dist.Work, torch.Tensor, int]] = deque()
        self.num_bytes = 0

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Sends a contiguous tensor, which must not change afterwards; may raise ``PeerLost``."""
        try:
            work = self._group.send([tensor], to, tag)
            self._pending.append((work, tensor, to))
            self.num_bytes += tensor.numel() * tensor.element_size()
            if len(self._pending) > self._max_pending:
                work, oldest, to = self._pending.popleft()
                wait_for(work, oldest)
        except RuntimeError as error:
            raise PeerLost(to) from error

    def send_message(self, packed: IntArray, to: int, tag: int) -> None:
        """Sends int64[n] whose first element is n, in one frame or two."""
        tensor = torch.from_numpy(packed)
        self.send(tensor[:FRAME_WORDS], to, tag)
        if len(packed) > FRAME_WORDS:
            self.send(tensor[FRAME_WORDS:], to, tag + _OVERFLOW)


class MessageReceiver:
    """Receives control messages from one rank into two frames, one of them always posted ahead.

    A frame is posted again before the next wait, not right after reading: posting costs a message
    to the sender, and handling the message just received comes first.
    """

    def __init__(self, group: Group, source: int, tag: int) -> None:
        self._group = group
        self._source = source
        self._tag = tag
        self._frames = [torch.zeros(FRAME_WORDS, dtype=torch.int64) for _ in range(2)]
        self._works: list[dist.Work | None] = [None, None]
        self._next = 0
        self._post()

    def receive(self) -> IntArray:
        """Waits for the next message and returns a copy, int64[n]; may raise ``PeerLost``."""
        try:
            self._post()
            work, frame = self._works[self._next], self._frames[self._next].numpy()
            assert work is not None, "both frames are posted"
            work.wait(NO_TIMEOUT)
            size = int(frame[0])
            packed = frame[:size].copy()
            self._works[self._next] = None
            self._next = 1 - self._next
            if size > FRAME_WORDS:
                rest = torch.empty(size - FRAME_WORDS, dtype=torch.int64)
                tag = self._tag + _OVERFLOW
                self._group.recv([rest], self._source, tag).wait(NO_TIMEOUT)
                packed = np.concatenate([packed, rest.numpy()])
        except RuntimeError as error:
            raise PeerLost(self._source) from error
        return packed

    def _post(self) -> None:
        """Posts free frames, in the order in which messages will arrive."""
        for i in (self._next, 1 - self._next):
            if self._works[i] is None:
                self._works[i] = self._group.recv([self._frames[i]], self._source, self._tag)
