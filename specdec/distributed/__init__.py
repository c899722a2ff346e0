"""The pipeline on real ranks: messages, processes, failures."""

from specdec.distributed.lease import Lease
from specdec.distributed.plan import RankPlan, SessionPlan, plan_ranks

__all__ = ["Lease", "RankPlan", "SessionPlan", "plan_ranks"]
