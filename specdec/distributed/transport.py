"""Process groups, and what ranks exchange over them: messages, rows of hidden states, collectives.

Everything goes over torch.distributed's gloo, on the host, whoever has started the ranks. The
process-wide default group is not used, so that one process can be part of several pipelines.
Receives are posted before their message is needed, because gloo does not send before the receiver
is ready.

Shape letters: R rows, E hidden size.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from specdec.tensor_parallel.collective import Collective
from specdec.types import IntArray

Group: TypeAlias = Any
"""A ProcessGroupGloo; torch's type stubs lack its send and recv."""

NO_TIMEOUT = timedelta(days=300)
"""Timeout of ranks other than 0: only rank 0 gives up waiting and ends the group."""

CONNECT_TIMEOUT = timedelta(seconds=120)

MESSAGES, ROWS = 0, 2  # tags; each session adds its number to ``ROWS``
_REST = 1  # added to ``MESSAGES``: the part of a message beyond its first frame
_FRAME_WORDS = 2048
_CHUNK_ROWS = 256  # maximum rows per send
_INTERFACE = "GLOO_SOCKET_IFNAME"


class PeerLost(RuntimeError):
    def __init__(self, peer: int) -> None:
        self.peer = peer
        super().__init__(f"lost its connection to rank {peer}")


# ---------------------------------------------------------------------- process groups


def gloo_group(store: dist.Store, index: int, size: int, *, loopback: bool) -> Group:
    """Connects the processes that share ``store``.

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
    """Returns this machine's address on the route to MASTER_ADDR; "" if it is a loopback one."""
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
    """Makes gloo use the loopback interface, by the environment: there is no other public way."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ[_INTERFACE] = names[0] if names else ""
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


class Connections:
    """The process groups of one rank, each connected only once; ``control`` has all ranks."""

    def __init__(self, store: dist.Store, rank: int, size: int, *, loopback: bool) -> None:
        """Blocks until all ranks have joined the control group."""
        self._store = store
        self._rank = rank
        self._loopback = loopback
        self.control = gloo_group(dist.PrefixStore("control", store), rank, size, loopback=loopback)
        self._shared: dict[tuple[int, ...], Group] = {}
        self._peers: dict[int, Peer] = {}
        self._joined: list[RankCollective] = []

    @property
    def num_bytes(self) -> int:
        sent = sum(peer.num_bytes for peer in self._peers.values())
        return sent + sum(joined.num_bytes for joined in self._joined)

    def peer(self, rank: int, *, max_pending: int) -> Peer:
        if rank not in self._peers:
            self._peers[rank] = Peer(self.control, rank, max_pending=max_pending)
        return self._peers[rank]

    def join(self, peers: Sequence[int], timeout: timedelta = NO_TIMEOUT) -> RankCollective:
        """Joins the tensor-parallel group of the global ranks ``peers``; blocks until all of them
        have.
        """
        key, index = tuple(peers), peers.index(self._rank)
        if key not in self._shared:
            store = dist.PrefixStore("tp-" + "-".join(map(str, peers)), self._store)
            self._shared[key] = gloo_group(store, index, len(peers), loopback=self._loopback)
        joined = RankCollective(self._shared[key], rank=index, peers=peers, timeout=timeout)
        self._joined.append(joined)
        return joined


# ---------------------------------------------------------------------- point to point


class Peer:
    """Another rank of a process group; all methods may raise ``PeerLost``."""

    def __init__(self, group: Group, rank: int, *, max_pending: int) -> None:
        """A send waits if ``max_pending`` are incomplete."""
        self.rank = rank
        self._group = group
        self._max_pending = max_pending
        self._pending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.num_bytes = 0

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        try:
            self._pending.append((self._group.send([tensor], self.rank, tag), tensor))
            self.num_bytes += tensor.nbytes
            if len(self._pending) > self._max_pending:
                self._pending.popleft()[0].wait(NO_TIMEOUT)
        except RuntimeError as error:
            raise PeerLost(self.rank) from error

    def send_rows(self, rows: torch.Tensor, tag: int) -> None:
        """Sends hidden states to a ``RowReceiver``."""
        for part in rows.cpu().contiguous().split(_CHUNK_ROWS):
            self.send(part, tag)

    def post(self, tensor: torch.Tensor, tag: int) -> dist.Work:
        """Starts to receive into a contiguous tensor."""
        try:
            work: dist.Work = self._group.recv([tensor], self.rank, tag)
        except RuntimeError as error:
            raise PeerLost(self.rank) from error
        return work

    def wait(self, work: dist.Work) -> None:
        try:
            work.wait(NO_TIMEOUT)
        except RuntimeError as error:
            raise PeerLost(self.rank) from error


class _Posted:
    """Two equal buffers for what a peer sends, one of which is always posted ahead."""

    def __init__(self, peer: Peer, tag: int, buffers: Sequence[torch.Tensor]) -> None:
        self._peer, self._tag = peer, tag
        self._read = deque(buffers)
        self._works: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.post()

    def post(self) -> None:
        """Posts the buffers that have been read, in the order in which they will be filled."""
        while self._read:
            buffer = self._read.popleft()
            self._works.append((self._peer.post(buffer, self._tag), buffer))

    def receive(self) -> torch.Tensor:
        if not self._works:
            self.post()
        work, buffer = self._works.popleft()
        self._peer.wait(work)
        self._read.append(buffer)
        return buffer


class ControlLink:
    """Messages to and from another rank: int64[n], whose first element is n."""

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
            self._peer.wait(self._peer.post(rest, MESSAGES + _REST))
            packed = np.concatenate([packed, rest.numpy()])
        return packed


class RowReceiver:
    """Receives the hidden states of the previous stage on the host, in the sender's chunks."""

    def __init__(self, peer: Peer, tag: int, *, width: int, dtype: torch.dtype) -> None:
        buffers = [torch.zeros(_CHUNK_ROWS, width, dtype=dtype) for _ in range(2)]
        self._posted = _Posted(peer, tag, buffers)

    def receive(self, num_rows: int) -> torch.Tensor:
        if num_rows <= _CHUNK_ROWS:
            return self._chunk(num_rows)
        starts = range(0, num_rows, _CHUNK_ROWS)
        return torch.cat([self._chunk(min(_CHUNK_ROWS, num_rows - s)).clone() for s in starts])

    def release(self) -> None:
        self._posted.post()

    def _chunk(self, num_rows: int) -> torch.Tensor:
        return self._posted.receive()[:num_rows]


# ---------------------------------------------------------------------- collectives


class RankCollective(Collective):
    """Collectives of a group of processes over gloo, on the host; ``num_bytes`` are those that this
    process has sent, without what a ring forwards.
    """

    def __init__(
        self,
        group: Any,
        *,
        rank: int,
        peers: Sequence[int],
        timeout: timedelta = NO_TIMEOUT,
    ) -> None:
        """Wraps a ProcessGroupGloo of the global ranks ``peers``; ``timeout`` is per operation."""
        super().__init__(rank=rank, size=len(peers))
        self._group = group
        self._peers = tuple(peers)
        self._timeout = timeout
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
        own = tensor.cpu()
        received = torch.empty(shape, dtype=own.dtype)
        try:
            start(received, own).wait(self._timeout)
        except RuntimeError as error:
            raise PeerLost(self._peers[(self.rank + 1) % self.size]) from error
        self.num_bytes += received.nbytes // self.size * (self.size - 1)
        return received.to(tensor.device)
