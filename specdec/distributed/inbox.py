from __future__ import annotations

import queue
import threading
from collections.abc import Container, Iterable, Mapping
from time import monotonic

from specdec.distributed.links import ControlLink, SocketLink
from specdec.distributed.messages import REPLIES, Message, ReplyKey
from specdec.distributed.transport import PeerLost


class Inbox:
    """Queues of the replies that ranks send to rank 0, one per kind and rank.

    A thread per rank reads replies while rank 0 does something else: hidden states fill a socket's
    buffer, and a rank must not wait for rank 0 to read them. For a reply that rank 0 waits for, a
    thread would only add a second wake-up. Such replies are therefore read by the caller of ``has``
    and ``take``, if they come over a socket and ``wakeup`` is not set.
    """

    def __init__(self, links: Mapping[int, ControlLink]) -> None:
        """``links``: rank -> its control link. Nothing is read before ``listen``."""
        self._links = links
        self._queues: dict[ReplyKey, queue.SimpleQueue[Message | None]] = {
            (kind, rank): queue.SimpleQueue() for kind in REPLIES for rank in links
        }
        self._threads: dict[int, threading.Thread] = {}
        self._direct: dict[int, SocketLink] = {}
        self._wakeup: threading.Event | None = None
        self._lost: int | None = None  # the first rank whose link ended in a thread

    @property
    def wakeup(self) -> threading.Event | None:
        """An event that is set when a reply arrives; unless None, threads read all replies."""
        return self._wakeup

    @wakeup.setter
    def wakeup(self, event: threading.Event | None) -> None:
        self._wakeup = event
        if event is not None:
            for rank in list(self._direct):
                self._start(rank)

    def listen(self, ranks: Iterable[int], *, awaited: Container[int]) -> None:
        """Starts reading the replies of further ranks.

        Args:
            ranks: ranks that send replies.
            awaited: ranks whose replies rank 0 waits for in the step in which they are sent.
        """
        for rank in ranks:
            link = self._links[rank]
            if rank in self._threads:
                continue
            if isinstance(link, SocketLink) and rank in awaited and self._wakeup is None:
                self._direct[rank] = link
            else:
                self._start(rank)

    def has(self, key: ReplyKey) -> bool:
        """Returns whether ``take`` would return at once."""
        link = self._direct.get(key[1])
        while link is not None and self._queues[key].empty() and link.has_message(0.0):
            self._read(key[1])
        return not self._queues[key].empty()

    def take(self, key: ReplyKey, timeout_s: float) -> Message | None:
        """Waits for a reply; returns None after ``timeout_s``.

        Raises:
            PeerLost: the connection to this or another rank broke.
        """
        replies, link = self._queues[key], self._direct.get(key[1])
        if link is not None:
            until = monotonic() + timeout_s
            while replies.empty() and link.has_message(max(0.0, until - monotonic())):
                arrived = self._next(key[1])
                if arrived.kind is key[0]:
                    return arrived
                self._queues[arrived.kind, key[1]].put(arrived)
            timeout_s = 0.0
        try:
            received = replies.get(timeout=timeout_s) if timeout_s else replies.get_nowait()
        except queue.Empty:
            return None
        if received is None:
            assert self._lost is not None, "the end of a link names its rank"
            raise PeerLost(self._lost)
        return received

    def join(self, timeout_s: float) -> None:
        """Waits for the threads, which end when their peers have ended."""
        for thread in self._threads.values():
            thread.join(timeout_s)

    def _next(self, rank: int) -> Message:
        return Message.unpack(self._links[rank].receive())

    def _read(self, rank: int) -> None:
        received = self._next(rank)
        self._queues[received.kind, rank].put(received)

    def _start(self, rank: int) -> None:
        self._direct.pop(rank, None)
        thread = threading.Thread(target=self._listen, args=(rank,), daemon=True)
        self._threads[rank] = thread
        thread.start()

    def _listen(self, rank: int) -> None:
        """Reads until the link ends; runs in its own thread."""
        try:
            while True:
                self._read(rank)
                self._wake()
        except PeerLost as error:
            if self._lost is None:
                self._lost = error.peer
            for replies in self._queues.values():  # every waiting caller raises
                replies.put(None)
            self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()
