"""A draft model with its own KV cache as a token source.

Shape letters: W nodes, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from specdec.attention.kv_cache import Rows
from specdec.clocks import CONTROLLER, Work
from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.parts.fields import Count, Positive, validated
from specdec.sampling.candidates import counts_of, top_candidates
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.sources.draft_work import Draft, PassWork
from specdec.sources.draw_guesser import DrawGuesser, target_draws
from specdec.sources.near_draw import NearDraw
from specdec.sources.sampled import Histories, by_transform, sampled_candidates
from specdec.types import BoolArray, Candidates, Commit, IntArray, Needs, Nodes, Output

if TYPE_CHECKING:
    from specdec.state import DecodeState, RequestState

_SPARE_NODES = 64  # entries of a new cache beyond the longest sequence; it grows if needed
_NO_TOKENS = np.zeros(0, np.int64)


class DraftModelSource(TokenSource):
    """Proposes the most probable, or sampled, next tokens of a draft model, or of a middle model.

    One ``expand`` is one packed forward over the nodes of all requests, their ancestors that are
    not in the cache, and the committed tokens that are missing in it. The number of computed rows
    is therefore the number of distinct nodes and ancestors plus the catch-up tokens.

    Attributes:
        model: name of the model.
        gives_probs: whether candidates are sampled and returned with their distributions.
        counters: passes, rows and catch-up rows; ``by_level`` under the runner's name.
    """

    @validated
    def __init__(
        self,
        *,
        runner: ModelRunner | Callable[[str], ModelRunner],
        model: Literal["draft", "middle"] = "draft",
        sample: bool = False,
        guess_draw: bool = False,
        guess_spread: Positive | None = 0.2,
        prefill_chunk: Count = 512,
    ) -> None:
        """Wraps a model.

        Args:
            runner: the model, all layers; or name -> the model of that name.
            model: the name, by which a latency profile prices its passes. Default: "draft".
            sample: sample candidates without replacement from the draft's distribution, processed
                by the target's transform, and return that distribution (rejection verifiers).
            guess_draw: rank candidates by the draw with which the target will select its token
                (Staged Speculative Decoding, future work 1). Lossless under ``match``.
            guess_spread: with ``guess_draw``: expected error of the draft's CDF at the draw
                (``NearDraw``); None: place first the token that the draw selects from the draft's
                distribution (``DrawGuesser``). Default: 0.2.
            prefill_chunk: maximum number of prompt rows per request and pass. Default: 512.

        Raises:
            ValueError: for both ``sample`` and ``guess_draw``, or a chunk below 1.
        """
        if sample and guess_draw:
            raise ValueError(
                "guess_draw=true reads the target's draws, which would bias a rejection verifier;"
                " use verifier=match or guess_draw=false"
            )
        runner = runner(model) if callable(runner) else runner
        self.model = model
        self.needs = Needs(target_draws=guess_draw)
        self.counters = SourceCounters(by_level={runner.name: 0})
        self.vocab_size: int | None = runner.vocab_size
        self.gives_probs = sample
        self._runner = runner
        self._work = Work(model)
        self._prefill_chunk = prefill_chunk
        self._guesser = DrawGuesser() if guess_draw and guess_spread is None else None
        self._near: NearDraw | None = None
        if guess_draw and guess_spread is not None:
            self._near = NearDraw(spread=guess_spread)
        self._drafts: dict[int, Draft] = {}
        self._transforms: dict[SamplingParams, SamplingTransform] = {}

    def open(self, request: RequestState) -> None:
        """Allocates the request's cache; the first ``expand`` computes the prompt."""
        params = request.sampling
        transform = self._transforms.setdefault(params, SamplingTransform(params))
        capacity = request.num_prompt + request.stop.max_new_tokens + _SPARE_NODES
        self._drafts[request.id] = Draft(self._runner.new_cache(capacity), transform)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        """Candidates of each node; one forward unless the cache must catch up first.

        Nodes beyond the model's maximum position get count 0.
        """
        works = [self._plan(state.requests[request_id], ids) for request_id, ids in nodes.items]
        if sum([len(work.slots) for work in works]) < len(nodes):
            reachable = np.concatenate(
                [self._reachable(state.requests[i], ids) for i, ids in nodes.items]
            )
            nodes = nodes.where(reachable)
            if not nodes.items:
                return Candidates.empty(len(reachable))
            return self.expand(state, nodes, k).spread(reachable)
        logits = self._compute(state, works)
        return self._candidates(state, nodes, works, logits, k)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Moves accepted entries into the prefix and drops pruned nodes."""
        for commit in commits:
            draft = self._drafts.get(commit.request)
            if draft is None:
                continue
            draft.cache.commit(commit)
            if draft.logits:
                kept = set(commit.kept_ids.tolist())
                draft.logits = {i: row for i, row in draft.logits.items() if i in kept}
            if self._guesser is not None:
                self._guesser.commit(commit)

    def close(self, request_id: int) -> None:
        """Frees the request's cache."""
        self._drafts.pop(request_id, None)
        if self._guesser is not None:
            self._guesser.close(request_id)

    # ------------------------------------------------------------------ rows to compute

    def _plan(self, request: RequestState, ids: IntArray) -> PassWork:
        """The rows to compute for ``ids``, int64[W]; see ``PassWork``."""
        draft = self._drafts[request.id]
        tree, cache = request.tree, draft.cache
        slots = tree.live_slots(ids)
        most = self._runner.max_positions
        if int(tree.positions.max()) >= most:
            ids = ids[self._reachable(request, ids)]
            slots = tree.slots(ids)
        entered = cache.has(ids)
        any_entered = bool(entered.any())
        if any_entered and any(i not in draft.logits for i in ids[entered].tolist()):
            # Expanded a second time: drop all tree entries, since a row's logits are not stored.
            cache.truncate(cache.cached_len)
            draft.logits.clear()
            any_entered = False
        new = slots[~entered] if any_entered else slots
        compute = tree.with_missing_ancestors(new, cache.has)
        in_order = np.array_equal(compute, slots)
        prefix = _NO_TOKENS
        if len(slots) and cache.cached_len < request.prefix_len:
            prefix = request.tokens[cache.cached_len : request.prefix_len]
        return PassWork(request, draft, slots, prefix, compute, in_order)

    def _reachable(self, request: RequestState, ids: IntArray) -> BoolArray:
        """bool[W]: whether the model has the nodes' positions."""
        tree = request.tree
        return tree.positions[tree.slots(ids)] < self._runner.max_positions

    # ------------------------------------------------------------------ the model

    def _compute(self, state: DecodeState, works: Sequence[PassWork]) -> torch.Tensor:
        """[W, V]: logits of all nodes to expand, in packed order."""
        self._catch_up(state, works)
        rows, indices, offset = [], [], 0
        for work in works:
            if not len(work.compute):
                continue
            rows.append(work.rows())
            first = offset + len(work.prefix)
            offset = first + len(work.compute)
            indices.append(np.arange(first, offset))
            self.counters.catch_up_rows += len(work.prefix)
        logits = None
        if rows:
            all_rows = sum(map(len, indices)) == offset
            logits_rows = None
            if not all_rows:
                logits_rows = indices[0] if len(indices) == 1 else np.concatenate(indices)
            logits = self._packed(state, rows, logits_rows)
        if logits is not None and all(work.in_order for work in works):
            return logits
        return self._gathered(works, logits)

    def _catch_up(self, state: DecodeState, works: Sequence[PassWork]) -> None:
        """Computes missing committed tokens while they and the nodes exceed one chunk."""
        chunk = self._prefill_chunk
        while True:
            behind = [w for w in works if len(w.prefix) and len(w.prefix) + len(w.compute) > chunk]
            if not behind:
                return
            rows = [w.draft.cache.rows(prefix_tokens=w.prefix[:chunk]) for w in behind]
            self._runner.forward(rows, logits_rows=NO_ROWS)
            num_rows = sum(map(len, rows))
            self.counters.catch_up_rows += num_rows
            self._count(state, num_rows)
            for work in behind:
                work.prefix = work.prefix[chunk:]

    def _packed(
        self, state: DecodeState, rows: Sequence[Rows], logits_rows: IntArray | None = None
    ) -> torch.Tensor:
        """[A, V]: one pass, counted; arguments as of ``ModelRunner.forward``."""
        logits = self._runner.forward(rows, logits_rows=logits_rows).logits
        assert logits is not None, "the draft is a whole model"
        self._count(state, sum(map(len, rows)))
        return logits

    def _count(self, state: DecodeState, num_rows: int) -> None:
        self.counters.passes += 1
        self.counters.rows += num_rows
        self.counters.by_level[self._runner.name] += 1
        state.clock.charge(CONTROLLER, self._work, num_rows)

    def _gathered(self, works: Sequence[PassWork], logits: torch.Tensor | None) -> torch.Tensor:
        """[W, V] in the caller's order; the logits of ancestors are stored."""
        rows: list[torch.Tensor] = []
        offset = 0
        for work in works:
            ids = work.request.tree.ids
            stored = work.draft.logits
            for row, node_id in enumerate(ids[work.compute].tolist()):
                assert logits is not None
                stored[node_id] = logits[offset + row]
            offset += len(work.compute)
            rows.extend(stored.pop(node_id) for node_id in ids[work.slots].tolist())
        return torch.stack(rows)

    # ------------------------------------------------------------------ from logits to candidates

    def _candidates(
        self,
        state: DecodeState,
        nodes: Nodes,
        works: Sequence[PassWork],
        logits: torch.Tensor,
        k: int,
    ) -> Candidates:

        def propose(
            nodes: Nodes, logits: torch.Tensor, transform: SamplingTransform, histories: Histories
        ) -> Candidates:
            if self.gives_probs:
                probs = transform.proposal_probs(logits, histories)
                return sampled_candidates(state, nodes, probs, k)
            if self._near is not None and not transform.params.greedy:
                draws = target_draws(state, nodes)
                return self._near.candidates(transform, logits, histories, draws, k)
            top = top_candidates(transform, logits, k, histories)
            if self._guesser is None or transform.params.greedy:
                return top
            tokens, logprobs = self._guesser.rank(
                state, nodes, transform, logits, histories, top.tokens, top.logprobs
            )
            counts = counts_of(transform, logprobs)
            return Candidates(tokens=tokens, logprobs=logprobs, counts=counts)

        transforms = [work.draft.transform for work in works]
        return by_transform(state, nodes, transforms, logits, propose)
