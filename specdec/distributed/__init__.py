"""Pipelines over processes: rank launch, messages, stage and draft workers, failure detection."""

from specdec.distributed.plan import RankPlan, SessionPlan, plan_ranks
from specdec.distributed.rank_groups import GroupHandle

__all__ = ["GroupHandle", "RankPlan", "SessionPlan", "plan_ranks"]
