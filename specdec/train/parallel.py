"""Data-parallel training on one machine: as many processes as asked for, gloo or NCCL between them.

On a CPU that is shared with other work, processes of one thread that meet once per step lose less
than one process of several threads, which meet at every operation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from torch import Tensor

from specdec.errors import UserError


def rank_and_size() -> tuple[int, int]:
    """This process's number and the number of processes; (0, 1) outside a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def agreed(value: float) -> float:
    """Process 0's value, in every process."""
    if rank_and_size()[1] == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def wait_for_all() -> None:
    """Returns when every process has called it."""
    if rank_and_size()[1] > 1:
        dist.barrier()


def check_rows(batch: int, name: str) -> None:
    """Refuses a batch that does not give every process as many rows.

    Raises:
        UserError: it is no multiple of the number of processes.
    """
    size = rank_and_size()[1]
    if batch % size:
        raise UserError(f"{name}={batch} is no multiple of num_processes={size}")


def own_rows(*batches_BS: Tensor, device: torch.device) -> list[Tensor]:
    """This process's share of the rows of each batch, on its device."""
    rank, size = rank_and_size()
    return [batch_BS[rank::size].to(device) for batch_BS in batches_BS]


def average_gradients(weights: Iterable[torch.nn.Parameter]) -> None:
    """Replaces each gradient by its mean over the processes; every process has the same set."""
    size = rank_and_size()[1]
    if size == 1:
        return
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= size
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def _child(
    rank: int, size: int, store: str, recipe: Callable[..., None], cfg: dict[str, Any]
) -> None:
    backend = "nccl" if torch.cuda.is_available() and cfg.get("device") != "cpu" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    console = Console(stderr=True)

    def report(share: float, line: str) -> None:
        if rank == 0:
            console.print(f"{share:4.0%} {line}", markup=False, highlight=False)

    try:
        recipe(**cfg, report=report)
    except UserError as error:
        Path(f"{store}.{rank}.error").write_text(str(error))
        raise
    finally:
        dist.destroy_process_group()


def spawned(recipe: Callable[..., None], cfg: dict[str, Any], size: int) -> bool:
    """Runs a recipe in `size` processes, unless that is one or this is one of them.

    On GPUs there is one process per GPU at the most, and one where `device` names a single one.

    Args:
        recipe: see run_in_processes.
        cfg: its arguments; "report" is told where there are fewer processes, and left out.
        size: processes wanted.

    Returns:
        True when the recipe has run; False when the caller should do the work itself.
    """
    device = str(cfg.get("device"))
    if size > 1 and rank_and_size()[1] == 1 and device != "cpu" and torch.cuda.is_available():
        most = 1 if ":" in device else torch.cuda.device_count()
        if most < size:
            cfg["report"](0.0, f"device={device}: {most} of num_processes={size}, one per GPU")
        size = min(size, most)
    if size <= 1 or rank_and_size()[1] > 1:
        return False
    arguments = {name: value for name, value in cfg.items() if name != "report"}
    run_in_processes(recipe, arguments, size)
    return True


def run_in_processes(recipe: Callable[..., None], cfg: dict[str, Any], size: int) -> None:
    """Runs a recipe in `size` new processes that form one group; process 0 prints progress.

    Args:
        recipe: a module-level function that takes cfg's entries and `report`.
        cfg: picklable arguments.
        size: processes, 2 or more.

    Raises:
        UserError: as a process raised it.
        torch.multiprocessing.ProcessRaisedException: a process failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        try:
            mp.start_processes(  # type: ignore[no-untyped-call]
                _child, args=(size, str(store), recipe, cfg), nprocs=size, start_method="spawn"
            )
        except mp.ProcessRaisedException as error:
            told = sorted(store.parent.glob("*.error"))
            raise UserError(told[0].read_text()) if told else error from None
