"""Links for control messages between rank 0 and another rank: sockets on one machine, or gloo.

Ranks that this process has started are connected by socket pairs, which the fork server passes on:
a message is one system call on either side, and a link ends with its process. Ranks of torchrun or
Slurm use gloo. Tensors go over gloo or NCCL in either case.
"""

from __future__ import annotations

import select
import socket
import sys
from contextlib import suppress
from io import BufferedReader
from typing import Protocol, cast

import numpy as np

from specdec.distributed.transport import Group, MessageReceiver, PeerLost, Sender, Tag
from specdec.types import IntArray

_WORD = 8
_BUFFER_BYTES = 1 << 16


class ControlLink(Protocol):
    """Both directions between two ranks."""

    @property
    def num_bytes(self) -> int:
        """Bytes sent so far."""
        ...

    def send(self, packed: IntArray) -> None:
        """Sends int64[n] whose first element is n, and which must not change afterwards.

        Raises:
            PeerLost: the connection broke.
        """
        ...

    def receive(self) -> IntArray:
        """Waits for the next message, int64[n]; may be called by another thread than ``send``.

        Raises:
            PeerLost: the connection broke.
        """
        ...

    def close(self) -> None:
        """Ends the link; a waiting ``receive`` raises."""
        ...


class GlooLink:
    """A link over a process group; its connections end with the process."""

    def __init__(self, group: Group, peer: int, *, max_pending: int) -> None:
        """Connects this rank with rank 0, or rank 0 with ``peer``.

        Args:
            group: of all ranks.
            peer: the other rank.
            max_pending: see ``Sender``.
        """
        self._group, self._peer = group, peer
        self._sender = Sender(group, max_pending=max_pending)
        self._tags = (Tag.REPLY, Tag.CONTROL) if peer == 0 else (Tag.CONTROL, Tag.REPLY)
        self._receiver: MessageReceiver | None = None

    @property
    def num_bytes(self) -> int:
        """See ``ControlLink``."""
        return self._sender.num_bytes

    def send(self, packed: IntArray) -> None:
        """See ``ControlLink``."""
        self._sender.send_message(packed, self._peer, self._tags[0])

    def receive(self) -> IntArray:
        """See ``ControlLink``."""
        if self._receiver is None:
            self._receiver = MessageReceiver(self._group, self._peer, self._tags[1])
        return self._receiver.receive()

    def close(self) -> None:
        """Does nothing."""


class SocketLink:
    """A link over one end of a socket pair."""

    def __init__(self, end: socket.socket, peer: int, *, timeout_s: float | None = None) -> None:
        """Takes over a blocking stream socket.

        Args:
            end: connected to ``peer``.
            peer: the other rank.
            timeout_s: how long ``send`` waits for a peer that does not read. Default: no limit.
        """
        self._socket, self._peer = end, peer
        self._wait_ms = None if timeout_s is None else timeout_s * 1e3
        reader = end.makefile("rb", buffering=_BUFFER_BYTES)
        self._reader = cast("BufferedReader", reader)
        self.num_bytes = 0

    def send(self, packed: IntArray) -> None:
        """See ``ControlLink``; usually the socket's buffer takes the whole message at once."""
        size = packed.nbytes
        try:
            sent = self._write(packed.data)
            if sent < size:
                self._write_rest(packed.data.cast("B")[sent:])
        except OSError as error:
            raise PeerLost(self._peer) from error
        self.num_bytes += size

    def receive(self) -> IntArray:
        """See ``ControlLink``."""
        try:
            head = self._reader.read(_WORD)
            if len(head) < _WORD:
                raise PeerLost(self._peer)
            packed = np.empty(int.from_bytes(head, sys.byteorder), np.int64)
            rest = packed.data.cast("B")[_WORD:]
            if self._reader.readinto(rest) < len(rest):
                raise PeerLost(self._peer)
        except (OSError, ValueError) as error:  # ValueError: closed by this process
            raise PeerLost(self._peer) from error
        packed[0] = len(packed)
        return packed

    def close(self) -> None:
        """See ``ControlLink``."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self, data: memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _write_rest(self, data: memoryview) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while len(data):
            if not poll.poll(self._wait_ms):
                raise PeerLost(self._peer)
            data = data[self._write(data) :]
