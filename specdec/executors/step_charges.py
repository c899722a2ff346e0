"""What the steps of a pipeline cost on a clock, wherever its stages run."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.clocks import CONTROLLER, Clock, Work


class StepCharges:
    """Charges ranks 1 .. N for a step: compute, prune, transmit (SpecPipe Algorithm 1).

    All stages begin with the step, and it ends when the slowest has finished. On a clock that knows
    only this process's rank the charges of others are its plan of them, or nothing.

    A profile prices a device. The devices of a stage work one after the other within a step, with a
    transfer between two of them (PipeDec 3.1: "nodes in group G must execute tasks sequentially").
    """

    def __init__(self, clock: Clock, devices: Sequence[int]) -> None:
        """Charges ``clock`` for stages on ranks 1 .. N, of so many devices each."""
        self._clock = clock
        self._devices = tuple(devices)
        self._ranks = range(1, len(self._devices) + 1)

    def compute(self, rows: Sequence[int], num_nodes: int) -> None:
        """All stages begin.

        Args:
            rows: that each stage computes.
            num_nodes: tree nodes among the last stage's, for the output head.
        """
        for rank, num_devices, num_rows in zip(self._ranks, self._devices, rows, strict=True):
            self._clock.align(rank, CONTROLLER)
            for device in range(num_devices):
                if device:
                    self._clock.charge(rank, Work.TRANSFER, num_rows)
                self._clock.charge(rank, Work.STAGE, num_rows)
        self._clock.charge(self._ranks[-1], Work.HEAD, num_nodes)

    def exit(self, stage: int, num_nodes: int) -> None:
        """Stage number ``stage``, from 0, reads the exit of ``num_nodes`` after its layers."""
        self._clock.charge(self._ranks[stage], Work.EXIT, num_nodes)

    def busy(self) -> bool:
        """Whether a stage is still at work from the controller's point of view."""
        return any(self._clock.busy(rank) for rank in self._ranks)

    def finish(self) -> None:
        """The controller waits until the slowest stage has computed."""
        self._clock.barrier(self._ranks)

    def end(self, pruned: int, rows: Sequence[int], *, answered: bool) -> None:
        """Pruning, then hidden states to the next stage and answers to the controller.

        Args:
            pruned: nodes that pruning looks at; 0 where there was no commit, or nothing to look at.
            rows: that each stage but the last hands on.
            answered: whether the last stage has sent answers.
        """
        for rank in self._ranks:
            self._clock.align(rank, CONTROLLER)
            self._clock.charge(rank, Work.PRUNE, pruned)
        for rank, num_rows in zip(self._ranks, rows, strict=False):
            self._clock.charge(rank, Work.TRANSFER, num_rows)
        if answered:
            self._clock.charge(self._ranks[-1], Work.TRANSFER, 1)
        for rank in self._ranks:
            self._clock.align(CONTROLLER, rank)
