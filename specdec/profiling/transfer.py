"""Measures the transfer of hidden states between two processes over gloo on loopback."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from specdec.errors import UserError
from specdec.profiling.passes import Sample

_TIMEOUT_S = 180.0


def measure_transfer(
    *, width: int, dtype: torch.dtype, tokens: Sequence[int], repeats: int
) -> list[Sample]:
    """Measures half of a round trip between two processes over the pipeline's transport.

    ``tokens`` are the numbers of rows per message, each of ``width`` values. One measurement before
    the ``repeats`` is not counted.
    """
    # Fresh processes: gloo's and torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sides = [(rank, store.port, width, dtype, tuple(tokens), repeats) for rank in (0, 1)]
    with context.Pool(2) as pool:
        try:
            times, _ = pool.starmap_async(_side, sides).get(_TIMEOUT_S)
        except Exception as error:  # the timeout, or an error of either process
            raise UserError(
                "two processes on this machine did not exchange messages over gloo on 127.0.0.1"
                f" within {_TIMEOUT_S:.0f} s ({type(error).__name__}: {error}): leave transfers out"
                " with profiling.transfer=false"
            ) from error
    return [Sample(num, tuple(ms)) for num, ms in zip(tokens, times, strict=True)]


def _side(
    rank: int, port: int, width: int, dtype: torch.dtype, tokens: tuple[int, ...], repeats: int
) -> list[list[float]]:
    """Runs in each process: rank 0 sends and measures, rank 1 sends back."""
    from specdec.distributed.transport import control_group

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group: Any = control_group(store, rank, 2, loopback=True)  # stubs lack send and recv
    peer = 1 - rank
    times: list[list[float]] = [[] for _ in tokens]
    for i in range(repeats + 1):
        for at, num in enumerate(tokens):
            rows = torch.ones(num, width, dtype=dtype)
            received = torch.empty_like(rows)
            posted = group.recv([received], peer, 0)  # posted ahead, as between stages
            start = perf_counter()
            if rank == 1:
                posted.wait()
            sent = group.send([rows], peer, 0)
            if rank == 0:
                posted.wait()
                if i:
                    times[at].append((perf_counter() - start) / 2 * 1e3)
            sent.wait()
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{peer}"])  # the peer may still be reading
    return times
