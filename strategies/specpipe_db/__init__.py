"""SpecPipe-DB: SpecPipe for many requests (arXiv 2504.04104 v2, 3.4, section 4, 4.4).

The levels of all requests form one ragged batch per step; a miss empties the tree of its own
request only. Keys and values are in blocks (PagedAttention), and new requests enter as soon as
blocks are free (vLLM's prefill priority). Deviation: ``shared_width`` (preset
``specpipe_db_adaptive``) narrows the levels as the batch grows, by the cost of a step; the paper
does not.

    parts = specpipe_db.build(bench, stages=4, kv_tokens=4096)
"""

from __future__ import annotations

from specdec.compose.presets import build_preset
from specdec.compose.workbench import Parts, Workbench
from strategies.specpipe_db.adaptive_width import AdaptiveWidth

__all__ = ["AdaptiveWidth", "build"]


def build(
    bench: Workbench,
    *,
    width: int | None = None,
    children: int | None = None,
    stages: int | None = None,
    kv_tokens: int | None = None,
    shared_width: bool = False,
) -> Parts:
    """SpecPipe-DB with the values of the paper's section 4.

    Args:
        bench: models, clock and seed; the clock's profile, if any, gives the cost of a step.
        width: nodes per level and request; the maximum with ``shared_width``.
        children: candidates per node.
        stages: of the pipeline.
        kv_tokens: tokens and nodes that a stage's cache holds.
        shared_width: levels narrow as the batch grows.
    """
    tree = {"policy.width": width, "policy.children": children}
    keys = {"executor.stages": stages, "serving.kv_tokens": kv_tokens}
    name = "specpipe_db_adaptive" if shared_width else "specpipe_db"
    return build_preset(name, bench, {**tree, **keys})
