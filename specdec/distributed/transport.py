"""Process groups, and what ranks exchange over them: messages, rows of hidden states, collectives.

Everything goes over torch.distributed (gloo on CPUs, NCCL between GPUs), no matter who has started
the ranks. The process-wide default group is not used, so that one process can be part of several
pipelines. Receives are posted before their message is needed, because gloo does not send before the
receiver is ready.

Shape letters: R rows, E hidden size.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from specdec.tensor_parallel.collective import Collective
from specdec.types import IntArray

Group: TypeAlias = Any
"""A ProcessGroupGloo or ProcessGroupNCCL; torch's type stubs lack their send and recv."""

NO_TIMEOUT = timedelta(days=300)
"""Timeout of ranks other than 0: only rank 0 gives up waiting and ends the group."""

CONNECT_TIMEOUT = timedelta(seconds=120)

CPU = torch.device("cpu")
MESSAGES, ROWS = 0, 2  # tags; each session adds its number to ``ROWS``
_REST = 1  # added to ``MESSAGES``: the part of a message beyond its first frame
_FRAME_WORDS = 2048
_CHUNK_ROWS = 256  # maximum rows per send
_POLL_S = 0.02
_INTERFACE = "GLOO_SOCKET_IFNAME"
_NO_GPU = "cpu"


class PeerLost(RuntimeError):
    def __init__(self, peer: int) -> None:
        self.peer = peer
        super().__init__(f"lost its connection to rank {peer}")


# ---------------------------------------------------------------------- process groups


def gloo_group(store: dist.Store, index: int, size: int, *, loopback: bool) -> Group:
    """Connects the ``size`` processes that share ``store``; this one gets the rank ``index``.

    Unless all are on this machine (``loopback``), the environment variable GLOO_SOCKET_IFNAME names
    the network interface (default: the one towards MASTER_ADDR, since many machines resolve their
    own name to a loopback address).
    """
    if loopback and not os.environ.get(_INTERFACE):
        with _loopback_interface():
            return dist.ProcessGroupGloo(store, index, size, CONNECT_TIMEOUT)
    gloo: Any = dist.ProcessGroupGloo
    if not os.environ.get(_INTERFACE) and (address := _address_towards_master()):
        options = gloo._Options()
        options._timeout = CONNECT_TIMEOUT
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(store, index, size, options)
    return gloo(store, index, size, CONNECT_TIMEOUT)


def _address_towards_master() -> str:
    """Returns this machine's address on the route to MASTER_ADDR; "" if loopback or unknown."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    with suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
        if not address.startswith("127.") and address != "::1":
            return address
    return ""


@contextmanager
def _loopback_interface() -> Iterator[None]:
    """Sets the environment variable that makes gloo use the loopback interface."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ[_INTERFACE] = names[0] if names else ""
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _nccl_group(store: dist.Store, index: int, size: int) -> Group:
    nccl: Any = dist.ProcessGroupNCCL
    return nccl(store, index, size, nccl.Options())


def wire_device(
    store: dist.Store, me: int, others: Iterable[int], device: torch.device
) -> torch.device:
    """Returns the device on which tensors are exchanged with other ranks: ``device``, or the CPU.

    ``me`` and ``others`` are names of ranks in the store. NCCL refuses ranks that share a GPU: if
    two of them do, or one has no GPU, all exchange over gloo on the CPU. Every rank must call this
    once; it reads the GPUs of all ranks, so all decide alike.
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
    return str(torch.cuda.get_device_properties(device).uuid)


class Connections:
    """The process groups of one rank, each of which is connected only once. ``control`` is the gloo
    group of all ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *, loopback: bool) -> None:
        """Blocks until all ``size`` ranks have joined. ``loopback``: all are on this machine."""
        self._store = store
        self._rank = rank
        self._size = size
        self._loopback = loopback
        self.control = gloo_group(dist.PrefixStore("control", store), rank, size, loopback=loopback)
        self._stages: Group = None  # ranks from 1, over NCCL
        self._shared: dict[tuple[str, tuple[int, ...]], tuple[Group, torch.device]] = {}
        self._peers: dict[tuple[str, int], Peer] = {}
        self._joined: list[RankCollective] = []

    @property
    def num_bytes(self) -> int:
        sent = sum(peer.num_bytes for peer in self._peers.values())
        return sent + sum(joined.num_bytes for joined in self._joined)

    def peer(self, rank: int, *, max_pending: int) -> Peer:
        return self._peer("gloo", self.control, rank, rank, max_pending)

    def stage_peer(
        self, rank: int, device: torch.device, *, max_pending: int
    ) -> tuple[Peer, torch.device]:
        """Returns the connection to ``rank``, which must call this too, and the device on which
        tensors are exchanged. ``device`` is that of this rank's hidden states.
        """
        pair = sorted((self._rank, rank))
        edge = dist.PrefixStore(f"edge-{pair[0]}-{pair[1]}", self._store)
        wire = wire_device(edge, self._rank, pair, device)
        if wire.type == "cpu":
            return self.peer(rank, max_pending=max_pending), wire
        if self._stages is None:
            store = dist.PrefixStore("data", self._store)
            self._stages = _nccl_group(store, self._rank - 1, self._size - 1)
        return self._peer("nccl", self._stages, rank, rank - 1, max_pending), wire

    def _peer(self, backend: str, group: Group, rank: int, index: int, max_pending: int) -> Peer:
        key = backend, rank
        if key not in self._peers:
            self._peers[key] = Peer(group, rank, index=index, max_pending=max_pending)
        return self._peers[key]

    def join(
        self, peers: Sequence[int], device: torch.device, timeout: timedelta = NO_TIMEOUT
    ) -> RankCollective:
        """Joins the tensor-parallel group of the global ranks ``peers``; blocks until all of them
        have joined. Its tensors are on ``device``; ``timeout`` limits each operation over gloo.
        """
        key = (device.type, tuple(peers))
        index = peers.index(self._rank)
        if key not in self._shared:
            name = f"tp-{device.type}-" + "-".join(map(str, peers))
            store = dist.PrefixStore(name, self._store)
            wire = wire_device(store, index, range(len(peers)), device)
            if wire.type == "cpu":
                group = gloo_group(store, index, len(peers), loopback=self._loopback)
            else:
                group = _nccl_group(store, index, len(peers))
            self._shared[key] = group, wire
        group, wire = self._shared[key]
        joined = RankCollective(group, rank=index, peers=peers, timeout=timeout, wire=wire)
        self._joined.append(joined)
        return joined


# ---------------------------------------------------------------------- point to point


def _wait_for(work: dist.Work, on: torch.Tensor, timeout: timedelta = NO_TIMEOUT) -> None:
    """Waits until an operation on tensor ``on`` has completed; on a GPU only its stream waits.

    ``timeout`` is not passed to NCCL: with a timeout, the host would poll every few milliseconds in
    each layer.
    """
    if on.device.type == "cpu":
        work.wait(timeout)
    else:
        work.wait()


class Peer:
    """Connection to another rank of a process group; methods raise ``PeerLost`` if it breaks."""

    def __init__(self, group: Group, rank: int, *, index: int, max_pending: int) -> None:
        """``index`` is the number of ``rank`` in the group. If more than ``max_pending`` sends are
        incomplete, a send waits for the oldest.
        """
        self.rank = rank
        self._group = group
        self._index = index
        self._max_pending = max_pending
        self._pending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.num_bytes = 0

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        try:
            self._pending.append((self._group.send([tensor], self._index, tag), tensor))
            self.num_bytes += tensor.nbytes
            if len(self._pending) > self._max_pending:
                _wait_for(*self._pending.popleft())
        except RuntimeError as error:
            raise PeerLost(self.rank) from error

    def post(self, tensor: torch.Tensor, tag: int) -> dist.Work:
        """Starts to receive into a contiguous tensor; returns the operation, for ``wait``."""
        try:
            work: dist.Work = self._group.recv([tensor], self._index, tag)
        except RuntimeError as error:
            raise PeerLost(self.rank) from error
        return work

    def wait(self, work: dist.Work, tensor: torch.Tensor) -> None:
        try:
            _wait_for(work, tensor)
        except RuntimeError as error:
            raise PeerLost(self.rank) from error


class _Posted:
    """Double buffer of receives from a peer, which are posted before the data is needed."""

    def __init__(self, peer: Peer, tag: int, buffers: Sequence[torch.Tensor]) -> None:
        self._peer, self._tag = peer, tag
        self._read = deque(buffers)
        self._works: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.post()

    def post(self) -> None:
        """Posts a receive into each buffer whose data was returned by ``receive`` and used."""
        while self._read:
            buffer = self._read.popleft()
            self._works.append((self._peer.post(buffer, self._tag), buffer))

    def receive(self) -> torch.Tensor:
        if not self._works:
            self.post()
        work, buffer = self._works.popleft()
        self._peer.wait(work, buffer)
        self._read.append(buffer)
        return buffer


class ControlLink:
    """Exchanges messages with another rank; a message is int64[n], whose first element is n."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._posted: _Posted | None = None

    def send(self, packed: IntArray) -> None:
        tensor = torch.from_numpy(packed)
        self._peer.send(tensor[:_FRAME_WORDS], MESSAGES)
        if len(packed) > _FRAME_WORDS:
            self._peer.send(tensor[_FRAME_WORDS:], MESSAGES + _REST)

    def receive(self) -> IntArray:
        if self._posted is None:
            frames = [torch.zeros(_FRAME_WORDS, dtype=torch.int64) for _ in range(2)]
            self._posted = _Posted(self._peer, MESSAGES, frames)
        # Not right after reading: posting costs a message, and handling the last one comes first.
        self._posted.post()
        frame = self._posted.receive().numpy()
        size = int(frame[0])
        packed: IntArray = frame[:size].copy()
        if size > _FRAME_WORDS:
            rest = torch.empty(size - _FRAME_WORDS, dtype=torch.int64)
            self._peer.wait(self._peer.post(rest, MESSAGES + _REST), rest)
            packed = np.concatenate([packed, rest.numpy()])
        return packed


class RowSender:
    def __init__(self, peer: Peer, tag: int, wire: torch.device) -> None:
        self._peer, self._tag, self._wire = peer, tag, wire

    def send(self, rows: torch.Tensor) -> None:
        for part in rows.to(self._wire).contiguous().split(_CHUNK_ROWS):
            self._peer.send(part, self._tag)


class RowReceiver:
    """Receives the hidden states that the previous stage's ``RowSender`` sends, in its chunks.

    Receives over NCCL must match the sends in size, so they are posted only when the number of rows
    is known.
    """

    def __init__(
        self, peer: Peer, tag: int, wire: torch.device, *, width: int, dtype: torch.dtype
    ) -> None:
        self._peer, self._tag = peer, tag
        self._buffers = [
            torch.zeros(_CHUNK_ROWS, width, dtype=dtype, device=wire) for _ in range(2)
        ]
        self._posted = _Posted(peer, tag, self._buffers) if wire.type == "cpu" else None
        self._at = 0

    def receive(self, num_rows: int) -> torch.Tensor:
        if num_rows <= _CHUNK_ROWS:
            return self._chunk(num_rows)
        starts = range(0, num_rows, _CHUNK_ROWS)
        return torch.cat([self._chunk(min(_CHUNK_ROWS, num_rows - s)).clone() for s in starts])

    def release(self) -> None:
        if self._posted is not None:
            self._posted.post()

    def _chunk(self, num_rows: int) -> torch.Tensor:
        if self._posted is not None:
            return self._posted.receive()[:num_rows]
        self._at = 1 - self._at
        rows = self._buffers[self._at][:num_rows]
        self._peer.wait(self._peer.post(rows, self._tag), rows)
        return rows


# ---------------------------------------------------------------------- collectives


class RankCollective(Collective):
    """Collectives of a group of processes over gloo or NCCL. ``num_bytes`` counts the bytes that
    this process has sent, without those that it forwards for others in a ring.
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
        """Wraps a ProcessGroupGloo or ProcessGroupNCCL of the global ranks ``peers``.

        ``rank`` is this process's index in ``peers``. ``timeout`` limits each operation over gloo.
        ``wire`` is the device to which tensors are copied before they are sent; None: no copy.
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
        own = tensor.to(self._wire or tensor.device)
        received = torch.empty(shape, dtype=own.dtype, device=own.device)
        try:
            _wait_for(start(received, own), own, self._timeout)
        except RuntimeError as error:
            raise PeerLost(self._peers[(self.rank + 1) % self.size]) from error
        self.num_bytes += received.nbytes // self.size * (self.size - 1)
        return received.to(tensor.device)
