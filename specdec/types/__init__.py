"""The data that the parts of a strategy exchange.

In the order of a decoding step: nodes chosen by the policy and candidates proposed by the source,
rows fed to the target, the target's answers, and the decisions made from them.

What the controller owns (trees, candidates, commits) is numpy: the arrays are small, and at these
sizes a numpy call costs a fifth of a torch call. Model values (logits, hidden states) are torch.
"""

from typing import TYPE_CHECKING

from specdec.lazy import lazy_exports

if TYPE_CHECKING:
    from specdec.types.arrays import NO_NODE, BoolArray, FloatArray, IntArray
    from specdec.types.decisions import Commit, CommitKind, Verdict
    from specdec.types.events import Event, EventKind, Ticket
    from specdec.types.needs import HiddenName, Lossless, Needs
    from specdec.types.node_map import NodeMap
    from specdec.types.nodes import Candidates, Nodes
    from specdec.types.plans import ExecutorPlan, Placement
    from specdec.types.results import NO_TOKEN, Answers, EarlyHidden, Exits, Output, PromptHidden
    from specdec.types.rows import Batch, PrefillChunk, TreeRows

__getattr__, __dir__ = lazy_exports(__name__)
