"""Plans which rank (process) computes which layers of the target or which share of the draft.

On GPUs every process has a GPU of its own. With ``executor.shared``, target and draft work in turns
on the same N GPUs, in N + 1 processes: rank 0 uses the same GPU as the target's last rank, which
has no share of the draft. No NCCL communicator contains these two ranks.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdec.errors import UserError
from specdec.executors.layout import StageLayout
from specdec.executors.models import Blocks
from specdec.types import HiddenName, Needs

_LOCAL_RANK = "LOCAL_RANK"  # set by torchrun


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    layers: tuple[int, int]  # half-open range of the target's layers
    # number of its stage, from 1. A stage may consist of several ranks that work one after the
    # other within a step (PipeDec's G).
    group: int
    last_in_group: bool  # whether its rows wait for the step's commit before they are sent on
    # ranks that share its layers (tensor parallelism), itself included; else empty
    peers: tuple[int, ...] = ()
    # number of target layers before each early exit that this rank computes and reports
    exits: tuple[int, ...] = ()
    # hidden and early: hidden states that it sends to rank 0, for the answers and before them
    hidden: tuple[HiddenName, ...] = ()
    early: tuple[HiddenName, ...] = ()

    @property
    def has_side_outputs(self) -> bool:
        return bool(self.exits or self.hidden or self.early)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    # model and clock: nodes of the resolved configuration
    model: Mapping[str, Any]
    clock: Mapping[str, Any]
    threads: int | None = None  # torch threads per rank; None keeps the rank's setting
    trace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan(_Plan):
    ranks: tuple[RankPlan, ...]  # parts of ranks 1 .. N.
    seed: int
    needs: Needs  # what answers and exits contain
    # number of ranks besides rank 0 in the run: N, plus ranks used by the draft only
    num_ranks: int
    # number of ranks that share each layer; rank r receives rows from rank r - degree
    degree: int = 1
    blocks: Blocks = (None, 16)  # of each rank's paged cache
    lock_step: bool = True  # False: ranks wait only for what they receive
    shared_with_draft: bool = False  # whether the draft uses the same devices in turns

    @property
    def members(self) -> range:
        return range(1, len(self.ranks) + 1)

    def neighbours(self, rank: int) -> tuple[int, int]:
        after = rank + self.degree
        return max(0, rank - self.degree), after if after <= len(self.ranks) else 0

    @property
    def num_groups(self) -> int:
        """Number of stages, which is also the pipeline's latency in steps."""
        return self.ranks[-1].group

    @property
    def devices(self) -> list[int]:
        sizes = [0] * self.num_groups
        for part in self.ranks[:: self.degree]:
            sizes[part.group - 1] += 1
        return sizes

    @property
    def repliers(self) -> set[int]:
        sides = {i for i, part in enumerate(self.ranks, 1) if part.has_side_outputs}
        # A first rank that runs free says when it has finished a pass.
        return sides | {len(self.ranks)} | (set() if self.lock_step else {1})


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan(_Plan):
    peers: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        return self.peers[1:]


def plan_ranks(
    bounds: Sequence[tuple[int, int]],
    groups: Sequence[int] | None,
    degree: int = 1,
    *,
    exits: Sequence[int] = (),
    hidden: Sequence[HiddenName] = (),
    early: Sequence[HiddenName] = (),
) -> tuple[RankPlan, ...]:
    """Assigns half-open layer ranges ``bounds``, in order, to ranks 1, 2, ...; one plan per rank.

    Args:
        groups: number of ranges per stage (default: one each).
        degree: ranks per range; only the last of them sends its exits and hidden states to rank 0.
        exits: number of target layers before each early exit.
        hidden, early: hidden states that rank 0 needs with the target's tokens, or before them.
    """
    sizes = [1] * len(bounds) if groups is None else groups
    places = [(g + 1, i == size - 1) for g, size in enumerate(sizes) for i in range(size)]
    plans: list[RankPlan] = []
    for layers, (group, last) in zip(bounds, places, strict=True):
        first = len(plans) + 1
        peers = tuple(range(first, first + degree)) if degree > 1 else ()
        part = RankPlan(layers=layers, group=group, last_in_group=last, peers=peers)
        sender = replace(
            part,
            exits=tuple(layer for layer in exits if layers[0] < layer <= layers[1]),
            hidden=tuple(name for name in hidden if layers[0] <= name.layer < layers[1]),
            early=tuple(name for name in early if layers[0] <= name.layer < layers[1]),
        )
        plans += [*[part] * (degree - 1), sender]
    return tuple(plans)


def check_gpus(layout: StageLayout, num_processes: int, num_gpus: int) -> None:
    """Raises ``UserError``, which suggests settings that fit, if this machine has too few GPUs.

    ``num_processes`` includes rank 0, which shares a stage's GPU if ``layout.shared``. On one GPU,
    two processes would wait for each other's kernels and load two sets of weights, and NCCL refuses
    them. Under torchrun or Slurm each process checks for itself (``own_gpu``).
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
    """Returns this process's GPU, whose index is LOCAL_RANK or else ``rank``; UserError if there is
    none. With ``shared_with_draft``, rank N of a machine with N GPUs uses rank 0's GPU.
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
