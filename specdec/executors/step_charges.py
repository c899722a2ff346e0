"""Cost of a pipeline's steps on a clock, for in-process and distributed stages alike."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.clocks import Clock, Work


class StepCharges:
    """Charges ranks 1 .. N for a step: compute, prune, transmit (SpecPipe Algorithm 1).

    All stages start with the step, which ends when the slowest has finished. A clock of a single
    process applies charges of other ranks as its prediction of them, or ignores them.

    A profile prices one device. The devices of a stage run one after the other within a step, with
    a transfer between them (PipeDec 3.1: "nodes in group G must execute tasks sequentially").
    """

    def __init__(self, clock: Clock, devices: Sequence[int]) -> None:
        """Charges ``clock`` for stages on ranks 1 .. N with ``devices`` devices each."""
        self._clock = clock
        self._ranks = range(1, len(devices) + 1)
        self._larger = [(rank, num) for rank, num in enumerate(devices, 1) if num > 1]

    def compute(self, rows: Sequence[int], num_nodes: int) -> None:
        """Charges the compute phase of all stages.

        Args:
            rows: number of rows of each stage.
            num_nodes: tree nodes on the last stage, for the output head.
        """
        clock = self._clock
        self._clock.fan_out(self._ranks)
        self._clock.charge_each(self._ranks, Work.STAGE, rows)
        for rank, num_devices in self._larger:
            for _ in range(num_devices - 1):
                clock.charge(rank, Work.TRANSFER, rows[rank - 1])
                clock.charge(rank, Work.STAGE, rows[rank - 1])
        clock.charge(self._ranks[-1], Work.HEAD, num_nodes)

    def exit(self, stage: int, num_nodes: int) -> None:
        """Charges stage number ``stage``, from 0, for an exit head on ``num_nodes`` rows."""
        self._clock.charge(self._ranks[stage], Work.EXIT, num_nodes)

    def busy(self) -> bool:
        """Whether a stage is still computing from the controller's point of view."""
        return any(self._clock.busy(rank) for rank in self._ranks)

    def due_s(self) -> float | None:
        """When the slowest stage ends; None on a measured clock."""
        ends = [self._clock.ends_s(rank) for rank in self._ranks]
        return max((at for at in ends if at is not None), default=None)

    def finish(self) -> None:
        """Makes the controller wait for the slowest stage."""
        self._clock.barrier(self._ranks)

    def end(self, pruned: int, rows: Sequence[int], *, answered: bool) -> None:
        """Charges pruning, then the transfer of hidden states and answers.

        Args:
            pruned: number of nodes that the pruning examines; 0 without a commit.
            rows: rows that each stage but the last transmits.
            answered: whether the last stage sends answers to the controller.
        """
        ranks = self._ranks
        self._clock.fan_out(ranks)
        if pruned:
            self._clock.charge_each(ranks, Work.PRUNE, [pruned] * len(ranks))
        self._clock.charge_each(ranks[: len(rows)], Work.TRANSFER, rows)
        if answered:
            self._clock.charge(ranks[-1], Work.TRANSFER, 1)
        self._clock.fan_in(ranks)
