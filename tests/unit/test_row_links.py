"""Hidden states over sockets: the sender's values in order, whatever their number and type."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from specdec.distributed.row_links import SocketRowReceiver, SocketRowSender, fit_socket
from specdec.distributed.transport import PeerLost


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_arrive_in_order_and_unchanged(dtype):
    """Also more rows than memory was allocated for, and than the socket's buffer holds."""
    mine, theirs = socket.socketpair()
    sender = SocketRowSender(mine, 3)
    receiver = SocketRowReceiver(theirs, 2, width=64, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    sent = [
        torch.randn(num, 64, generator=generator, dtype=torch.float32).to(dtype)
        for num in (1, 7, 256, 5_000, 3)
    ]
    parts = [*sent, sent[2].T.contiguous().T]  # another memory layout of the same values

    def send() -> None:
        for rows in parts:
            sender.send(rows)

    thread = threading.Thread(target=send)
    thread.start()
    for rows in parts:
        assert torch.equal(receiver.receive(len(rows)), rows)
        receiver.release()
    thread.join()
    assert sender.num_bytes == sum(rows.nbytes for rows in parts)


@pytest.mark.parametrize("sent", [0, 5])
def test_a_stage_that_ends_is_lost(sent):
    """Between two messages, or within one."""
    mine, theirs = socket.socketpair()
    receiver = SocketRowReceiver(theirs, 4, width=2, dtype=torch.float32)
    mine.send(bytes(sent))
    mine.close()
    with pytest.raises(PeerLost, match="rank 4"):
        receiver.receive(1)
    with pytest.raises(PeerLost, match="rank 5"):
        SocketRowSender(theirs, 5).send(torch.zeros(1, 2))


def test_wide_rows_go_over_process_groups():
    """A socket's buffer would not hold them, and their sender would wait for the next stage."""
    assert fit_socket(256, torch.float32)
    assert not fit_socket(257, torch.float32)
    assert not fit_socket(4096, torch.bfloat16)
