"""Replies that rank 0 reads: by itself where it waits for them, by threads where it does not."""

from __future__ import annotations

import socket
import threading
from time import perf_counter

import pytest
import torch

from specdec.distributed.inbox import Inbox
from specdec.distributed.links import SocketLink
from specdec.distributed.messages import Kind, Message
from specdec.distributed.transport import PeerLost

ANSWERS = Kind.ANSWERS, 1
TIMEOUT_S = 10.0


class Rank:
    """A rank's end of its control link."""

    def __init__(self, end: socket.socket) -> None:
        self.link = SocketLink(end, 0)

    def send(self, tick: int, *body: object) -> None:
        self.link.send(Message(Kind.ANSWERS, 1, tick, body).pack())


@pytest.fixture
def both() -> tuple[Inbox, Rank]:
    mine, theirs = socket.socketpair()
    return Inbox({1: SocketLink(mine, 1)}), Rank(theirs)


@pytest.mark.parametrize("awaited", [{1}, set()], ids=["by the caller", "by a thread"])
def test_replies_come_in_order_with_their_tensors(both, awaited):
    inbox, rank = both
    inbox.listen([1], awaited=awaited)
    large = torch.arange(1 << 16, dtype=torch.float64).reshape(2, -1)
    sender = threading.Thread(
        target=lambda: [
            rank.send(0, 5),
            rank.send(1, 6, large),
            rank.send(2, 7),
        ]
    )
    sender.start()
    for tick, value in enumerate((5, 6, 7)):
        received = inbox.take(ANSWERS, TIMEOUT_S)
        assert received is not None
        assert (received.session, received.tick) == (1, tick)
        assert received.body[0] == value
        if value == 6:
            assert torch.equal(received.body[1], large)
    sender.join()


def test_without_a_reply_take_ends_in_time_and_has_at_once(both):
    inbox, rank = both
    inbox.listen([1], awaited={1})
    began = perf_counter()
    assert inbox.take(ANSWERS, 0.05) is None
    assert 0.05 <= perf_counter() - began < TIMEOUT_S
    assert not inbox.has(ANSWERS)
    rank.send(0, 5)
    assert inbox.has(ANSWERS)
    assert not inbox.has((Kind.ROWS, 1))  # reads it, and finds that it is another one
    assert inbox.take(ANSWERS, 0.0) is not None


def test_an_event_is_set_from_the_moment_it_is_wanted(both):
    """Nothing may be lost between reading by the caller and by a thread."""
    inbox, rank = both
    inbox.listen([1], awaited={1})
    rank.send(0, 5)
    assert inbox.has(ANSWERS)
    rank.send(1, 6)
    inbox.wakeup = event = threading.Event()
    assert event.wait(TIMEOUT_S)
    values = []
    for _ in range(2):
        received = inbox.take(ANSWERS, TIMEOUT_S)
        assert received is not None
        values += received.body
    assert values == [5, 6]


@pytest.mark.parametrize("awaited", [{1}, set()], ids=["by the caller", "by a thread"])
def test_a_rank_that_ends_is_noticed_by_whoever_waits(both, awaited):
    inbox, rank = both
    inbox.listen([1], awaited=awaited)
    rank.link.close()
    with pytest.raises(PeerLost, match="rank 1"):
        inbox.take(ANSWERS, TIMEOUT_S)


def test_the_rank_that_ended_is_named_to_whoever_waits_for_another():
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    inbox = Inbox({rank: SocketLink(mine, rank) for rank, (mine, _) in pairs.items()})
    inbox.listen([1, 2], awaited=())
    pairs[2][1].close()
    with pytest.raises(PeerLost, match="rank 2"):
        inbox.take(ANSWERS, TIMEOUT_S)
