"""What ranks exchange over process groups: messages, replies and rows."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from specdec.distributed.group import Inbox
from specdec.distributed.messages import Kind, Message
from specdec.distributed.transport import (
    CPU,
    ROWS,
    Connections,
    ControlLink,
    Peer,
    PeerLost,
    RowReceiver,
    RowSender,
)
from specdec.types import IntArray

ANSWERS = Kind.ANSWERS, 1
TIMEOUT_S = 30.0


@pytest.fixture
def ranks() -> Iterator[list[Connections]]:
    """Ranks 0 and 1, which are threads."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(lambda rank: Connections(store, rank, 2, loopback=True), range(2)))


@pytest.fixture
def links(ranks: list[Connections]) -> list[ControlLink]:
    return [ControlLink(mine.peer(1 - rank, max_pending=16)) for rank, mine in enumerate(ranks)]


def words(num_words: int) -> IntArray:
    packed = np.arange(num_words)
    packed[0] = num_words
    return packed


def in_background(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_messages_of_any_size_arrive_in_order(ranks, links):
    sizes = [4, 5, 1 << 18, 4, 2048, 2049, 7]
    sender = in_background(lambda: [links[1].send(words(size)) for size in sizes])
    for size in sizes:
        np.testing.assert_array_equal(links[0].receive(), words(size))
    sender.join()
    assert ranks[1].num_bytes == 8 * sum(sizes)
    sender = in_background(lambda: links[0].send(words(9)))
    np.testing.assert_array_equal(links[1].receive(), words(9))
    sender.join()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_arrive_in_order_and_unchanged(ranks, dtype):
    """Also more rows than a chunk, and rows in another memory layout."""
    (after, wire), (before, _) = (
        mine.stage_peer(1 - r, CPU, max_pending=2) for r, mine in enumerate(ranks)
    )
    sender = RowSender(after, ROWS + 1, wire)
    receiver = RowReceiver(before, ROWS + 1, wire, width=64, dtype=dtype)
    sent = [torch.randn(num, 64).to(dtype) for num in (1, 7, 256, 257, 5_000, 3)]
    sent.append(sent[2].T.contiguous().T)
    thread = in_background(lambda: [sender.send(rows) for rows in sent])
    for rows in sent:
        assert torch.equal(receiver.receive(len(rows)), rows)
        receiver.release()
    thread.join()
    assert ranks[0].num_bytes == sum(rows.nbytes for rows in sent)


class Gone:
    """A process group whose other process has ended."""

    def send(self, *_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    recv = send


class Link:
    """What a rank has sent before it ended."""

    def __init__(self, rank: int, *bodies: Any) -> None:
        self._gone = Peer(Gone(), rank, index=rank, max_pending=1)
        self._sent = [Message(Kind.ANSWERS, 1, tick, body) for tick, body in enumerate(bodies)]

    def receive(self) -> IntArray:
        if not self._sent:
            self._gone.post(torch.zeros(1), 0)
        return self._sent.pop(0).pack()


class Silent:
    def receive(self) -> IntArray:
        threading.Event().wait()
        raise AssertionError


def test_replies_wait_in_order_and_wake_who_waits_for_anything() -> None:
    large = torch.arange(1 << 16, dtype=torch.float64).reshape(2, -1)
    inbox = Inbox()
    inbox.listen(2, {2: Silent()})  # type: ignore[dict-item]
    assert inbox.take((Kind.ANSWERS, 2), 2, 0.01) is None
    inbox.wakeup = event = threading.Event()
    inbox.listen(1, {1: Link(1, 5, large, 7)})  # type: ignore[dict-item]
    received = [inbox.take(ANSWERS, 1, TIMEOUT_S) for _ in range(3)]
    assert [(r.session, r.tick) for r in received if r is not None] == [(1, 0), (1, 1), (1, 2)]
    assert torch.equal(received[1].body, large)  # type: ignore[union-attr]
    assert event.is_set()


def test_a_rank_that_ended_is_named_to_whoever_waits_for_another() -> None:
    inbox = Inbox()
    inbox.listen(1, {1: Silent(), 2: Link(2)})  # type: ignore[dict-item]
    with pytest.raises(PeerLost, match="rank 2"):
        inbox.take(ANSWERS, 1, TIMEOUT_S)
