"""Control links over socket pairs: whole messages in order, or an error that names the peer."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
import torch

from specdec.distributed.links import SocketLink
from specdec.distributed.transport import PeerLost
from specdec.types import IntArray

FAR_BEYOND_A_BUFFER = 1 << 20  # words


def message(num_words: int) -> IntArray:
    """A message whose words are their places, but for the first, which is the length."""
    packed = np.arange(num_words)
    packed[0] = num_words
    return packed


@pytest.fixture
def ends() -> tuple[SocketLink, SocketLink]:
    """Rank 0's end of a link with rank 3, and rank 3's."""
    mine, theirs = socket.socketpair()
    return SocketLink(mine, 3, timeout_s=0.05), SocketLink(theirs, 0)


def test_messages_of_any_size_arrive_in_order(ends):
    sizes = [4, 5, FAR_BEYOND_A_BUFFER, 4, 10_000, 7]
    rank_0, rank_3 = ends

    def send() -> None:
        for size in sizes:
            rank_3.send(message(size))

    thread = threading.Thread(target=send)
    thread.start()
    for size in sizes:
        received = rank_0.receive()
        np.testing.assert_array_equal(received, message(size))
        assert received.flags.writeable
    thread.join()
    assert rank_3.num_bytes == 8 * sum(sizes)
    rank_0.send(message(9))
    np.testing.assert_array_equal(rank_3.receive(), message(9))
    assert rank_0.num_bytes == 72


def test_a_peer_that_does_not_read_is_lost_and_not_waited_for(ends):
    """Small messages are buffered; what the buffer cannot hold has a time limit."""
    rank_0, _ = ends
    for _ in range(5):
        rank_0.send(message(500))
    with pytest.raises(PeerLost, match="rank 3"):
        rank_0.send(message(FAR_BEYOND_A_BUFFER))


@pytest.mark.parametrize("sent", [0, 3, 8, 39])
def test_a_peer_that_ends_is_lost(sent):
    """Between two messages, or after ``sent`` bytes of one."""
    mine, theirs = socket.socketpair()
    link = SocketLink(mine, 2)
    theirs.sendall(message(5).tobytes()[:sent])
    theirs.close()
    with pytest.raises(PeerLost, match="rank 2"):
        link.receive()
    with pytest.raises(PeerLost, match="rank 2"):
        link.send(message(5))


def test_closing_ends_a_waiting_receive(ends):
    rank_0, _ = ends
    found: list[BaseException] = []

    def receive() -> None:
        try:
            rank_0.receive()
        except PeerLost as error:
            found.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    rank_0.close()
    thread.join()
    assert len(found) == 1


def test_a_tensor_follows_its_message(ends):
    rank_0, rank_3 = ends
    sent = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    rank_3.send(message(4))
    rank_3.send_tensor(sent)
    rank_3.send(message(5))
    received = torch.empty_like(sent)
    assert rank_0.has_message(1.0)
    np.testing.assert_array_equal(rank_0.receive(), message(4))
    rank_0.receive_tensor(received)
    assert torch.equal(received, sent)
    assert rank_0.has_message(0.0)  # received with the others, and not read yet
    np.testing.assert_array_equal(rank_0.receive(), message(5))
    assert not rank_0.has_message(0.0)
    assert rank_3.num_bytes == 9 * 8 + 12
