from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from specdec.interfaces import TokenSource, TreePolicy
from specdec.parts.fields import Index, Share, Text, validated
from specdec.policies.fading_mean import FadingLine, FadingMean
from specdec.policies.tree_growth import as_nodes, ready_requests
from specdec.state import DecodeState, RequestState
from specdec.types import Nodes

_TRIALS = 2  # rounds of each arm before any is preferred
_PRIOR_ROUNDS = 4.0  # weight of other requests in a request's own gain
_FADE = 0.9  # factor by which each round lowers the weight of a request's older gains
_FADE_ALL = 0.99  # likewise for the means over all requests
_OUTLIER = 3.0  # a round's cost counts as at most this multiple of the mean
_PLAIN = 0
_PLAIN_WAIT = 64  # rounds of a request until plain decoding is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to build a tree: a serial policy that drafts before it submits, and a source.

    Attributes:
        name: label in printed lines.
        member: index into ``TokenSource.members`` of the source; None: the whole source.
    """

    name: Text
    policy: TreePolicy
    member: Index | None = None


@dataclass(slots=True)
class _Round:
    """A round; ``best`` was the best arm, and the source missed ``missed`` tokens, None if it was
    in use.
    """

    arm: int
    best: int
    began_s: float
    num_tokens: int
    missed: int | None


@dataclass(slots=True)
class _Record:
    """Gains and costs of one request's rounds (draft, then verify) with each arm.

    Attributes:
        gains, costs: per arm, mean tokens and mean seconds per round.
        since: per arm, number of the request's rounds since the arm was last used.
        read: per arm, number of the request's tokens when the arm was last used.
        repeat: whether the next round must have the same arm, as the second round of a trial.
    """

    request: RequestState
    gains: list[FadingMean]
    costs: list[FadingMean]
    since: list[int]
    read: list[int]
    open_round: _Round | None = None
    last: int = _PLAIN
    repeat: bool = False


class Adaptive(TreePolicy):
    """Chooses per request and round the arm with the best gain per cost; arm 0 is plain decoding.

    A *round* is one draft and its verification. An arm's *gain* is the mean number of tokens
    committed per round: the mean of the request's own rounds, combined with that of all requests,
    which has the weight of four rounds. An arm's *cost* is the mean time on the run's clock from
    the start of a round to the start of the next, combined in the same way. In the first round
    after a change of arm the source also catches up with the tokens that it has missed, which is
    not part of the cost: a line is fitted to the times of such rounds over the missed tokens. The
    best arm is the one with which the tokens that the request may still emit take the least time,
    catching up included.

    Arms that are not the best are tried again, the longest unused first, in trials of two rounds,
    as long as the net time that an arm's trials have lost is at most its share of ``explore`` of
    all time. The shares are equal, so that a source with much to catch up does not keep a cheap
    one from being tried. Plain decoding is tried rarely: only its cost may change. A choice uses
    only rounds that have ended, never future random numbers, so with verifiers that are lossless
    token for token the output does not depend on the choice.

    Args:
        arms: the arms besides plain decoding, at least one.
        explore: largest share of the total time that trying arms other than the best may lose.
    """

    @validated
    def __init__(self, *, arms: Sequence[Arm], explore: Share = 0.02) -> None:
        if not arms:
            raise ValueError("policy.arms=[] must list at least one arm besides plain decoding")
        for arm in arms:
            made = arm.policy
            if not made.serial or made.asynchronous:
                raise ValueError(
                    f"arm {arm.name} has a {type(made).__name__} that does not draft before it"
                    " submits; use a serial policy (BestFirst with asynchronous: false, Chain)"
                )
        self.value_dependent = any(arm.policy.value_dependent for arm in arms)
        self._arms = list(arms)
        self._explore = explore
        num = len(arms) + 1
        sized = any(arm.policy.includes_plain for arm in arms)
        self._usable = range(int(sized), num)  # arms that are used after the first trials
        self._gains = [FadingMean(_FADE_ALL) for _ in range(num)]
        self._costs = [FadingMean(_FADE_ALL) for _ in range(num)]
        self._firsts = [FadingLine(_FADE_ALL) for _ in range(num)]  # seconds over missed tokens
        self.rounds = [0] * num
        self._lost_s, self._total_s = [0.0] * num, 0.0
        self._records: dict[int, _Record] = {}

    def max_cached_nodes(self, in_flight: int) -> int | None:
        sizes = [arm.policy.max_cached_nodes(in_flight) for arm in self._arms]
        known = [size for size in sizes if size is not None]
        return max(known) if len(known) == len(sizes) else None

    def open(self, request: RequestState) -> None:
        num = len(self.rounds)
        gains, costs = ([FadingMean(_FADE) for _ in range(num)] for _ in range(2))
        self._records[request.id] = _Record(request, gains, costs, [0] * num, [0] * num)
        for arm in self._arms:
            arm.policy.open(request)

    def select(self, state: DecodeState, source: TokenSource) -> Nodes:
        chosen: dict[int, list[RequestState]] = {}
        now = state.clock.now()
        for request in ready_requests(state, serial=True):
            record = self._records[request.id]
            num_tokens = len(request.tokens)
            self._end(record, num_tokens, now)
            best = self._best(record)
            arm = self._choose(record, best)
            missed = None if arm == record.last else num_tokens - record.read[arm]
            record.open_round = _Round(arm, best, now, num_tokens, missed)
            record.last, record.read[arm] = arm, num_tokens
            self.rounds[arm] += 1
            chosen.setdefault(arm, []).append(request)
        plain = chosen.pop(_PLAIN, [])
        fresh = [request for request in plain if request.tree.submitted_at[0] < 0]
        items = list(as_nodes((request, np.zeros(1, np.int64)) for request in fresh).items)
        for number, requests in sorted(chosen.items()):
            chosen_arm, part = self._arms[number - 1], copy(state)
            part.turn = frozenset(request.id for request in requests)
            proposing = _proposing(source, chosen_arm.member)
            items += chosen_arm.policy.select(part, proposing).items
        return Nodes(tuple(items))

    def close(self, request_id: int) -> None:
        self._records.pop(request_id, None)
        for arm in self._arms:
            arm.policy.close(request_id)

    def notes(self) -> list[str]:
        plain = self._costs[_PLAIN].value
        lines = []
        for number, rounds in enumerate(self.rounds):
            name = self._arms[number - 1].name if number else "plain"
            line = f"adaptive: {name}: {rounds} rounds"
            if rounds and plain:
                ratio = self._costs[number].value / plain
                line += f", {self._gains[number].value:.2f} tokens per round"
                line += f", {1e3 * self._costs[number].value:.2f} ms"
                line += f", pays above {ratio:.2f} tokens per round" if number else ""
            lines.append(line)
        return lines

    def _end(self, record: _Record, num_tokens: int, now: float) -> None:
        ended, record.open_round = record.open_round, None
        if ended is None:
            return
        arm, gain, cost = ended.arm, num_tokens - ended.num_tokens, now - ended.began_s
        self._total_s += cost
        if arm != ended.best:
            lost = cost - gain / max(self._rate(record, ended.best), 1e-9)
            self._lost_s[arm] = max(0.0, self._lost_s[arm] + lost)
        record.gains[arm].add(gain)
        self._gains[arm].add(gain)
        mean = self._costs[arm]
        if ended.missed is not None:
            self._firsts[arm].add(ended.missed, cost)
        else:
            cost = min(cost, _OUTLIER * mean.value) if mean.rounds >= _TRIALS else cost
            mean.add(cost)
            record.costs[arm].add(cost)
        for number in range(len(record.since)):
            record.since[number] = 0 if number == arm else record.since[number] + 1
        record.repeat = ended.missed is not None and arm != ended.best

    def _choose(self, record: _Record, best: int) -> int:
        for arm, (gain, cost) in enumerate(zip(self._gains, self._costs, strict=True)):
            if gain.rounds < _TRIALS or not cost.rounds:
                return arm
        if record.repeat:
            return record.last
        rate, others = self._rate(record, best), [arm for arm in self._usable if arm != best]
        for arm in sorted(others, key=lambda arm: -record.since[arm]):
            slower = self._cost(record, arm) - self._gain(record, arm) / rate
            lost = self._lost_s[arm] + max(0.0, 2 * slower + self._catch_up(record, arm))
            affordable = lost * len(others) <= self._explore * self._total_s
            wait = _PLAIN_WAIT if arm == _PLAIN else len(self.rounds)
            if affordable and record.since[arm] > wait:
                return arm
        return best

    def _best(self, record: _Record) -> int:
        return min(self._usable, key=lambda arm: (self._time(record, arm), arm))

    def _time(self, record: _Record, arm: int) -> float:
        """Returns the seconds in which the arm would emit all tokens that are left."""
        rate, request = self._rate(record, arm), record.request
        left = max(1, request.stop.max_new_tokens - len(request.output))
        return left / rate + self._catch_up(record, arm) if rate else np.inf

    def _catch_up(self, record: _Record, arm: int) -> float:
        if arm == record.last or not self._firsts[arm].sums[0]:
            return 0.0
        first = self._firsts[arm].at(len(record.request.tokens) - record.read[arm])
        return max(0.0, first - self._costs[arm].value)

    def _rate(self, record: _Record, arm: int) -> float:
        cost = self._cost(record, arm)
        return self._gain(record, arm) / cost if cost > 0.0 else 0.0

    def _cost(self, record: _Record, arm: int) -> float:
        return record.costs[arm].with_prior(self._costs[arm].value, _PRIOR_ROUNDS)

    def _gain(self, record: _Record, arm: int) -> float:
        return record.gains[arm].with_prior(self._gains[arm].value, _PRIOR_ROUNDS)


def _proposing(source: TokenSource, member: int | None) -> TokenSource:
    members = source.members
    return source if member is None or member >= len(members) else members[member]
