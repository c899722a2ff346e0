"""A draft model with another tokenizer than the target's as a token source.

The draft reads the target's text in its own tokens and proposes the tokens that both vocabularies
have (token-level intersection, Timor et al. 2025, arXiv 2502.05202, algorithm 4).

Shape letters: W nodes, K candidates, R rows of a pass, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.attention.kv_cache import Rows, TreeCache
from specdec.clocks import CONTROLLER, Work
from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.models.runner import NO_ROWS
from specdec.models.translated import TranslatedDraft
from specdec.parts.fields import Count, validated
from specdec.sampling.candidates import top_candidates
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources.draft_text import DraftText, Place, reachable
from specdec.sources.sampled import Histories, by_transform, sampled_candidates
from specdec.types import Candidates, Commit, IntArray, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.clocks.meter import Meter
    from specdec.executors.models import ModelPair
    from specdec.state import DecodeState, RequestState

_SPARE_NODES = 64  # entries of a new cache beyond the longest sequence; it grows if needed


@dataclass(slots=True)
class _Draft:
    """The draft's state for one request.

    Attributes:
        text: the request in draft tokens.
        cache: keys and values of final tokens and of trie nodes.
        transform: the request's sampling transform.
        logits: trie node -> [U].
    """

    text: DraftText
    cache: TreeCache
    transform: SamplingTransform
    logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def behind(self) -> IntArray:
        """Final tokens that are missing in the cache."""
        return np.array(self.text.final[self.cache.cached_len :], np.int64)


@dataclass(slots=True)
class _Work:
    """The part of one ``expand`` that concerns one request.

    Attributes:
        request: the request.
        draft: the draft's state for it.
        slots: int64[W], the nodes to expand.
        places: where their texts end.
        compute: trie nodes that a pass computes, parents first.
    """

    request: RequestState
    draft: _Draft
    slots: IntArray
    places: list[Place]
    compute: list[int]


class TranslatedSource(TokenSource):
    """Proposes the tokens of a draft with another tokenizer that the target's vocabulary has too.

    One ``expand`` is one packed forward over the draft tokens of all nodes' texts that are not in
    the cache; final tokens that are missing precede them. The draft's distribution is renormalised
    over the intersection, so rejection sampling is exact for it. A node has no candidates inside an
    unfinished character that the draft cannot write, and beyond the draft's positions. A latency
    profile prices a pass as one of the draft model.

    Attributes:
        gives_probs: whether candidates are sampled and returned with their distribution.
        counters: passes and rows of draft tokens; catch-up rows are those of final ones.
    """

    @validated
    def __init__(
        self,
        *,
        pair: ModelPair,
        meter: Meter,
        sample: bool = False,
        prefill_chunk: Count = 512,
    ) -> None:
        """Loads the draft and intersects the vocabularies.

        Args:
            pair: the model pair, with the draft of ``model.translated``.
            meter: counts the passes as "translated".
            sample: sample candidates and return their distribution, for rejection verifiers.
            prefill_chunk: maximum number of prompt rows per request and pass. Default: 512.

        Raises:
            UserError: the pair has no such draft, a tokenizer is missing, or the vocabularies have
                no token in common.
        """
        self._model = pair.artefact(TranslatedDraft, meter=meter)
        self._runner = self._model.runner
        self.needs = Needs()
        self.vocab_size: int | None = self._model.vocab_size
        self.gives_probs = sample
        self.counters = SourceCounters(by_level={self._runner.name: 0})
        self._chunk = prefill_chunk
        self._drafts: dict[int, _Draft] = {}
        self._transforms: dict[SamplingParams, SamplingTransform] = {}

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that one pass of the draft reads."""
        return self._model.weight_bytes

    def open(self, request: RequestState) -> None:
        """Tokenises the prompt; the first ``expand`` computes it."""
        params = request.sampling
        transform = self._transforms.setdefault(params, SamplingTransform(params))
        text = DraftText(self._model.translation, request.tokens.tolist())
        capacity = len(text.final) + request.stop.max_new_tokens + _SPARE_NODES
        self._drafts[request.id] = _Draft(text, self._runner.new_cache(capacity), transform)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Candidates of each node; one forward unless the cache must catch up first."""
        works = []
        served = np.zeros(len(nodes), np.bool_)
        for request_id, ids, rows in nodes.packed():
            work, served[rows] = self._plan(state.requests[request_id], ids)
            if work.places:
                works.append(work)
        if not works:
            return Candidates.empty(len(nodes))
        self._compute(state, works)
        logits = torch.stack([w.draft.logits[p.leaf] for w in works for p in w.places])
        if served.all():
            return self._candidates(state, nodes, works, logits, k)
        return self._candidates(state, nodes.where(served), works, logits, k).spread(served)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Advances the texts; moves final tokens into the prefix and drops pruned ones."""
        for commit in commits:
            draft = self._drafts.get(commit.request)
            if draft is None:
                continue
            own = draft.text.commit(commit)
            draft.cache.commit(own)
            kept = set(own.kept_ids.tolist())
            draft.logits = {node: row for node, row in draft.logits.items() if node in kept}

    def close(self, request_id: int) -> None:
        """Frees the request's cache."""
        self._drafts.pop(request_id, None)

    # ------------------------------------------------------------------ rows to compute

    def _plan(self, request: RequestState, ids: IntArray) -> tuple[_Work, np.ndarray]:
        """The work for ``ids``, int64[W], and bool[W]: which of them the draft can continue."""
        draft, tree = self._drafts[request.id], request.tree
        slots = tree.slots(ids)
        assert int(slots.min()) >= 0, f"nodes {ids} of request {request.id} are not in the tree"
        places = [draft.text.place(tree, slot) for slot in slots.tolist()]
        served = reachable(draft.text, places, self._runner.max_positions)
        places = [place for place, can in zip(places, served.tolist(), strict=True) if can]
        new = [place.leaf for place in places if place.leaf not in draft.logits]
        compute = draft.text.missing(new, set(draft.cache.node_ids.tolist()))
        return _Work(request, draft, slots[served], places, compute), served

    # ------------------------------------------------------------------ the model

    def _compute(self, state: DecodeState, works: Sequence[_Work]) -> None:
        """One packed pass over all draft tokens that are missing; stores their logits."""
        works = [work for work in works if work.compute]
        while behind := [w for w in works if len(w.draft.behind) + len(w.compute) > self._chunk]:
            short = [w for w in behind if len(w.draft.behind)]
            if not short:
                break
            prefixes = [
                w.draft.cache.rows(prefix_tokens=w.draft.behind[: self._chunk]) for w in short
            ]
            self._forward(state, prefixes, NO_ROWS)
        rows, indices, owners, offset = [], [], [], 0
        for work in works:
            prefix = work.draft.behind
            described = work.draft.text.rows(work.compute)
            rows.append(work.draft.cache.rows(prefix_tokens=prefix, **described))
            first = offset + len(prefix)
            offset = first + len(work.compute)
            indices.append(np.arange(first, offset))
            owners += [(work.draft, node) for node in work.compute]
        if not rows:
            return
        logits = self._forward(state, rows, np.concatenate(indices))
        for (draft, node), row in zip(owners, logits, strict=True):
            draft.logits[node] = row

    def _forward(self, state: DecodeState, rows: Sequence[Rows], wanted: IntArray) -> Tensor:
        """One pass, counted; the logits of the packed rows ``wanted``."""
        logits = self._runner.forward(rows, logits_rows=wanted).logits
        num_rows = sum(map(len, rows))
        self.counters.passes += 1
        self.counters.rows += num_rows
        self.counters.catch_up_rows += num_rows - len(wanted)
        self.counters.by_level[self._runner.name] += 1
        state.clock.charge(CONTROLLER, Work.DRAFT, num_rows)
        return torch.zeros(0) if logits is None else logits

    # ------------------------------------------------------------------ from logits to candidates

    def _candidates(
        self, state: DecodeState, nodes: Nodes, works: Sequence[_Work], logits: Tensor, k: int
    ) -> Candidates:
        model = self._model
        k = min(k, len(model.translation.target_ids))

        def propose(
            nodes: Nodes, logits: Tensor, transform: SamplingTransform, histories: Histories
        ) -> Candidates:
            if self.gives_probs:
                probs = transform.proposal_probs(model.target_logits(logits), histories)
                return sampled_candidates(state, nodes, probs, k)
            if histories is None:  # the intersection alone, which is smaller
                top = top_candidates(transform, model.shared_logits(logits), k, None)
                return replace(top, tokens=model.translation.target_ids[top.tokens])
            return top_candidates(transform, model.target_logits(logits), k, histories)

        transforms = [work.draft.transform for work in works]
        return by_transform(state, nodes, transforms, logits, propose)
