"""Data-parallel training on one machine: processes that exchange gradients over gloo or NCCL.

On a CPU that is shared with other work, processes of one thread that synchronize once per step
lose less time than one process of several threads, which synchronize at every operation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from specdec.errors import UserError


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) outside a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def from_rank_0(value: float) -> float:
    """The value of process 0, returned in every process."""
    values = [value]
    if rank_and_size()[1] > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def wait_for_all() -> None:
    """Returns once every process has called it."""
    if rank_and_size()[1] > 1:
        dist.barrier()


def check_rows(batch: int, name: str) -> None:
    """Raises UserError for a batch that is not a multiple of the number of processes."""
    size = rank_and_size()[1]
    if batch % size:
        raise UserError(f"{name}={batch} must be a multiple of num_processes={size}")


def own_rows(*batches_BS: Tensor, device: torch.device) -> list[Tensor]:
    """This process's rows of each batch, on its device."""
    rank, size = rank_and_size()
    return [batch_BS[rank::size].to(device) for batch_BS in batches_BS]


def average_gradients(weights: Iterable[torch.nn.Parameter]) -> None:
    """Replaces each gradient by its mean over processes that have gradients of the same weights."""
    size = rank_and_size()[1]
    if size > 1:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat / size, gradients)
