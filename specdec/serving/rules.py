"""How requests share the target: the section ``serving`` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.errors import UserError
from specdec.serving.arrivals import arrival_times
from specdec.serving.blocks import BlockBudget
from specdec.serving.feeding import Feeding

if TYPE_CHECKING:
    from specdec.interfaces import TreePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRules:
    """What the scheduler follows.

    Attributes:
        feeding: how many requests share a step.
        prefill_first: nobody is fed in a step that takes prompt tokens in; False: they share it.
        kv_tokens: tokens and tree nodes that the paged cache of a stage holds; None: each request
            has a cache of its own, without a bound.
        block_tokens: tokens per block of the paged cache.
    """

    feeding: Feeding = Feeding.DYNAMIC
    prefill_first: bool = False
    kv_tokens: int | None = None
    block_tokens: int = 16

    @staticmethod
    def of(cfg: Mapping[str, Any]) -> ServingRules:
        """From the section of a resolved configuration.

        Raises:
            UserError: arrivals that cannot be used; when they are is read where requests are made.
        """
        arrival_times(cfg["arrivals"], 0, rate_per_s=cfg["rate_per_s"])
        return ServingRules(
            feeding=Feeding(cfg["feeding"]),
            prefill_first=cfg["prefill"] == "first",
            kv_tokens=cfg["kv_tokens"],
            block_tokens=cfg["block_tokens"],
        )

    @property
    def num_blocks(self) -> int | None:
        """Blocks of each stage's pool; None where caches are not paged."""
        return None if self.kv_tokens is None else self.kv_tokens // self.block_tokens

    def budget(self, policy: TreePolicy, latency: int) -> BlockBudget | None:
        """A new account of blocks for one run; None where caches are not paged.

        Raises:
            UserError: the policy does not say how large its trees become.
        """
        if self.kv_tokens is None:
            return None
        held_nodes = getattr(policy, "held_nodes", None)
        if held_nodes is None:
            raise UserError(
                f"serving.kv_tokens={self.kv_tokens} admits requests by the blocks they may need,"
                f" and {type(policy).__name__} does not say how large its trees become: give it a"
                " method held_nodes(latency), or leave serving.kv_tokens null"
            )
        try:
            return BlockBudget(
                kv_tokens=self.kv_tokens,
                block_tokens=self.block_tokens,
                tree_nodes=held_nodes(latency),
            )
        except ValueError as error:
            raise UserError(str(error)) from error
