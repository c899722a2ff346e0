"""SpecPipe-DB: SpecPipe for many requests (arXiv 2504.04104 v2, 3.4, section 4, 4.4).

The levels of all requests form one ragged batch per step; a miss empties only its own request's
tree. Keys and values are stored in blocks (PagedAttention). New requests enter as soon as blocks
are free; unlike in vLLM, their prefill shares steps with decoding. The preset
``specpipe_db_adaptive`` deviates: it narrows the levels as the batch grows.

Letters: B live requests, N steps of latency, n nodes of a step, W nodes of a level, K columns.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from specdec.clocks import LatencyProfile, Work
from specdec.interfaces import Events, TokenSource, TreePolicy
from specdec.parts.fields import Count, DraftCount, validated
from specdec.policies.fading_mean import FadingLine
from specdec.policies.tree_growth import (
    expand,
    growable_level,
    live_requests,
    ready_requests,
    unsubmitted,
)
from specdec.sampling.transform import top_set
from specdec.state import DecodeState, RequestState
from specdec.types import Commit, CommitKind, FloatArray, IntArray, Nodes, Output

_MEAN_LEVELS = 4  # the running mean covers this many times the levels in flight
_PRIOR_MISSES = 8.0  # initial misses, with their idle steps: the correction starts at 1
_FADE = 0.98  # weight of a step's time relative to the next: about 50 steps
_BINS = 16  # of ranks, each twice as wide as the one before
_PRIOR = 2.0  # initial count of nodes on the path, observed and expected: a correction of 1


@dataclass(frozen=True, slots=True)
class _WidthLevel:
    """The candidates for the next level of one request's tree.

    Attributes:
        bottom: int64[W], slots of the level above.
        picks: int64[<= width], candidates as flat indices into [W, K], most probable first.
        probs: float64[<= width], their probabilities.
        shares: float64[<= width], their probabilities given that the path passes the level above.
        num_columns: K, the number of candidate columns per node of the level above.
    """

    request: RequestState
    bottom: IntArray
    picks: IntArray
    probs: FloatArray
    shares: FloatArray
    num_columns: int


@validated
@dataclass(eq=False, kw_only=True)
class AdaptiveWidth(TreePolicy):
    """Submits one level per step and request; the requests share a node budget per step.

    SpecPipe's width is fixed (64, the optimum of one request on its testbed). With many requests,
    every node of one request lengthens the step of all. At a latency of N steps, a path that leaves
    the tree costs its request N - 1 steps (SpecPipe, Eq. 2); a longer step costs all B requests.
    Each step takes the n most probable candidates of all requests, at least one of each, with the n
    that minimizes, for steps of time T(n),

        T(n) (B + (N - 1) (probability that the levels omit)),

    which is the paper's T (1 + (1 - p)(N - 1)) over a batch. p, the draft's probability of a level,
    is corrected by the observed hits per rank (``RankCalibration``), N - 1 by the ratio of observed
    to expected steps without a token, which includes the refill after a miss that Eq. 2 omits. A
    step takes as long as the widest of the N levels in flight, so one narrow level saves nothing;
    the omitted probability is therefore a mean over several N steps. T(n) comes from the clock's
    latency profile; without one it is fitted to the measured steps (``FadingLine``).

    Args:
        width: maximum number of nodes per level and request.
        children: maximum number of candidates per node.
        latency: the executor's latency in steps.
    """

    value_dependent = True
    serial = False
    levels_per_step = 1

    width: DraftCount
    children: Count
    latency: int = 1
    profile: LatencyProfile | None = None

    def __post_init__(self) -> None:
        self._expected_idle = self._idle = _PRIOR_MISSES * (self.latency - 1)
        self._num_output: dict[int, int] = {}
        self._calibration = RankCalibration()
        self._omitted: FloatArray | None = None  # [width], mean omitted probability per request
        self._fitted = FadingLine(_FADE)  # seconds of the run's steps over their numbers of nodes
        self._last: tuple[float, int] | None = None  # when the last step began, and its nodes
        if self.profile is not None:
            self._step_ms = cache(partial(_step_ms, self.profile))

    def max_cached_nodes(self, in_flight: int) -> int:
        return 1 + self.width * in_flight

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        self._count_idle(state)
        requests = ready_requests(state, serial=False)
        growing = [r for r in requests if r.tree.submitted_at[0] >= 0 or len(r.tree) > 1]
        levels = [level for r in growing if (level := self._level(r)) is not None]
        if levels:
            self._append(levels, len(live_requests(state)), len(requests) - len(growing))
        selected = unsubmitted(requests)
        now = state.clock.now()
        if self._last is not None:
            began, num = self._last
            self._fitted.add(num, now - began)
        self._last = now, len(selected)
        return selected

    def overlap(self, state: DecodeState, source: TokenSource, events: Events) -> bool:
        expand(state, source, [(r, growable_level(r)) for r in live_requests(state)], self.children)
        return False

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        self._calibration.commit(commits)

    def close(self, request_id: int) -> None:
        self._calibration.close(request_id)
        self._num_output.pop(request_id, None)

    def _count_idle(self, state: DecodeState) -> None:
        """Counts unfinished requests that have output, but got no new token in the last step."""
        for request in state.requests.values():
            before, now = self._num_output.get(request.id, 0), len(request.output)
            self._idle += 0 < before == now and not request.finished
            self._num_output[request.id] = now

    def _level(self, request: RequestState) -> _WidthLevel | None:
        tree = request.tree
        bottom = growable_level(request)
        above = tree.scores.take(bottom)
        logprobs = tree.candidate_logprobs[bottom, : self.children]  # [W, K]
        scores = (logprobs + above[:, None]).ravel()
        picks = top_set(scores, self.width)
        picks = picks[scores.take(picks) > -np.inf]
        if not len(picks):
            return None
        picks = picks[np.argsort(-scores.take(picks), kind="stable")]
        probs = np.exp(scores.take(picks))
        mass = float(np.exp(above).sum())
        return _WidthLevel(request, bottom, picks, probs, probs / mass, logprobs.shape[1])

    def _append(self, levels: list[_WidthLevel], num_live: int, num_roots: int) -> None:
        owners = np.repeat(np.arange(len(levels)), [len(level.probs) for level in levels])
        probs = np.concatenate([level.probs for level in levels])
        shares = np.concatenate([self._calibration.corrected(level.shares) for level in levels])
        first = np.concatenate([np.arange(len(level.probs)) == 0 for level in levels])
        # The best candidate of each request is always taken; the others compete.
        order = np.lexsort((-probs, ~first))
        covered = np.cumsum(shares[order])[len(levels) - 1 :]
        omitted = np.maximum(len(levels) - covered, 0.0)
        sizes = np.arange(1, self.width + 1) * len(levels)
        mean = self._mean_omitted(omitted[np.minimum(sizes, len(probs)) - len(levels)], levels)
        step = self._step_times(num_roots + sizes)
        correction = self._idle / self._expected_idle if self._expected_idle else 1.0
        value = step * (num_live + (self.latency - 1) * correction * mean)
        num = int(min(sizes[value.argmin()], len(probs)))
        self._expected_idle += (self.latency - 1) * float(omitted[num - len(levels)])
        taken = np.bincount(owners[order[:num]], minlength=len(levels))
        for level, count in zip(levels, taken.tolist(), strict=True):
            picks, tree = level.picks[:count], level.request.tree
            by_parent = np.argsort(picks)  # breadth-first
            rows, columns = np.divmod(picks[by_parent], level.num_columns)
            slots = tree.take(level.bottom.take(rows), columns)
            ids = np.empty_like(slots)
            ids[by_parent] = tree.ids[slots]  # most probable first, as ``picks``
            self._calibration.add_level(
                level.request.id,
                position=int(tree.positions[slots[0]]),
                ids=ids,
                shares=level.shares[:count],
            )

    def _step_times(self, sizes: IntArray) -> FloatArray:
        """Returns float64[width], in any unit: a step's time for each node number in ``sizes``."""
        if self.profile is not None:
            return np.array([self._step_ms(num) for num in sizes.tolist()])
        if not self._fitted.sums[0]:
            return np.ones(len(sizes))
        return np.maximum(self._fitted.at(0.0), 1e-9) + self._fitted.slope * sizes

    def _mean_omitted(self, omitted: FloatArray, levels: list[_WidthLevel]) -> FloatArray:
        """Returns float64[width]: running mean of ``omitted``, summed over the current requests."""
        each = omitted / len(levels)
        if self._omitted is None:
            self._omitted = each
        self._omitted = self._omitted + (each - self._omitted) / (_MEAN_LEVELS * self.latency)
        return self._omitted * len(levels)


def _step_ms(profile: LatencyProfile, num: int) -> float:
    """Returns the ms of a step of ``num`` nodes: max(stage, parallel draft), prune and transmit."""
    ms = profile.ms
    stage = ms(Work.STAGE, num) + ms(Work.HEAD, num)
    return max(stage, ms(Work.DRAFT, num)) + ms(Work.PRUNE, num) + ms(Work.TRANSFER, num)


class RankCalibration:
    """Corrects draft probabilities, per rank in a level, by how often the target took such nodes.

    A draft's probabilities are least reliable in the last ranks of a level, because the draft
    describes a distribution, while a greedy or sharpened target follows its peaks.

    A node's *share* is its probability given that the path passes through the level above, because
    levels below a miss are not counted. A bin covers the ranks 1, 2-3, 4-7, ...; a bin's correction
    is the number of its nodes on the path divided by the sum of its shares. Rank 1 is the best.
    """

    def __init__(self) -> None:
        self._observed = np.full(_BINS, _PRIOR)
        self._predicted = np.full(_BINS, _PRIOR)
        # By request, its submitted levels that are not decided yet: position, ids, shares.
        self._pending = defaultdict[int, deque[tuple[int, IntArray, FloatArray]]](deque)

    def add_level(
        self, request_id: int, *, position: int, ids: IntArray, shares: FloatArray
    ) -> None:
        """Adds a level at ``position``, below all levels of the request that are not decided yet.

        ``ids``, int64[W], are most probable first, as are their ``shares``, float64[W].
        """
        self._pending[request_id].append((position, ids, shares))

    def corrected(self, shares: FloatArray) -> FloatArray:
        """Returns float64[W]: shares of a level, best first, times the correction of their bins."""
        return shares * (self._observed / self._predicted)[_bins(len(shares))]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Counts the levels that the commits decide, and discards those below a miss."""
        for commit in commits:
            if commit.finished:
                continue
            pending = self._pending[commit.request]
            hit = commit.kind is CommitKind.HIT
            path = np.append(commit.retired_ids, commit.root_id) if hit else commit.retired_ids
            while pending and pending[0][0] <= commit.prefix_len:
                _, ids, shares = pending.popleft()
                bins = _bins(len(ids))
                self._predicted += np.bincount(bins, shares, _BINS)
                self._observed += np.bincount(bins[np.isin(ids, path)], minlength=_BINS)
            if not hit:
                pending.clear()

    def close(self, request_id: int) -> None:
        self._pending.pop(request_id, None)


def _bins(num: int) -> IntArray:
    """Returns int64[num], the bins 0, 1, 1, 2, 2, 2, 2, ... of ranks 1, 2, ..."""
    return np.minimum(np.log2(np.arange(1, num + 1)).astype(np.int64), _BINS - 1)
