"""Hidden states from one stage to the next: over sockets, gloo or NCCL.

Ranks that this process has started have a socket to the next rank. Rows on the host that are so
small that a socket's buffer holds a step's rows go over it: a message is one system call on either
side. All other rows go over process groups, whose receives are posted ahead, so that a sender need
not wait until the receiver has finished its own work.

Shape letters: R rows, E hidden size.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from specdec.distributed.links import bytes_of
from specdec.distributed.transport import Group, PeerLost, Sender, wait_for

_SMALL_ROW_BYTES = 1024  # Linux buffers 212,992 bytes per socket by default
_CHUNK_ROWS = 256  # maximum rows per message of a process group


@dataclass(frozen=True, slots=True)
class Sockets:
    """A rank's ends of the sockets that it was started with.

    Attributes:
        before, after: to the previous and next rank; None if there is none or if it is rank 0.
    """

    control: socket.socket
    before: socket.socket | None = None
    after: socket.socket | None = None


class RowSender(Protocol):
    """Sends rows to the next stage."""

    def send(self, rows: torch.Tensor) -> None:
        """Sends [R, E], which must not change afterwards; may raise ``PeerLost``."""
        ...


class RowReceiver(Protocol):
    """Receives rows from the previous stage."""

    def receive(self, num_rows: int) -> torch.Tensor:
        """Waits for [num_rows, E], which stay valid until ``release`` or the next call."""
        ...

    def release(self) -> None:
        """Allows the memory of the last received rows to be reused; may raise ``PeerLost``."""
        ...


def fit_socket(width: int, dtype: torch.dtype) -> bool:
    """Returns whether rows of E = ``width`` go over sockets where there are any."""
    return width * dtype.itemsize <= _SMALL_ROW_BYTES


class SocketRowSender:
    """Sends rows over a blocking stream socket."""

    def __init__(self, end: socket.socket, peer: int) -> None:
        self._socket, self._peer = end, peer
        self.num_bytes = 0

    def send(self, rows: torch.Tensor) -> None:
        """Sends rows; waits for the receiver if the socket's buffer is full."""
        data = bytes_of(rows.cpu().contiguous())
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise PeerLost(self._peer) from error
        self.num_bytes += len(data)


class SocketRowReceiver:
    """Receives rows from a blocking stream socket into memory on the host."""

    def __init__(self, end: socket.socket, peer: int, *, width: int, dtype: torch.dtype) -> None:
        """``peer`` is the rank at the other end, ``width`` is E."""
        self._socket, self._peer = end, peer
        self._rows = torch.zeros(_CHUNK_ROWS, width, dtype=dtype)
        self._data = bytes_of(self._rows)

    def receive(self, num_rows: int) -> torch.Tensor:
        if num_rows > len(self._rows):
            self._rows = self._rows.new_zeros(2 * num_rows, self._rows.shape[1])
            self._data = bytes_of(self._rows)
        rows = self._rows[:num_rows]
        size = rows.nbytes
        try:
            num = self._socket.recv_into(self._data[:size], flags=socket.MSG_WAITALL)
        except OSError as error:
            raise PeerLost(self._peer) from error
        if num < size:
            raise PeerLost(self._peer)
        return rows

    def release(self) -> None:
        """Does nothing: the next rows wait in the socket's buffer."""


@dataclass(frozen=True, slots=True)
class GroupPeer:
    """Another rank of a process group: its global ``rank``, and its ``index`` within the group."""

    rank: int
    index: int


class GroupRowSender:
    """Sends rows over a process group, in the chunks that ``GroupRowReceiver`` expects."""

    def __init__(self, sender: Sender, peer: GroupPeer, tag: int, device: torch.device) -> None:
        """Rows are copied to ``device`` before they are sent; ``tag`` is that of the session."""
        self._sender, self._peer, self._tag, self._device = sender, peer, tag, device

    def send(self, rows: torch.Tensor) -> None:
        """Sends rows without waiting."""
        rows = rows.to(self._device).contiguous()
        try:
            for start in range(0, len(rows), _CHUNK_ROWS):
                part = rows[start : start + _CHUNK_ROWS]
                self._sender.send(part, self._peer.index, self._tag)
        except PeerLost as error:  # names the index within the group
            raise PeerLost(self._peer.rank) from error


class GroupRowReceiver:
    """Receives rows from one process of a group into two fixed buffers, one of them posted ahead.

    Both sides split rows into the same chunks. NCCL receives must match the sends in size, so
    there a receive is posted only when the number of rows is known.
    """

    def __init__(
        self,
        group: Group,
        peer: GroupPeer,
        tag: int,
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``group`` is gloo for a CPU and NCCL for a GPU; ``width`` is E."""
        self._group = group
        self._peer = peer
        self._tag = tag
        self._posts_ahead = device.type == "cpu"
        shape = (_CHUNK_ROWS, width)
        self._buffers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
        self._works: list[dist.Work | None] = [None, None]
        self._next = 0
        self.release()

    def receive(self, num_rows: int) -> torch.Tensor:
        if num_rows <= _CHUNK_ROWS:
            return self._chunk(num_rows)
        starts = range(0, num_rows, _CHUNK_ROWS)
        return torch.cat([self._chunk(min(_CHUNK_ROWS, num_rows - s)).clone() for s in starts])

    def release(self) -> None:
        """Posts the buffers of received rows again, which invalidates those rows."""
        if not self._posts_ahead:
            return
        try:
            for i in (self._next, 1 - self._next):
                if self._works[i] is None:
                    self._works[i] = self._post(i, _CHUNK_ROWS)
        except RuntimeError as error:
            raise PeerLost(self._peer.rank) from error

    def _chunk(self, num_rows: int) -> torch.Tensor:
        at = self._next
        try:
            work = self._works[at] or self._post(at, _CHUNK_ROWS if self._posts_ahead else num_rows)
            wait_for(work, self._buffers[at])
        except RuntimeError as error:
            raise PeerLost(self._peer.rank) from error
        self._works[at] = None
        self._next = 1 - at
        return self._buffers[at][:num_rows]

    def _post(self, at: int, num_rows: int) -> dist.Work:
        return self._group.recv([self._buffers[at][:num_rows]], self._peer.index, self._tag)
