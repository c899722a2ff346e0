"""Tensor-parallel groups of threads, for tests of shares without processes."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from specdec.tensor_parallel.collective import Collective

T = TypeVar("T")


class Meeting:
    """Where the threads of a group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size


class ThreadCollective(Collective):
    """Of tensors that are small enough for one exchange."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank=rank, size=meeting.size)
        self._meeting = meeting

    def _gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        meeting = self._meeting
        meeting.slots[self.rank] = tensor
        meeting.barrier.wait()
        found = list(meeting.slots)
        meeting.barrier.wait()
        return found


def run_group(size: int, work: Callable[[Collective], T]) -> list[T]:
    """Runs ``work`` on every rank of a group at once; what each gave, in order of rank."""
    meeting = Meeting(size)
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            with torch.inference_mode():
                found[rank] = work(ThreadCollective(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return found
