"""Data-parallel training on one machine: processes that exchange gradients over gloo or NCCL.

On a CPU that is shared with other work, processes of one thread that synchronize once per step
lose less time than one process of several threads, which synchronize at every operation.
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
from torch.nn.utils import parameters_to_vector

from specdec.errors import UserError


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) outside a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def from_rank_0(value: float) -> float:
    """The value of process 0, returned in every process."""
    if rank_and_size()[1] == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def wait_for_all() -> None:
    """Returns once every process has called it."""
    if rank_and_size()[1] > 1:
        dist.barrier()


def check_rows(batch: int, name: str) -> None:
    """Checks that a batch divides evenly among the processes.

    Raises:
        UserError: it is not a multiple of the number of processes.
    """
    size = rank_and_size()[1]
    if batch % size:
        raise UserError(f"{name}={batch} must be a multiple of num_processes={size}")


def own_rows(*batches_BS: Tensor, device: torch.device) -> list[Tensor]:
    """This process's rows of each batch, on its device."""
    rank, size = rank_and_size()
    return [batch_BS[rank::size].to(device) for batch_BS in batches_BS]


def average_gradients(weights: Iterable[torch.nn.Parameter]) -> None:
    """Replaces each gradient by its mean over the processes.

    Every process must have gradients for the same weights.
    """
    size = rank_and_size()[1]
    if size == 1:
        return
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    means = (flat / size).split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def _child(
    rank: int, size: int, store: str, recipe: Callable[..., None], cfg: dict[str, Any]
) -> None:
    backend = "nccl" if torch.cuda.is_available() and cfg.get("device") != "cpu" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    console = Console(stderr=True)

    def report(progress: float, line: str) -> None:
        if rank == 0:
            console.print(f"{progress:4.0%} {line}", markup=False, highlight=False)

    try:
        recipe(**cfg, report=report)
    except UserError as error:
        Path(f"{store}.{rank}.error").write_text(str(error))
        raise
    finally:
        dist.destroy_process_group()


def spawned(recipe: Callable[..., None], cfg: dict[str, Any], size: int) -> bool:
    """Runs a recipe in `size` processes, unless size is 1 or this is already one of them.

    On GPUs there is at most one process per GPU, and one where `device` names a single GPU; then
    ``cfg["report"]`` is called with the number of processes.

    Returns:
        True if the recipe has run, False if the caller must do the work itself.
    """
    if size <= 1 or rank_and_size()[1] > 1:
        return False
    device = str(cfg.get("device"))
    if device != "cpu" and torch.cuda.is_available():
        limit = 1 if ":" in device else torch.cuda.device_count()
        if limit < size:
            cfg["report"](0.0, f"device={device}: {limit} of num_processes={size}, one per GPU")
        size = min(size, limit)
    if size <= 1:
        return False
    run_in_processes(recipe, {name: v for name, v in cfg.items() if name != "report"}, size)
    return True


def run_in_processes(recipe: Callable[..., None], cfg: dict[str, Any], size: int) -> None:
    """Runs a module-level recipe in `size` new processes of one group; process 0 prints progress.

    Raises:
        UserError: as a process raised it.
        torch.multiprocessing.ProcessRaisedException: a process failed; the others were stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        try:
            mp.start_processes(  # type: ignore[no-untyped-call]
                _child, args=(size, str(store), recipe, cfg), nprocs=size, start_method="spawn"
            )
        except mp.ProcessRaisedException as error:
            messages = sorted(store.parent.glob("*.error"))
            raise UserError(messages[0].read_text()) if messages else error from None
