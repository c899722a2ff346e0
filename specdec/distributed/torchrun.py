"""Ranks started by torchrun or Slurm: every process runs the same command, rank 0 included."""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed.rendezvous import rendezvous

from specdec.distributed.group import RankGroup
from specdec.distributed.rank_groups import use_group
from specdec.distributed.transport import CONNECT_TIMEOUT
from specdec.distributed.worker import serve
from specdec.errors import RankFailure, UserError

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run_under_launcher(
    job: Callable[[], object], *, threads: int | None, timeout_s: float | None = None
) -> int:
    """Joins the ranks of RANK, WORLD_SIZE etc.; rank 0 runs ``job``, the others compute for it.

    Returns the exit status 0 on rank 0; the other processes exit inside this call, also when rank
    0's machine has not answered for ``timeout_s``. ``threads``: torch threads of each (None: 1).
    """
    rank, size = rank_and_size()
    torch.set_num_threads(threads or 1)
    try:
        store, rank, size = next(rendezvous("env://", rank, size, timeout=CONNECT_TIMEOUT))
    except (RuntimeError, ValueError) as error:  # torch's errors of the network, and of numbers
        raise UserError(_no_rendezvous(error)) from error
    store.set_timeout(timedelta(seconds=60))
    loopback = os.environ["MASTER_ADDR"] in _LOOPBACK
    if rank > 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
        status = serve(store, rank, size, loopback=loopback, timeout_s=timeout_s)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # immediately: rank 0 waits for the connection to close
    signal.signal(signal.SIGTERM, _ended_by_launcher)
    group = RankGroup(store=store, size=size, loopback=loopback, processes=None)
    use_group(group)
    try:
        job()
    finally:
        use_group(None)
        group.close()
    return 0


def rank_and_size() -> tuple[int, int]:
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        for name, slurm in _SLURM.items():
            os.environ.setdefault(name, os.environ.get(slurm, "0"))
    missing = [name for name in _REQUIRED if name not in os.environ]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set: `specdec worker` is started by torchrun, or by srun"
            " with MASTER_ADDR and MASTER_PORT exported; on one machine `specdec run` starts its"
            " ranks itself"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _no_rendezvous(error: Exception) -> str:
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return f"MASTER_PORT={port} is in use on this machine: give another free port"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"the ranks cannot meet at MASTER_ADDR={address}, MASTER_PORT={port} ({reason[:200]}):"
        " name the machine of rank 0 and a free port on it, the same on every rank"
    )


def _ended_by_launcher(*_: object) -> None:
    raise RankFailure(rank=None, cause="the launcher has ended this job (see its own messages)")
