"""Pipelines whose stages run in separate processes (ranks): launch, messages, failure detection."""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.distributed.plan import RankPlan, SessionPlan, plan_ranks
    from specdec.distributed.rank_groups import GroupHandle

__getattr__, __dir__ = lazy_exports(__name__)
