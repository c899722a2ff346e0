from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdec.clocks import Clock
from specdec.clocks.meter import Meter
from specdec.distributed.executor import DistributedExecutor, FreeExecutor
from specdec.distributed.plan import DraftPlan, SessionPlan, check_gpus, plan_ranks
from specdec.distributed.shared_draft import DraftGroup
from specdec.executors.layout import PipelinePlan
from specdec.executors.models import Blocks, ModelPair
from specdec.models.runner import ModelRunner
from specdec.pairs import HuggingFacePair
from specdec.types import Needs


class Ranks:
    def __init__(
        self,
        *,
        model: Mapping[str, Any],
        clock: Mapping[str, Any],
        timeout_s: float = 60.0,
        threads: int | None = None,
        trace: bool = False,
    ) -> None:
        """Stores settings of worker processes (ranks). Each builds its models and clock from the
        configuration sections ``model`` and ``clock``, and has ``threads`` torch threads (None: an
        equal share of the cores). A run fails after ``timeout_s`` seconds without progress.
        """
        self._timeout_s = timeout_s
        self._model = model
        self._shared: dict[str, Any] = {"clock": clock, "threads": threads, "trace": trace}
        self._draft: DraftGroup | None = None

    def draft_runner(self, plan: PipelinePlan, pair: ModelPair, meter: Meter) -> ModelRunner:
        assert isinstance(pair, HuggingFacePair), "only real drafts are run"
        if self._draft is None:
            peers = plan.placements["draft"].ranks
            self._draft = DraftGroup(
                plan=DraftPlan(peers=peers, model=self._model, **self._shared),
                pair=pair,
                meter=meter,
                num_ranks=plan.num_ranks,
                timeout_s=self._timeout_s,
            )
        return self._draft.runner

    def executor(
        self,
        plan: PipelinePlan,
        needs: Needs,
        *,
        bounds: Sequence[tuple[int, int]],
        exits: Sequence[int],
        seed: int,
        blocks: Blocks,
        clock: Clock,
        meter: Meter,
    ) -> DistributedExecutor:
        """Starts ranks for the layer ranges ``bounds``; returns their executor (``OverRanks``)."""
        layout = plan.layout
        if self._model.get("device") in ("auto", "cuda") and torch.cuda.is_available():
            check_gpus(layout, plan.num_ranks + 1, torch.cuda.device_count())
        parts = plan_ranks(
            bounds,
            layout.devices,
            layout.degree,
            exits=exits,
            hidden=needs.hidden,
            early=needs.early_hidden,
        )
        # A tensor-parallel stage needs the same rows on all of its ranks, and hidden states are
        # matched with answers by their step.
        free = bool(exits) and not (plan.lock_step or needs.hidden or needs.early_hidden)
        free &= layout.degree == 1
        session = SessionPlan(
            ranks=parts,
            degree=layout.degree,
            num_ranks=plan.num_ranks if self._draft is not None else len(parts),
            model=self._model,
            seed=seed,
            needs=needs,
            shared_with_draft=layout.shared,
            blocks=blocks,
            lock_step=not free,
            **self._shared,
        )
        draft, self._draft = self._draft, None
        return (FreeExecutor if free else DistributedExecutor)(
            plan=session,
            clock=clock,
            meter=meter,
            timeout_s=self._timeout_s,
            draft=draft,
            group_number=plan.group_number,
        )

    def release(self) -> None:
        if self._draft is not None:
            self._draft.shutdown(broken=True)
            self._draft = None
