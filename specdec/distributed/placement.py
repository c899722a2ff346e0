"""Assigns one GPU to each process, and refuses layouts that do not fit the machine.

If target and draft share their devices (``executor.shared``), they work in turns, and rank 0 and
the target's last rank, which has no part of the draft, share a GPU: N devices, N + 1 processes. No
NCCL communicator contains both.
"""

from __future__ import annotations

import os

import torch

from specdec.errors import UserError
from specdec.executors.layout import StageLayout

_LOCAL_RANK = "LOCAL_RANK"  # set by torchrun


def check_gpus(layout: StageLayout, num_processes: int, num_gpus: int) -> None:
    """Raises ``UserError``, with layouts that fit, if there are more processes than GPUs.

    Two processes on one GPU would wait for each other's kernels, hold two sets of weights, and
    exchange tensors through the host, because NCCL refuses them. ``num_processes`` includes rank 0.
    """
    if num_processes - layout.shared <= num_gpus or _LOCAL_RANK in os.environ:
        return  # with a launcher there may be other machines: each process checks its own
    # Rank 0 and further ranks of the draft.
    other = num_processes - layout.shared - layout.num_devices
    room = num_gpus - other
    keys = {"stages": layout.stages, "target_degree": layout.degree}
    fits = []
    if room >= layout.degree and layout.stages > 1:
        fits.append(f"executor.stages={room // layout.degree}")
    if room >= layout.stages and layout.degree > 1:
        fits.append(f"executor.target_degree={room // layout.stages}")
    if layout.draft_degree > 1:
        fits.append("a smaller executor.draft_degree")
    asked = ", ".join(f"executor.{key}={value}" for key, value in keys.items() if value > 1)
    raise UserError(
        f"{asked or 'executor.transport=distributed'} needs {num_processes - layout.shared}"
        f" processes with a GPU each ({other} of them for controller and draft), and this machine"
        f" has {num_gpus}: use"
        f" {' or '.join([*fits, 'model.device=cpu'])}"
    )


def own_gpu(rank: int, *, shared_with_draft: bool = False) -> torch.device:
    """Returns the GPU whose index is this process's number among the processes of the machine.

    ``shared_with_draft``: the rank after the last GPU uses rank 0's (see the module).
    """
    index, num_gpus = int(os.environ.get(_LOCAL_RANK, rank)), torch.cuda.device_count()
    if shared_with_draft and index == rank == num_gpus:
        index = 0
    if index >= num_gpus:
        raise UserError(
            f"rank {rank} is process {index} (from 0) of a machine with {num_gpus} GPUs, and each"
            " process needs one of its own: start fewer processes per machine, or use"
            " model.device=cpu"
        )
    return torch.device("cuda", index)
