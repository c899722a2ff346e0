"""Ranks that torchrun or Slurm have started: all with the same words, rank 0 among them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed.rendezvous import rendezvous

from specdec.distributed.group import RankGroup
from specdec.distributed.lease import give
from specdec.distributed.transport import CONNECT
from specdec.distributed.worker import serve
from specdec.errors import RankFailure, UserError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run_given(job: Callable[[], object], *, threads: int | None) -> int:
    """Joins the ranks that the environment names: rank 0 does the job, the others serve it.

    Args:
        job: the work of rank 0; its executors use the given ranks.
        threads: of torch, per rank; None for one.

    Returns:
        Rank 0's exit status; the other ranks' processes end here with theirs.

    Raises:
        UserError: if the environment names no ranks, or what the job refuses.
        RankFailure: on rank 0, when another rank fails.
    """
    rank, size = rank_and_size()
    torch.set_num_threads(threads or 1)
    store, rank, size = next(rendezvous("env://", rank, size, timeout=CONNECT))
    store.set_timeout(timedelta(seconds=60))
    loopback = os.environ["MASTER_ADDR"] in _LOOPBACK
    if rank > 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
        status = serve(store, rank, size, loopback=loopback)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # at once: rank 0 waits for the connection to close
    signal.signal(signal.SIGTERM, _ended_by_launcher)
    group = RankGroup(store=store, size=size, loopback=loopback, processes=None)
    give(group)
    try:
        job()
    finally:
        give(None)
        group.close()
    return 0


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, from torchrun's or Slurm's environment.

    Raises:
        UserError: if there is neither.
    """
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        for name, slurm in _SLURM.items():
            os.environ.setdefault(name, os.environ.get(slurm, "0"))
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set: `specdec worker` is started by torchrun, or by srun"
            " with MASTER_ADDR and MASTER_PORT exported; on one machine `specdec run` starts its"
            " ranks itself"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _ended_by_launcher(*_: object) -> None:
    raise RankFailure(rank=None, cause="the launcher has ended this job (see its own messages)")
