"""Proposals of an EAGLE head, which drafts from the target's hidden states.

The head's row for the token at position p reads the state of position p - 1. That is the target's
feature where it has arrived (``Output.prompts``, ``Commit.hidden``, ``TokenTree.hidden``) and the
head's own output below the last such position: one level below it in a strategy that waits for its
answers, up to N levels on a pipeline of N stages.

When a feature arrives late, the row that was computed without it is computed again in place, in the
pass of the next nodes: at the latest when it enters the prefix. Candidates that its node already
has stay in the tree, and so do the outputs of rows below it.

Shape letters: W nodes, U draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from specdec.clocks import CONTROLLER, Work
from specdec.device import to_host
from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.models.eagle_runner import METER_NAME, EagleRunner
from specdec.parts.fields import Count, validated
from specdec.sampling.candidates import counts_of, top_candidates
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources.eagle_passes import HeadPass
from specdec.sources.eagle_state import Draft, Features
from specdec.sources.sampled import Histories, by_transform, sampled_candidates
from specdec.types import Candidates, Commit, IntArray, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.clocks.meter import Meter
    from specdec.executors.models import ModelPair
    from specdec.state import DecodeState, RequestState

_VERSIONS: dict[str, Literal[1, 3]] = {"eagle": 1, "eagle3": 3}
_SPARE_NODES = 64  # entries of a new cache beyond the longest sequence; it grows if needed


@dataclass(slots=True)
class _Work:
    """The part of one ``expand`` that concerns one request.

    Attributes:
        request: the request.
        draft: the head's state for it.
        slots: int64[W], the nodes to expand.
        pending: int64[C], slots without an entry in the cache that a pass must compute.
    """

    request: RequestState
    draft: Draft
    slots: IntArray
    pending: IntArray


class EagleSource(TokenSource):
    """Proposes the candidates of an EAGLE head of any version; keeps the head's own cache.

    A request has candidates once the hidden states of its prompt have arrived. One ``expand`` is
    one packed pass, preceded by passes over a long prompt, and by one per level of ancestors that
    other sources have proposed. A latency profile prices a pass as one of the draft model.

    Attributes:
        gives_probs: whether candidates are sampled and returned with their distribution.
        counters: passes and rows; catch-up rows are those of committed tokens, and of nodes that
            were computed again.
    """

    @validated
    def __init__(
        self,
        *,
        pair: ModelPair,
        meter: Meter,
        untrained: Literal["eagle", "eagle3"] = "eagle3",
        early: bool = False,
        sample: bool = False,
        prefill_chunk: Count = 512,
    ) -> None:
        """Loads the head.

        Args:
            pair: the model pair, with the head of ``model.eagle_head`` or an untrained one.
            meter: counts the passes as "eagle".
            untrained: kind of an untrained head, EAGLE-1 or 3; a head from disk has its own.
                Default: "eagle3".
            early: read hidden states as soon as their layer has computed them, instead of with the
                answers. Default: false.
            sample: sample candidates and return their distribution, for rejection verifiers.
            prefill_chunk: maximum number of prompt rows per request and pass. Default: 512.

        Raises:
            UserError: the pair has no hidden states, or no head that fits its target.
        """
        self._runner = pair.artefact(EagleRunner, version=_VERSIONS[untrained], meter=meter)
        names = self._runner.names
        self._names = names
        self.needs = Needs(
            hidden=() if early else names, early_hidden=names if early else (), real_nodes=True
        )
        self.vocab_size: int | None = self._runner.vocab_size
        self.gives_probs = sample
        self.counters = SourceCounters(by_level={METER_NAME: 0})
        self._chunk = prefill_chunk
        self._drafts: dict[int, Draft] = {}
        self._transforms: dict[SamplingParams, SamplingTransform] = {}

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that one pass of the head reads."""
        return self._runner.weight_bytes

    def open(self, request: RequestState) -> None:
        """Allocates the request's cache; the first ``expand`` computes the prompt."""
        params = request.sampling
        transform = self._transforms.setdefault(params, SamplingTransform(params))
        capacity = request.num_prompt + request.stop.max_new_tokens + _SPARE_NODES
        cache = self._runner.new_cache(capacity)
        self._drafts[request.id] = Draft(cache, transform, Features(self._names))

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Candidates of each node; count 0 for requests without hidden states."""
        works = []
        served = np.zeros(len(nodes), np.bool_)
        for request_id, ids, rows in nodes.packed():
            request = state.requests[request_id]
            if self._is_ready(request):
                works.append(self._plan(request, ids))
                served[rows] = True
        if not works:
            return Candidates.empty(len(nodes))
        logits = self._compute(state, works)
        k = min(k, logits.shape[1])
        if served.all():
            return self._candidates(state, nodes, works, logits, k)
        return self._candidates(state, nodes.where(served), works, logits, k).spread(served)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Takes hidden states; moves accepted entries into the prefix, drops pruned nodes."""
        for chunk in output.prompts:
            if (draft := self._drafts.get(chunk.request)) is not None:
                draft.features.add(chunk.hidden, chunk.start)
        for commit in commits:
            if (draft := self._drafts.get(commit.request)) is not None:
                _commit(draft, commit)

    def close(self, request_id: int) -> None:
        """Frees the request's cache."""
        self._drafts.pop(request_id, None)

    # ------------------------------------------------------------------ rows to compute

    def _is_ready(self, request: RequestState) -> bool:
        """Whether the feature before the root has arrived.

        Sampled candidates begin with the second root: in a pipeline the prompt's features arrive
        after the first one was submitted, and outputs are the same on every executor.
        """
        if self.gives_probs and not request.output:
            return False
        return 0 < request.prefix_len <= self._drafts[request.id].features.known

    def _plan(self, request: RequestState, ids: IntArray) -> _Work:
        """The rows to compute for ``ids``, int64[W]; see ``_Work``."""
        draft, tree = self._drafts[request.id], request.tree
        slots = tree.live_slots(ids)
        entered = draft.cache.has(ids)
        if entered.any() and any(i not in draft.logits for i in ids[entered].tolist()):
            # Expanded a second time: compute all nodes again, since a row's logits are not stored.
            draft.cache.truncate(draft.cache.cached_len)
            draft.logits.clear()
            draft.true_nodes.clear()
            entered[:] = False
        pending = tree.with_missing_ancestors(slots[~entered], draft.cache.has)
        return _Work(request, draft, slots, np.sort(pending))

    # ------------------------------------------------------------------ the head

    def _compute(self, state: DecodeState, works: Sequence[_Work]) -> Tensor:
        """[W, U]: logits of all nodes to expand, in packed order."""
        self._catch_up(state, works)
        current = HeadPass(self._runner)
        for work in works:
            current.add_prefix(work.request, work.draft)
            current.add_corrections(work.request, work.draft)
        in_order = not current.num_logits
        in_order &= all(np.array_equal(work.slots, work.pending) for work in works)
        while True:
            for work in works:
                work.pending = current.add_nodes(work.request, work.draft, work.pending)
            in_order = in_order and not any(len(work.pending) for work in works)
            if current.num_rows:
                logits = current.run(keep=not in_order)
                self._count(state, current)
                if in_order:
                    return logits
            if not any(len(work.pending) for work in works):
                break
            current = HeadPass(self._runner)
        rows = [
            work.draft.logits.pop(node)
            for work in works
            for node in work.request.tree.ids[work.slots].tolist()
        ]
        return torch.stack(rows)

    def _catch_up(self, state: DecodeState, works: Sequence[_Work]) -> None:
        """Computes committed tokens while more than a chunk of them is missing."""
        while True:
            current = HeadPass(self._runner)
            for work in works:
                missing = work.request.prefix_len - 1 - work.draft.true_len
                if missing + len(work.pending) > self._chunk:
                    current.add_prefix(work.request, work.draft, limit=self._chunk)
            if not current.num_rows:
                return
            current.run(keep=False)
            self._count(state, current)

    def _count(self, state: DecodeState, done: HeadPass) -> None:
        self.counters.passes += 1
        self.counters.rows += done.num_rows
        self.counters.catch_up_rows += done.num_rows - done.num_nodes
        self.counters.by_level[METER_NAME] += 1
        state.clock.charge(CONTROLLER, Work.DRAFT, done.num_rows)

    # ------------------------------------------------------------------ from logits to candidates

    def _candidates(
        self, state: DecodeState, nodes: Nodes, works: Sequence[_Work], logits: Tensor, k: int
    ) -> Candidates:
        head = self._runner

        def propose(
            nodes: Nodes, logits: Tensor, transform: SamplingTransform, histories: Histories
        ) -> Candidates:
            if self.gives_probs:
                probs = transform.proposal_probs(head.target_logits(logits), histories)
                return sampled_candidates(state, nodes, probs, k)
            if head.target_ids is None:
                return top_candidates(transform, logits, k, histories)
            if histories is None:  # the draft vocabulary alone, which is smaller
                top = top_candidates(transform, logits, k, None)
                return replace(top, tokens=to_host(head.target_ids)[top.tokens])
            top = top_candidates(transform, head.target_logits(logits), k, histories)
            return replace(top, counts=counts_of(transform, top.logprobs))

        transforms = [work.draft.transform for work in works]
        return by_transform(state, nodes, transforms, logits, propose)


def _commit(draft: Draft, commit: Commit) -> None:
    """Applies one commit to the head's cache, whose positions are one less than the tree's."""
    num_retired = len(commit.retired_ids)
    draft.features.add(commit.hidden, commit.prefix_len - num_retired)
    cache, true_len = draft.cache, draft.true_len
    cache.commit(replace(commit, prefix_len=commit.prefix_len - 1))
    # Entries computed from features extend the part of the prefix that is final.
    position = commit.prefix_len - num_retired - 1
    for node in commit.retired_ids.tolist():
        if position == true_len < cache.cached_len and node in draft.true_nodes:
            true_len += 1
        position += 1
    draft.true_len = true_len
    draft.true_nodes &= set(cache.node_ids.tolist())
    draft.states.keep(commit.kept_ids)
    if draft.logits:
        kept = set(commit.kept_ids.tolist())
        draft.logits = {node: row for node, row in draft.logits.items() if node in kept}
    draft.features.drop(draft.needed_from(commit.prefix_len))
