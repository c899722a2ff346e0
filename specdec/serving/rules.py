"""How requests share the target: the group ``serving`` of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from specdec.errors import UserError
from specdec.interfaces import Executor, Scheduler, TokenSource, TreePolicy
from specdec.parts.build import build_part
from specdec.parts.fields import Count, Positive, Text, signature_of, validated
from specdec.serving.arrivals import arrival_times
from specdec.serving.blocks import BlockBudget
from specdec.serving.feeding import Feeding
from specdec.state import RequestState


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRules:
    feeding: Feeding = Feeding.DYNAMIC  # which requests share a step
    # a step with prompt tokens feeds no tree nodes; False: both share steps
    prefill_first: bool = False
    # the first token passes through an empty pipeline, as in SpecPipe, PipeDec and PPSD; False: the
    # tree grows behind the last prompt token
    first_alone: bool = False
    # tokens and tree nodes in the paged cache of a stage; None: each request has an unbounded cache
    # of its own
    kv_tokens: Count | None = None
    block_tokens: Count = 16

    @staticmethod
    def of(
        *,
        feeding: Feeding,
        prefill: Literal["mixed", "first"],
        first_fill: Literal["hidden", "alone"] = "hidden",
        arrivals: Text,
        rate_per_s: Positive | None,
        kv_tokens: Count | None,
        block_tokens: Count,
        **_scheduler: Any,
    ) -> ServingRules:
        """Builds the rules from the configuration node ``serving``; ``arrivals`` and ``rate_per_s``
        are only checked here, and keys for a scheduler outside this library are ignored.
        """
        arrival_times(arrivals, 0, rate_per_s=rate_per_s)
        return ServingRules(
            feeding=Feeding(feeding),
            prefill_first=prefill == "first",
            first_alone=first_fill == "alone",
            kv_tokens=kv_tokens,
            block_tokens=block_tokens,
        )

    @property
    def num_blocks(self) -> int | None:
        return None if self.kv_tokens is None else self.kv_tokens // self.block_tokens

    def budget(self, policy: TreePolicy, in_flight: int) -> BlockBudget | None:
        if self.kv_tokens is None:
            return None
        tree_nodes = policy.max_cached_nodes(in_flight)
        if tree_nodes is None:
            raise UserError(
                f"serving.kv_tokens={self.kv_tokens} admits requests by the blocks they may need,"
                f" and {type(policy).__name__} does not state the size of its trees: give it a"
                " method max_cached_nodes(in_flight), or leave serving.kv_tokens null"
            )
        return BlockBudget(
            kv_tokens=self.kv_tokens, block_tokens=self.block_tokens, tree_nodes=tree_nodes
        )


class MakeScheduler(Protocol):
    def __call__(
        self,
        *,
        requests: Iterable[RequestState],
        parts: tuple[TreePolicy, TokenSource, Executor],
        batch_size: int,
        prefill_chunk: int,
        rules: ServingRules,
        on_finish: Callable[[RequestState], None] | None,
    ) -> Scheduler: ...


def outside_scheduler(cfg: Mapping[str, Any]) -> MakeScheduler | None:
    """Returns a function that builds the scheduler class that the section ``serving`` (``cfg``)
    names as ``_target_``, with the arguments of ``MakeScheduler`` that it takes; None without one.
    """
    if "_target_" not in cfg:
        return None
    rules = signature_of(ServingRules.of).plain
    return partial(_build, {key: value for key, value in cfg.items() if key not in rules})


def _build(node: Mapping[str, Any], **runtime: Any) -> Any:
    objects = {key: partial(dict.__getitem__, runtime, key) for key in runtime}
    return build_part(node, objects, "serving", Scheduler)
