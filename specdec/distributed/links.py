"""Links for control messages between rank 0 and another rank: sockets on one machine, or gloo.

Ranks that this process has started are connected by socket pairs, which the fork server passes on:
a message is one system call on either side, and a link ends with its process. Ranks of torchrun or
Slurm use gloo.
"""

from __future__ import annotations

import select
import socket
import sys
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch

from specdec.distributed.transport import (
    NO_TIMEOUT,
    Group,
    MessageReceiver,
    PeerLost,
    Sender,
    Tag,
)
from specdec.types import IntArray

_WORD = 8
_BUFFER_BYTES = 1 << 16


class ControlLink(Protocol):
    """A two-way connection to another rank; its methods raise ``PeerLost`` if it breaks."""

    @property
    def num_bytes(self) -> int:
        """Bytes sent so far."""
        ...

    def send(self, packed: IntArray) -> None:
        """Sends int64[n] whose first element is n, and which must not change afterwards."""
        ...

    def receive(self) -> IntArray:
        """Waits for the next message, int64[n]; may be called by another thread than ``send``."""
        ...

    def send_tensor(self, tensor: torch.Tensor) -> None:
        """Sends a contiguous tensor on the host, which must not change afterwards."""
        ...

    def receive_tensor(self, tensor: torch.Tensor) -> None:
        """Waits for a tensor that the peer sends after a message, and stores it in ``tensor``.

        ``tensor`` is contiguous, on the host, and has the sent tensor's shape and dtype.
        """
        ...

    def close(self) -> None:
        """Ends the link; a waiting ``receive`` raises."""
        ...


class GlooLink:
    """A link over a process group; its connections end with the process."""

    def __init__(self, group: Group, peer: int, *, max_pending: int) -> None:
        """Connects this rank with rank 0, or rank 0 with ``peer``."""
        self._group, self._peer = group, peer
        self._sender = Sender(group, max_pending=max_pending)
        self._tags = (Tag.REPLY, Tag.CONTROL) if peer == 0 else (Tag.CONTROL, Tag.REPLY)
        self._receiver: MessageReceiver | None = None

    @property
    def num_bytes(self) -> int:
        return self._sender.num_bytes

    def send(self, packed: IntArray) -> None:
        self._sender.send_message(packed, self._peer, self._tags[0])

    def receive(self) -> IntArray:
        if self._receiver is None:
            self._receiver = MessageReceiver(self._group, self._peer, self._tags[1])
        return self._receiver.receive()

    def send_tensor(self, tensor: torch.Tensor) -> None:
        self._sender.send(tensor, self._peer, Tag.TENSOR)

    def receive_tensor(self, tensor: torch.Tensor) -> None:
        try:
            self._group.recv([tensor], self._peer, Tag.TENSOR).wait(NO_TIMEOUT)
        except RuntimeError as error:
            raise PeerLost(self._peer) from error

    def close(self) -> None:
        """Does nothing."""


class SocketLink:
    """A link over one end of a socket pair."""

    def __init__(self, end: socket.socket, peer: int, *, timeout_s: float | None = None) -> None:
        """Takes ownership of a blocking stream socket that is connected to ``peer``.

        ``timeout_s`` limits how long ``send`` waits for a peer that does not read.
        """
        self._socket, self._peer = end, peer
        self._wait_ms = None if timeout_s is None else timeout_s * 1e3
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._unread = self._buffer[:0]  # received bytes that nobody has read
        self._arrivals = select.poll()
        self._arrivals.register(end, select.POLLIN)
        self.num_bytes = 0

    def send(self, packed: IntArray) -> None:
        """Sends a message; usually the socket's buffer takes all of it at once."""
        self._send(packed.data, packed.nbytes)

    def receive(self) -> IntArray:
        if not self._unread:
            self._unread = self._buffer[: self._receive(self._buffer)]
        if len(self._unread) >= _WORD:  # has the whole message arrived?
            size = _WORD * int.from_bytes(self._unread[:_WORD], sys.byteorder)
            if len(self._unread) >= size:
                packed = np.frombuffer(self._unread[:size], np.int64).copy()
                self._unread = self._unread[size:]
                return packed
        head = memoryview(bytearray(_WORD))
        self._fill(head)
        packed = np.empty(int.from_bytes(head, sys.byteorder), np.int64)
        packed[0] = len(packed)
        self._fill(packed.data.cast("B")[_WORD:])
        return packed

    def has_message(self, timeout_s: float) -> bool:
        """Returns whether a message, or the end of the link, arrives within ``timeout_s``."""
        return bool(self._unread) or bool(self._arrivals.poll(timeout_s * 1e3))

    def send_tensor(self, tensor: torch.Tensor) -> None:
        self._send(bytes_of(tensor), tensor.nbytes)

    def receive_tensor(self, tensor: torch.Tensor) -> None:
        self._fill(bytes_of(tensor))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, data: memoryview, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise PeerLost(self._peer) from error
        if sent < num_bytes:
            self._send_rest(data.cast("B")[sent:])

    def _send_rest(self, data: memoryview) -> None:
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        try:
            while len(data):
                if not room.poll(self._wait_ms):
                    raise PeerLost(self._peer)
                with suppress(BlockingIOError):
                    data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except OSError as error:
            raise PeerLost(self._peer) from error

    def _fill(self, data: memoryview) -> None:
        while len(data):
            if not self._unread:
                if len(data) >= _BUFFER_BYTES:  # read into place, without a copy
                    data = data[self._receive(data) :]
                    continue
                self._unread = self._buffer[: self._receive(self._buffer)]
            num = min(len(data), len(self._unread))
            data[:num] = self._unread[:num]
            data, self._unread = data[num:], self._unread[num:]

    def _receive(self, into: memoryview) -> int:
        try:
            num = self._socket.recv_into(into)
        except OSError as error:  # closed by this process, among others
            raise PeerLost(self._peer) from error
        if not num:
            raise PeerLost(self._peer)
        return num


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
