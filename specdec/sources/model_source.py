"""The source that runs a draft model, and base classes for it and for heads on the target.

The option ``guess_draw`` (Staged Speculative Decoding, future work 1) ranks a draft's candidates by
the number u with which the target samples: under ``match`` the target's next token is the inverse
CDF of its distribution at u, and u depends only on seed, prompt and position. Accepted tokens are
the target's own, so ranking candidates by u does not change the output. The draft's CDF differs
from the target's, so the draft's token at u may be wrong.

Shape letters: W nodes, C entries that a pass computes, U draft vocabulary, V vocabulary of the
target, S tokens of positive probability, K candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specdec.attention.tree_attention import Rows, TreeCache
from specdec.clocks import CONTROLLER, Work
from specdec.device import SupportProbs
from specdec.interfaces import TokenSource
from specdec.metrics.counters import SourceCounters
from specdec.models.runner import NO_ROWS, ModelRunner
from specdec.parts.fields import Count, Positive, validated
from specdec.sampling.keyed_draws import Purpose
from specdec.sampling.transform import SamplingParams, SamplingTransform, top_candidates
from specdec.sources.sampled import sampled_candidates
from specdec.state import DecodeState, RequestState, tree_rows
from specdec.types import (
    BoolArray,
    Candidates,
    Commit,
    FloatArray,
    IntArray,
    Needs,
    NodeMap,
    Nodes,
    Output,
    TreeRows,
)

Histories = Sequence[IntArray] | None
"""Tokens up to and including each of W nodes; None if the sampling transform needs none."""

_SPARE_NODES = 64  # entries of a new cache beyond the longest sequence; it grows if needed


class ModelSource(TokenSource):
    """Base of sources that turn logits into their most probable tokens or into samples.

    Args:
        sample: sample candidates without replacement from the draft's distribution after the
            target's sampling transform, and return that distribution (for rejection verifiers).
        label: name under which ``SourceCounters.by_level`` counts the passes. Default: not counted.
    """

    def __init__(
        self, *, needs: Needs, vocab_size: int | None, sample: bool, label: str | None = None
    ) -> None:
        self.needs, self.vocab_size, self.gives_probs = needs, vocab_size, sample
        self.counters = SourceCounters(by_level={} if label is None else {label: 0})
        self._token_ids: IntArray | None = None
        """int64[U]: target token id of each column of ``_proposed_logits``; None: its index."""

    def _candidates(self, state: DecodeState, nodes: Nodes, logits: Tensor, k: int) -> Candidates:
        """Returns candidates of W nodes from their logits [W, U]."""
        if self._token_ids is not None:
            k = min(k, len(self._token_ids))
        transforms = [self._transform(state.requests[i].sampling) for i, _ in nodes.items]
        transform = transforms[0]
        if any(other.params != transform.params for other in transforms):
            parts = [
                self._candidates(state, Nodes(((request_id, ids),)), logits[rows], k)
                for request_id, ids, rows in nodes.packed()
            ]
            return Candidates.joined(parts)
        histories = None
        if transform.params.needs_history:
            requests = [(state.requests[i], ids) for i, ids in nodes.items]
            histories = [r.path_tokens(s) for r, ids in requests for s in r.tree.slots(ids)]
        return self._propose(state, nodes, logits, transform, histories, k)

    def _shared_candidates(
        self,
        state: DecodeState,
        nodes: Nodes,
        keys: Sequence[IntArray],
        logits_of: Callable[[IntArray], Tensor],
        k: int,
    ) -> Candidates:
        """Returns candidates of W nodes, computed once for all nodes of a request that have equal
        ``keys``, int64[W] each. ``logits_of`` maps indices of nodes to their logits [.., U].
        """
        if any(state.requests[i].sampling.needs_history for i, _ in nodes.items):
            keys = [np.arange(len(nodes))]
        owners = np.repeat(np.arange(len(nodes.items)), [len(ids) for _, ids in nodes.items])
        _, first, same = np.unique(
            np.stack([owners, *keys]), axis=1, return_index=True, return_inverse=True
        )
        packed = first.argsort()
        chosen = np.isin(np.arange(len(nodes)), first)
        found = self._candidates(state, nodes.where(chosen), logits_of(first[packed]), k)
        return found.take(packed.argsort()[same.ravel()])

    def _propose(
        self,
        state: DecodeState,
        nodes: Nodes,
        logits: Tensor,
        transform: SamplingTransform,
        histories: Histories,
        k: int,
    ) -> Candidates:
        if self.gives_probs:
            probs = transform.proposal_probs(self._target_logits(logits), histories)
            return sampled_candidates(state, nodes, probs, k)
        if histories is not None or self._token_ids is None:
            return top_candidates(transform, self._target_logits(logits), k, histories)
        top = top_candidates(transform, self._proposed_logits(logits), k, None)
        return replace(top, tokens=self._token_ids[top.tokens])

    def _transform(self, sampling: SamplingParams) -> SamplingTransform:
        return SamplingTransform(sampling)

    def _target_logits(self, logits: Tensor) -> Tensor:
        """Maps logits [W, U] to [W, V]; -inf for tokens that the model cannot propose."""
        return logits

    def _proposed_logits(self, logits: Tensor) -> Tensor:
        """Selects the columns of logits [W, U] that the source can propose. Default: all."""
        return logits

    def _count(self, num_rows: int, num_catch_up: int = 0) -> None:
        self.counters.passes += 1
        self.counters.rows += num_rows
        self.counters.catch_up_rows += num_catch_up
        for label in self.counters.by_level:
            self.counters.by_level[label] += 1


@dataclass(slots=True)
class PassWork:
    """What one call of ``expand`` computes for one request.

    Attributes:
        wanted: int64[W], ids of the cache entries whose logits are needed, in the order of the
            nodes to expand; an id may occur twice.
        prefix: committed tokens that are missing in the cache.
        entries: the C tree entries to compute, parents before children.
    """

    request: RequestState
    cache: TreeCache
    wanted: IntArray
    prefix: IntArray
    entries: TreeRows

    @property
    def ids(self) -> IntArray:
        return self.entries.node_ids


class CachedModelSource(ModelSource):
    """Base of sources that run a model with a KV cache per request.

    One call of ``expand`` makes one pass over the nodes of all requests, and over the ancestors and
    committed tokens that the caches lack; many missing tokens take further passes before it. Nodes
    for which ``_can_expand`` is false get no candidates.

    Args:
        runner: runs the model; has ``new_cache``, ``forward`` and ``max_positions``.
        sample, label: see ``ModelSource``.
        prefill_chunk: maximum number of committed tokens per request and pass.
        work: kind of work (draft or middle model) as which the run's clock counts a pass.
    """

    _shares_entries = False
    """Whether nodes may share a cache entry; its logits are then stored as long as the entry."""

    def __init__(
        self,
        *,
        runner: Any,  # ``forward`` of ModelRunner and EagleRunner differ
        label: str,
        needs: Needs,
        vocab_size: int | None,
        sample: bool,
        prefill_chunk: int,
        work: Work = Work.DRAFT,
    ) -> None:
        super().__init__(needs=needs, vocab_size=vocab_size, sample=sample, label=label)
        self._runner = runner
        self._work, self._chunk = work, prefill_chunk
        self._caches: dict[int, TreeCache] = {}
        # Logits [U] of entries computed as ancestors, whose nodes are not expanded yet.
        self._logits: NodeMap[Tensor] = NodeMap()

    def open(self, request: RequestState) -> None:
        capacity = request.num_prompt + request.stop.max_new_tokens + _SPARE_NODES
        self._caches[request.id] = self._runner.new_cache(capacity)
        self._logits.open(request.id)

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        requests = state.requests
        can = np.concatenate([self._can_expand(requests[i], ids) for i, ids in nodes.items])
        served = nodes if can.all() else nodes.where(can)
        if not served.items:
            return Candidates.empty(len(nodes))
        logits = self._compute(state, [(requests[i], ids) for i, ids in served.items])
        candidates = self._candidates(state, served, logits, k)
        return candidates if served is nodes else candidates.spread(can)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        for commit in commits:
            if (cache := self._caches.get(commit.request)) is not None:
                cache.commit(commit)
        self._logits.commit(commits)

    def close(self, request_id: int) -> None:
        self._caches.pop(request_id, None)
        self._logits.close(request_id)

    # Rows to compute.

    def _can_expand(self, request: RequestState, ids: IntArray) -> BoolArray:
        """Returns bool[W]: which nodes the model can continue. Default: by its maximum position."""
        tree = request.tree
        can: BoolArray = tree.positions[tree.slots(ids)] < self._runner.max_positions
        return can

    def _plan(self, request: RequestState, ids: IntArray) -> PassWork:
        cache = self._caches[request.id]
        entries = tree_rows(request, self._missing(request, ids))
        prefix = request.tokens[cache.cached_len : request.prefix_len]
        return PassWork(request, cache, ids, prefix, entries)

    def _missing(self, request: RequestState, ids: IntArray) -> IntArray:
        """Returns int64[C], sorted slots: those of the nodes and ancestors that the cache lacks."""
        tree, cache, stored = request.tree, self._caches[request.id], self._logits[request.id]
        slots, entered = tree.slots(ids), cache.has(ids)
        assert (slots >= 0).all(), f"nodes {ids} of request {request.id} are not in the tree"
        if any(i not in stored for i in ids[entered].tolist()):
            # Expanded a second time: compute all nodes again, since a row's logits are not stored.
            cache.truncate(cache.cached_len)
            stored.clear()
            entered[:] = False
        return tree.with_missing_ancestors(slots[~entered], cache.has)

    # The model.

    def _compute(
        self, state: DecodeState, selected: Sequence[tuple[RequestState, IntArray]]
    ) -> Tensor:
        """Returns the logits [W, U] of the nodes ``selected``, in the order of requests and ids."""
        works = [self._plan(request, ids) for request, ids in selected]
        active = [work for work in works if len(work.ids)]
        self._catch_up(state, active)
        logits = self._forward(state, active) if active else None
        in_order = all(np.array_equal(work.ids, work.wanted) for work in works)
        if logits is not None and in_order and not self._shares_entries:
            return logits
        rows: list[Tensor] = []
        start = 0
        for work in works:
            stored = self._logits[work.request.id]
            if logits is not None:
                stop = start + len(work.ids)
                stored.update(zip(work.ids.tolist(), logits[start:stop], strict=True))
                start = stop
            take = stored.__getitem__ if self._shares_entries else stored.pop
            rows += [take(entry) for entry in work.wanted.tolist()]
        return torch.stack(rows)

    def _catch_up(self, state: DecodeState, works: Sequence[PassWork]) -> None:
        """Runs passes over committed tokens until the rest and the nodes fit in one chunk."""
        chunk = self._chunk
        while behind := [w for w in works if len(w.prefix) and len(w.prefix) + len(w.ids) > chunk]:
            rows = [work.cache.rows(prefix_tokens=work.prefix[:chunk]) for work in behind]
            num_rows = sum(map(len, rows))
            self._runner.forward(rows, logits_rows=NO_ROWS)
            self._charge(state, num_rows, num_rows)
            for work in behind:
                work.prefix = work.prefix[chunk:]

    def _forward(self, state: DecodeState, works: Sequence[PassWork]) -> Tensor:
        """Runs one pass over committed tokens and tree entries; returns these entries' logits."""
        rows: list[Rows] = []
        is_entry: list[BoolArray] = []
        for work in works:
            rows.append(work.cache.rows(prefix_tokens=work.prefix, tree=work.entries))
            is_entry.append(np.arange(len(rows[-1])) >= len(work.prefix))
        chosen = np.concatenate(is_entry)
        logits_rows = None if chosen.all() else np.flatnonzero(chosen)
        logits: Tensor = self._runner.forward(rows, logits_rows=logits_rows).logits
        self._charge(state, len(chosen), int((~chosen).sum()))
        return logits

    def _charge(self, state: DecodeState, num_rows: int, num_catch_up: int) -> None:
        self._count(num_rows, num_catch_up)
        state.clock.charge(CONTROLLER, self._work, num_rows)


FAR_SHARE = 0.05
"""Share of a ``near_draw`` score that is the token's draft probability, whatever u is."""


def target_draws(state: DecodeState, nodes: Nodes) -> FloatArray:
    """Returns float64[W]: the target's random number for sampling the token after each node."""
    uniforms = []
    for request_id, ids in nodes.items:
        tree = state.requests[request_id].tree
        positions = tree.positions[tree.slots(ids)] + 1
        uniforms.append(state.draws.uniform(request_id, positions, Purpose.TARGET))
    return uniforms[0] if len(uniforms) == 1 else np.concatenate(uniforms)


def near_draw(
    transform: SamplingTransform,
    logits: Tensor,
    histories: Histories,
    uniforms: FloatArray,
    k: int,
    *,
    spread: float,
) -> Candidates:
    """Ranks the draft's tokens by how near they are, in its CDF, to the target's random number u.

    The draft's CDF is assumed to miss the target's by a random x of density exp(-abs(x) / spread) /
    (2 spread). A token's score is the probability that its CDF interval, moved by x, contains u,
    plus a small share of its draft probability.

    Returns the ``k`` best candidates of each node, with the logarithms of scores as ``logprobs``;
    fewer if top-k and top-p leave fewer. The transform must not be greedy; ``uniforms``[W] has u.
    """
    law = transform.distribution(logits, histories)
    ids, probs = (law.ids, law.values) if isinstance(law, SupportProbs) else (None, law)
    cdf = probs.cumsum(axis=1)  # [W, S]
    total, draws = cdf[:, -1:], uniforms[:, None]
    edges = (cdf / total - draws) / spread
    # The density's integral from u to each edge, times 2; the first edge is 0.
    integral = np.copysign(np.expm1(-np.abs(edges)), edges)
    first = np.expm1(-draws / spread)
    scores = np.diff(integral, axis=1, prepend=first)
    scores *= (1.0 - FAR_SHARE) / (integral[:, -1:] - first)
    scores += probs * (FAR_SHARE / total)
    k = min(k, logits.shape[1])
    if (missing := k - scores.shape[1]) > 0:  # rows of other transforms have k columns too
        scores = np.pad(scores, ((0, 0), (0, missing)))
        ids = None if ids is None else np.pad(ids, ((0, 0), (0, missing)))
    best = (-scores).argsort(axis=1, kind="stable")[:, :k]
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.take_along_axis(scores, best, axis=1))
    return Candidates(
        tokens=best if ids is None else np.take_along_axis(ids, best, axis=1),
        logprobs=logprobs,
        counts=(logprobs > -np.inf).sum(axis=1),
    )


class DraftModelSource(CachedModelSource):
    """Proposes the most probable, or sampled, next tokens of a draft or middle model.

    The model has its own KV cache. Nodes beyond its maximum position get no candidates.

    Args:
        runner: runs all layers of the model; or a function from a model's name to its runner.
        model: the model's name; a pass takes that model's time in a latency profile.
        sample, prefill_chunk: see ``CachedModelSource``.
        guess_draw: rank candidates by the random number with which the target will sample its token
            (Staged Speculative Decoding, future work 1). Lossless under ``match``.
        guess_spread: expected absolute error of the draft's CDF, the ``spread`` of ``near_draw``;
            used with ``guess_draw`` only.
    """

    @validated
    def __init__(
        self,
        *,
        runner: ModelRunner | Callable[[str], ModelRunner],
        model: Literal["draft", "middle"] = "draft",
        sample: bool = False,
        guess_draw: bool = False,
        guess_spread: Positive = 0.2,
        prefill_chunk: Count = 512,
    ) -> None:
        if sample and guess_draw:
            raise ValueError(
                "guess_draw=true reads the target's draws, which would bias a rejection verifier;"
                " use verifier=match or guess_draw=false"
            )
        runner = runner(model) if callable(runner) else runner
        super().__init__(
            runner=runner,
            label=runner.name,
            needs=Needs(target_draws=guess_draw),
            vocab_size=runner.vocab_size,
            sample=sample,
            prefill_chunk=prefill_chunk,
            work=Work(model),
        )
        self.model = model
        self._spread = guess_spread if guess_draw else None

    def _propose(
        self,
        state: DecodeState,
        nodes: Nodes,
        logits: Tensor,
        transform: SamplingTransform,
        histories: Histories,
        k: int,
    ) -> Candidates:
        if self._spread is not None and not transform.params.greedy:
            draws = target_draws(state, nodes)
            return near_draw(transform, logits, histories, draws, k, spread=self._spread)
        return super()._propose(state, nodes, logits, transform, histories, k)
