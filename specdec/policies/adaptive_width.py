"""Levels whose width is shared by all requests of a step, and narrows as the batch grows.

Beyond SpecPipe, whose width is fixed (64, the optimum of one request on its testbed): with many
requests every node of one of them makes the step longer for all.

Letters: B live requests, N steps of latency, n nodes of the step, W nodes, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specdec.clocks import LatencyProfile, Work
from specdec.parts.fields import Count, DraftCount, validated
from specdec.policies.calibration import RankCalibration
from specdec.policies.tree_growth import (
    Stateless,
    bottom_level,
    expand,
    last_position,
    open_bottom,
    ready_requests,
    unsubmitted,
)
from specdec.sampling.top_stable import top_set
from specdec.types import Commit, FloatArray, IntArray, Nodes, Output

if TYPE_CHECKING:
    from specdec.interfaces import TokenSource
    from specdec.state import DecodeState, RequestState


_MEMORY_LEVELS = 4  # running means reach back so many times the levels in flight
_PRIOR_MISSES = 8.0  # with their steps, seen and expected before any was: correction begins at 1


@dataclass(frozen=True, slots=True)
class _Level:
    """What may become the next level of one request.

    Attributes:
        request: whose.
        bottom: int64[W], slots of the level above.
        picks: int64[<= width], candidates as flat indices into [W, K], most probable first.
        probs: float64[<= width], their probabilities.
        shares: float64[<= width], the same where the path runs through the level above.
        num_columns: K.
    """

    request: RequestState
    bottom: IntArray
    picks: IntArray
    probs: FloatArray
    shares: FloatArray
    num_columns: int


class AdaptiveWidth(Stateless):
    """One level per step for every request, the most probable nodes of all of them together.

    A path that leaves the tree costs its request N - 1 steps (SpecPipe, Eq. 2); a longer step costs
    all B requests. So the step takes the n most probable candidates of all requests together, at
    least one of each, where n is the number at which

        T(n) (B + (N - 1) (probability that is left out of the levels))

    is least: the paper's T (1 + (1 - p)(N - 1)) over a batch, with the draft's own probabilities
    for p, corrected by how often the path ran through nodes of their rank (``RankCalibration``) and
    its N - 1 by the steps that gave a request nothing so far against those expected; refilling
    after a miss, which Eq. 2 leaves out, counts by that. A step takes as long as the widest of the
    N levels in flight, so one level narrower than the rest saves nothing: what is left out is a
    running mean over some N steps, by nodes per request. So n changes slowly, while its nodes go
    where they cover most. T(n) comes from the clock's latency profile; by a wall clock without one
    it is fitted to the run's own steps. At most ``width`` nodes per request.
    """

    value_dependent = True
    serial = False
    levels_per_step = 1

    @validated
    def __init__(
        self,
        *,
        width: DraftCount,
        children: Count,
        latency: int = 1,
        profile: LatencyProfile | None = None,
    ) -> None:
        """Sets the bounds.

        Args:
            width: nodes per level and request at most.
            children: candidates per node at most.
            latency: of the executor, in steps.
            profile: what a step costs; None to measure it.

        Raises:
            ValueError: for a size below 1.
        """
        self.width = width
        self.children = children
        self._latency = latency
        self._expected_idle = self._idle = _PRIOR_MISSES * (latency - 1)
        self._num_output: dict[int, int] = {}
        self._reliability = RankCalibration()
        self._left_out: FloatArray | None = None  # [width], mean per request by nodes per request
        self._cost: _Priced | _Fitted = _Fitted() if profile is None else _Priced(profile)

    def open(self, request: RequestState) -> None:
        """Starts a request."""
        self._reliability.open(request.id)

    def held_nodes(self, latency: int) -> int:
        """Most nodes of one request that the target holds at a time; see ``TreePolicy``."""
        return 1 + self.width * latency

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        """The next level of every request, the step's nodes shared among them."""
        self._count_idle(state)
        requests = ready_requests(state, serial=False)
        fed = [r for r in requests if r.tree.submitted_at[0] >= 0 or len(r.tree) > 1]
        levels = [level for r in fed if (level := self._level(r)) is not None]
        if levels:
            num_live = sum(not r.finished for r in state.requests.values())
            self._append(levels, num_live, len(requests) - len(fed))
        chosen = unsubmitted(requests)
        self._cost.step(state.clock.now(), len(chosen))
        return chosen

    def overlap(self, state: DecodeState, source: TokenSource, ready: Callable[[], bool]) -> None:
        """Expands the newest level of every request, in one call."""
        growing = [request for request in state.requests.values() if not request.finished]
        expand(state, source, [(r, open_bottom(r)) for r in growing], self.children)

    def commit(self, commits: Sequence[Commit], output: Output) -> None:
        """Learns which nodes were on the path."""
        self._reliability.commit(commits)

    def close(self, request_id: int) -> None:
        """Forgets the request."""
        self._reliability.close(request_id)
        self._num_output.pop(request_id, None)

    def _count_idle(self, state: DecodeState) -> None:
        """Counts requests to which the last step gave no token, after their first one."""
        for request in state.requests.values():
            seen, now = self._num_output.get(request.id, 0), len(request.output)
            self._idle += 0 < seen == now and not request.finished
            self._num_output[request.id] = now

    def _level(self, request: RequestState) -> _Level | None:
        """The best candidates below the deepest level; None where there are none."""
        tree = request.tree
        bottom = bottom_level(tree)
        if int(tree.positions[bottom[0]]) >= last_position(request):
            return None
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
        return _Level(request, bottom, picks, probs, probs / mass, logprobs.shape[1])

    def _append(self, levels: list[_Level], num_live: int, num_roots: int) -> None:
        """Makes nodes of the candidates that are worth their time."""
        owners = np.repeat(np.arange(len(levels)), [len(level.probs) for level in levels])
        probs = np.concatenate([level.probs for level in levels])
        shares = np.concatenate([self._reliability.corrected(level.shares) for level in levels])
        first = np.concatenate([np.arange(len(level.probs)) == 0 for level in levels])
        # Everybody's best candidate is taken in any case; the others compete.
        order = np.lexsort((-probs, ~first))
        covered = np.cumsum(shares[order])[len(levels) - 1 :]
        left_out = np.maximum(len(levels) - covered, 0.0)
        sizes = np.arange(1, self.width + 1) * len(levels)
        mean = self._mean_left_out(left_out[np.minimum(sizes, len(probs)) - len(levels)], levels)
        step = self._cost.table(num_roots + int(sizes[-1]))[num_roots + sizes]
        correction = self._idle / self._expected_idle if self._expected_idle else 1.0
        value = step * (num_live + (self._latency - 1) * correction * mean)
        num = int(min(sizes[value.argmin()], len(probs)))
        best = num - len(levels)
        self._expected_idle += (self._latency - 1) * float(left_out[best])
        taken = np.bincount(owners[order[:num]], minlength=len(levels))
        for level, count in zip(levels, taken.tolist(), strict=True):
            picks, tree = level.picks[:count], level.request.tree
            places = np.argsort(picks)  # in the order of the parents: breadth-first
            rows, columns = np.divmod(picks[places], level.num_columns)
            slots = tree.take(level.bottom.take(rows), columns)
            ids = np.empty_like(slots)
            ids[places] = tree.ids[slots]  # most probable first, as ``picks``
            position = int(tree.positions[slots[0]])
            shares = level.shares[:count]
            self._reliability.promise(level.request.id, position=position, ids=ids, shares=shares)

    def _mean_left_out(self, now: FloatArray, levels: list[_Level]) -> FloatArray:
        """float64[width]: probability that all requests leave out, by nodes of each, as of late."""
        each = now / len(levels)
        if self._left_out is None:
            self._left_out = each
        self._left_out = self._left_out + (each - self._left_out) / (_MEMORY_LEVELS * self._latency)
        return self._left_out * len(levels)


class _Priced:
    """Step times of a latency profile."""

    def __init__(self, profile: LatencyProfile) -> None:
        self._profile = profile
        self._table: FloatArray = np.zeros(0)

    def step(self, now_s: float, num_nodes: int) -> None:
        """Nothing to learn."""

    def table(self, most: int) -> FloatArray:
        """float64[most + 1]: a step's milliseconds by its number of nodes."""
        known = len(self._table)
        if most >= known:
            more = [self._ms(n) for n in range(known, 2 * most + 1)]
            self._table = np.concatenate([self._table, more])
        return self._table[: most + 1]

    def _ms(self, num: int) -> float:
        """Compute, prune, transmit; the draft works beside the stages."""
        ms = self._profile.ms
        stage = ms(Work.STAGE, num) + ms(Work.HEAD, num)
        return max(stage, ms(Work.DRAFT, num)) + ms(Work.PRUNE, num) + ms(Work.TRANSFER, num)


class _Fitted:
    """Step times of the run so far, as a straight line over the number of nodes."""

    _MEMORY = 0.98  # weight of a step against the next: about 50 steps

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # weights, n, t, n n, n t
        self._last: tuple[float, int] | None = None

    def step(self, now_s: float, num_nodes: int) -> None:
        """Takes the time since the last step, whose number of nodes is known."""
        if self._last is not None:
            then_s, n = self._last
            t = now_s - then_s
            self._sums = self._MEMORY * self._sums + np.array([1.0, n, t, n * n, n * t])
        self._last = now_s, num_nodes

    def table(self, most: int) -> FloatArray:
        """float64[most + 1]: seconds by number of nodes; flat until there is something to fit."""
        weight, n, t, nn, nt = self._sums.tolist()
        spread = weight * nn - n * n
        slope = max(0.0, (weight * nt - n * t) / spread) if spread > 1e-9 else 0.0
        base = (t - slope * n) / weight if weight else 1.0
        line: FloatArray = max(base, 1e-9) + slope * np.arange(most + 1, dtype=np.float64)
        return line
