"""PipeInfer (arXiv 2407.11798): short speculative runs enter a pipeline, one after the other.

The draft model does not wait for the target. The tokens drafted in one step form a run, which
enters the pipeline behind the runs before it, so several are in flight. A commit that contradicts a
run cancels it and all later ones: stages that did not begin them skip them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import DraftCount, NotNegative, Share, validated
from specdec.policies.tree_growth import (
    append_best,
    as_nodes,
    expand,
    growable_level,
    live_requests,
    ready_requests,
)
from specdec.state import DecodeState, RequestState
from specdec.types import Commit, IntArray, Nodes, Output


@dataclass(slots=True)
class _Speculation:
    """One request's runs since the last commit.

    Attributes:
        sendable: largest id of a node that a run may contain; later nodes are not submitted yet.
        runs: number of runs that began.
        fruitless: number of attempts to begin a run that found no token for it.
    """

    sendable: int = -1
    runs: int = 0
    fruitless: int = 0


@validated
@dataclass(eq=False, kw_only=True)
class PipeInfer(TreePolicy):
    """Begins a *run* in every step: up to ``tokens`` new tokens at the end of a request's chain.

    Drafting stops at a token whose draft probability is below the cut-off. The cut-off is
    ``cutoff``, plus ``recovery`` for each run since the last commit, so that runs far ahead of the
    target need a surer draft, minus ``decay`` for each attempt since then that had no token for a
    run; at 1 or more no run begins. A token below the cut-off is not submitted, but tested again in
    the next step. If it becomes the root it is submitted alone, like a token that was not drafted.

    Whether a token has successors depends on its own draft probability, never on theirs, so
    rejection sampling stays unbiased. Hits need an executor of latency 2 or more. ``tokens`` also
    limits the draft passes per step.
    """

    value_dependent = False
    serial = False

    tokens: DraftCount
    cutoff: Share
    recovery: NotNegative
    decay: NotNegative

    def __post_init__(self) -> None:
        self._requests: defaultdict[int, _Speculation] = defaultdict(_Speculation)

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self.tokens * in_flight

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        return as_nodes((r, self._run(r)) for r in ready_requests(state, serial=False))

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        attempts = [(r, self._cutoff(r)) for r in live_requests(state) if self._may_begin(r)]
        attempts = [(r, cutoff) for r, cutoff in attempts if cutoff < 1.0]
        # A token that was below the cut-off is tested again.
        sizes = {r.id: int(self._is_pending(r) and self._passes(r, c)) for r, c in attempts}
        growing = [entry for entry in attempts if not self._is_pending(entry[0])]
        while growing := [entry for entry in growing if sizes[entry[0].id] < self.tokens]:
            tips = [(request, growable_level(request)) for request, _ in growing]
            expand(state, source, tips, 1)
            longer = []
            for (request, cutoff), (_, tip) in zip(growing, tips, strict=True):
                if len(append_best(request.tree, tip, 1, 1)) and self._passes(request, cutoff):
                    sizes[request.id] += 1
                    longer.append((request, cutoff))
            growing = longer
        for request, _ in attempts:
            speculation = self._requests[request.id]
            speculation.runs += sizes[request.id] > 0
            speculation.fruitless += sizes[request.id] == 0
        return False

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in commits:
            speculation = self._requests[commit.request]
            speculation.runs = speculation.fruitless = 0

    def close(self, request_id: int) -> None:
        self._requests.pop(request_id, None)

    def _run(self, request: RequestState) -> IntArray:
        tree = request.tree
        sendable = tree.ids <= self._requests[request.id].sendable
        sendable[0] = True
        return np.flatnonzero(sendable & (tree.submitted_at < 0))

    def _may_begin(self, request: RequestState) -> bool:
        """Whether the root is submitted and no run waits to be submitted."""
        return bool(request.tree.submitted_at[0] >= 0) and not len(self._run(request))

    def _cutoff(self, request: RequestState) -> float:
        speculation = self._requests[request.id]
        raised = self.cutoff + self.recovery * speculation.runs
        return raised - self.decay * speculation.fruitless

    def _is_pending(self, request: RequestState) -> bool:
        """Whether the chain's last token was below the cut-off and has not been submitted."""
        tree = request.tree
        return len(tree) > 1 and int(tree.ids[-1]) > self._requests[request.id].sendable

    def _passes(self, request: RequestState, cutoff: float) -> bool:
        """Tests the chain's last token against the cut-off; if it passes, it may be submitted."""
        tree = request.tree
        if np.exp(tree.logprobs[-1]) < cutoff:
            return False
        self._requests[request.id].sendable = int(tree.ids[-1])
        return True
