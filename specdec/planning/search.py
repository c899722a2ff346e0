"""The search: layouts and sizes by short simulations, then successive halving on prompts.

Candidates are compared on the same prompts. The uncertainty of a ratio is estimated by drawing
prompts anew (bootstrap), as many as there is information: n simulated prompts of a law that was
fitted to m requests count as 1 / (1 / n + 1 / m).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from time import monotonic
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.planning.candidates import PLAIN, Candidate, Family, sized, with_size
from specdec.planning.layouts import Layout, layouts
from specdec.planning.machines import DoesNotFit, Machine
from specdec.planning.options import PlanOptions
from specdec.planning.simulate import Simulator, Unit
from specdec.types import FloatArray

_RESAMPLES = 2000
_LEVEL = 0.95
_FIRST = (3, 48)  # prompts and tokens of the first round
_ROUNDS = ((8, 18), (None, 9))  # prompts (None: all), candidates that are kept
_BESIDE = 0.2  # from this share of drafting during target work, the draft needs its own device
_TUNING = 0.6  # share of the budget after which sizes are no longer tried
_HOPELESS = 2.5  # sizes of a preset are not tried if it takes this many times the best time
_PER_FAMILY = 3  # candidates of a preset that enter the halving
_DECODING = 2.0  # time limit for candidates that models decode, in budgets, besides the budget
_LOOKING = 0.5  # share of that time limit for the first round
_NO_TIME = "the budget was spent before it was tried"
_SURE = 3  # decoded candidates that every round of halving evaluates, even beyond that limit


@dataclass(frozen=True, slots=True)
class Times:
    """Time per token of a candidate; less is better.

    ``above`` and ``below`` are float64[U], numerator and denominator of the objective by unit,
    where a unit is a batch of prompts that are served together.
    """

    above: FloatArray
    below: FloatArray

    @staticmethod
    def of(units: Sequence[Unit], objective: str, devices: int) -> Times:
        """Computes seconds per token: of one request for "latency", otherwise of all requests.

        "per_device" multiplies them by ``devices``.
        """
        if objective == "latency":
            above, below = [u.seconds for u in units], [u.tokens for u in units]
        else:
            factor = devices if objective == "per_device" else 1
            above, below = [u.clock_s * factor for u in units], [u.emitted for u in units]
        return Times(np.array(above, float), np.maximum(np.array(below, float), 1e-9))

    @property
    def mean(self) -> float:
        return float(self.above.sum() / self.below.sum())

    def resampled(self, count: float) -> FloatArray:
        """Returns float64[R], the means over ``count`` units drawn with replacement.

        All candidates get the same draws, so that ratios are paired.
        """
        picks = drawn_units(len(self.above), count)
        means: FloatArray = self.above[picks].sum(axis=1) / self.below[picks].sum(axis=1)
        return means


def drawn_units(num: int, count: float) -> np.ndarray:
    """Returns int64[R, max(1, round(count))], units drawn with replacement by a constant seed."""
    size = max(1, round(count))
    return np.random.default_rng(0).integers(0, num, (_RESAMPLES, size))


def effective(simulated: float, requests: float, drawn: bool) -> float:
    """Returns how many units the uncertainty corresponds to, by the module's formula.

    ``requests`` is the number of units that a law was fitted to; 0 ignores its uncertainty.
    ``drawn`` is False for a record, whose prompts are its requests.
    """
    if not drawn or not requests:
        return float(simulated)
    return 1.0 / (1.0 / simulated + 1.0 / requests)


def interval(values: FloatArray) -> tuple[float, float]:
    """Returns the central 95 % of samples."""
    low, high = np.quantile(values, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


@dataclass(slots=True)
class Search:
    """A search over presets, layouts and sizes.

    Attributes:
        requests, drawn: origin of the acceptance; see ``effective``.
        length: tokens per prompt.
        chain_length: draft tokens of the best chain by formula, which are tried too.
        report: called with the label and number of steps of a phase, or with a finished step.
        left_out: preset -> why it is not simulated.
        unknown: presets whose acceptance no law, record or model here has.
    """

    machine: Machine
    simulator: Simulator
    chosen: PlanOptions
    requests: float
    drawn: bool
    length: int
    chain_length: int
    report: Callable[[str, int | None], None]
    left_out: dict[str, str] = field(default_factory=dict)
    complete: bool = True
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    _ends: float = 0.0
    _tuned_by: float = 0.0
    _decoding_s: float = 0.0

    def run(self, families: Sequence[Family]) -> list[Candidate]:
        """Returns the candidates of the last round, and plain decoding.

        First every preset is tried as it is, in every layout; then sizes of those that may still be
        best, the fastest first; then successive halving.
        """
        began = monotonic()
        self._ends = began + self.chosen.budget_s
        self._tuned_by = began + _TUNING * self.chosen.budget_s
        self.report("layouts", len(families))
        tried: dict[str, dict[str, tuple[float, Candidate]]] = {}
        for family in families:
            found = self._in_layouts(family)
            if found:
                tried[family.name] = found
            self.report(family.name, None)
        if PLAIN not in tried:
            raise UserError(
                f"plain decoding does not fit: {self.left_out.get(PLAIN, 'no layout')}; give more"
                " devices, or a machine that holds the target"
            )
        plain = _fastest(tried.pop(PLAIN))[0]
        order = sorted(tried, key=lambda name: min(tried[name].values(), key=_time)[0])
        best = min((t for found in tried.values() for t, _ in found.values()), default=0.0)
        self.report("sizes", len(order))
        decoded = {family.name for family in families if family.decoded}
        for name in order:
            hopeful = _fastest_time(tried[name]) <= _HOPELESS * best
            if hopeful and name not in decoded:
                self._tune(tried[name])
                best = min(best, _fastest_time(tried[name]))
            elif name in decoded and not hopeful:
                self.left_out[name] = f"more than {_HOPELESS} times slower than the best preset"
                del tried[name]
            self.report(name, None)
        groups = [self._entering(tried[name]) for name in order if name in tried]
        # The best of every preset comes first, in case there is no time for all.
        entered = [made for nth in zip_longest(*groups) for made in nth if made is not None]
        return [*self._halved(entered), plain]

    def times(self, candidate: Candidate, count: int, length: int | None = None) -> Times:
        units = self._units(candidate, count, length or self.length)
        return Times.of(units, self.chosen.objective, candidate.layout.devices)

    def _units(self, candidate: Candidate, count: int, length: int) -> list[Unit]:
        """Returns the results of a candidate; decoding by models does not use up the search's time.

        Models decode some hundred tokens per second, which would leave no time to try sizes.
        """
        if not candidate.decoded:
            return self.simulator.units(candidate, count, length)
        began = monotonic()
        try:
            return self.simulator.units(candidate, count, length)
        finally:
            took = monotonic() - began
            self._decoding_s += took
            self.extend(took)

    def ranked(self, candidates: Sequence[Candidate], count: int) -> list[Candidate]:
        return sorted(candidates, key=lambda c: self.times(c, count).mean)

    def extend(self, seconds: float) -> None:
        """Adds to the budget, for work that is not part of the search."""
        self._ends += seconds
        self._tuned_by += seconds

    def _decoded_for(self, share: float = 1.0) -> bool:
        """Returns whether models have decoded for longer than this share of their time limit."""
        return self._decoding_s > share * _DECODING * self.chosen.budget_s

    @property
    def out_of_time(self) -> bool:
        return monotonic() > self._ends

    def _in_layouts(self, family: Family) -> dict[str, tuple[float, Candidate]]:
        """Tries a preset as it is in every layout that fits; returns key -> (time, candidate)."""
        batch, context = self.chosen.batch[0], self.chosen.context[0]
        tried: dict[str, tuple[float, Candidate]] = {}
        reasons: list[str] = []
        if family.decoded and self._decoded_for(_LOOKING):
            self.complete = False
            self.left_out[family.name] = _NO_TIME
            return tried
        for layout in self._layouts(family):
            if self.out_of_time and family.name != PLAIN:
                self.complete = False
                reasons.append(_NO_TIME)
                break
            try:
                made = family.candidate(self.machine, layout, batch=batch, context=context)
                self._try(made, tried)
            except (DoesNotFit, UserError) as error:
                reasons.append(str(error))
        if not tried:
            self.left_out[family.name] = reasons[0] if reasons else "it fits no layout"
        return tried

    def _tune(self, tried: dict[str, tuple[float, Candidate]]) -> None:
        """Adds sizes in the best layout, one key after the other, each from the best so far."""
        keys = sized(_fastest(tried)[0])
        variants = next(keys, None)
        while variants is not None:
            for made in variants[1]:
                if monotonic() > self._tuned_by:
                    self.complete = False
                    return
                try:
                    self._try(made, tried)
                except (UserError, ValueError):
                    continue  # these sizes do not fit together
            try:
                variants = keys.send(_fastest(tried)[0])
            except StopIteration:
                return

    def _entering(self, tried: Mapping[str, tuple[float, Candidate]]) -> list[Candidate]:
        """Returns the best sizes of a preset; for chains also the length from the formula."""
        kept = _fastest(tried)[:_PER_FAMILY]
        lengths = [c.config["policy"].get("gamma") for c in kept]
        if self.chain_length and type(lengths[0]) is int and self.chain_length not in lengths:
            kept.append(with_size(kept[0], "gamma", self.chain_length))
        return kept

    def _layouts(self, family: Family) -> list[Layout]:
        """Returns layouts on all devices; the draft gets its own if it works beside the target."""
        shape: Mapping[str, Any] = {"staged": family.staged, "copies": family.copies}
        own = self._drafts_beside(family)
        found = layouts(self.machine.devices - family.others, own_draft=own, **shape)
        return [replace(layout, others=family.others) for layout in found]

    def _drafts_beside(self, family: Family) -> bool:
        """Simulates briefly, on any layout, whether drafting overlaps with target work."""
        if family.free:
            return True
        batch, context = self.chosen.batch[0], self.chosen.context[0]
        shape: Mapping[str, Any] = {"staged": family.staged, "copies": family.copies}
        for layout in layouts(self.machine.devices, own_draft=False, **shape):
            try:
                made = family.candidate(self.machine, layout, batch=batch, context=context)
                # Models decode slowly, so this computes the results that the first round reuses.
                count = _FIRST[0] if family.decoded else 1
                units = self._units(made, count, min(_FIRST[1], self.length))
            except (DoesNotFit, UserError):
                continue
            drafting = sum(unit.draft_s for unit in units)
            if drafting and sum(unit.hidden_s for unit in units) > _BESIDE * drafting:
                return True
        return False

    def _try(self, made: Candidate, tried: dict[str, tuple[float, Candidate]]) -> None:
        count, length = _FIRST
        tried[made.key] = (self.times(made, count, min(length, self.length)).mean, made)

    def _halved(self, entered: Sequence[Candidate]) -> list[Candidate]:
        left = list(entered)
        for prompts, kept in _ROUNDS:
            count = self.simulator.num_prompts if prompts is None else prompts
            self.report(f"{len(left)} candidates on {count} prompts", len(left))
            stay: list[Candidate] = []
            for candidate in left:
                if self._has_time(candidate, stay, kept):
                    self.times(candidate, count)
                    stay.append(candidate)
                else:
                    self.complete = False
                self.report(candidate.told(), None)
            left = self._survivors(stay, count, kept) if stay else []
        return left

    def _has_time(self, candidate: Candidate, stay: Sequence[Candidate], kept: int) -> bool:
        """Returns whether a round that has evaluated ``stay`` has time for another candidate."""
        if candidate.decoded:
            return not self._decoded_for() or sum(c.decoded for c in stay) < _SURE
        return not self.out_of_time or len(stay) < kept // 2

    def _survivors(self, left: Sequence[Candidate], count: int, kept: int) -> list[Candidate]:
        """Keeps the best; of those that are worse with 97.5 % certainty, one of each preset."""
        ordered = self.ranked(left, count)
        best = self.times(ordered[0], count)
        num = effective(len(best.above), self.requests, self.drawn)
        first = best.resampled(num)
        names: set[str] = set()
        firsts, others = [], []
        for candidate in ordered:
            ratio = self.times(candidate, count).resampled(num) / first
            if candidate.name not in names:
                firsts.append(candidate)
            elif interval(ratio)[0] <= 1.0:
                others.append(candidate)
            names.add(candidate.name)
        room = max(kept - len(firsts), kept // 2)
        return [*firsts[: kept - min(room, len(others))], *others[:room]]


def _time(pair: tuple[float, Candidate]) -> float:
    return pair[0]


def _fastest(tried: Mapping[str, tuple[float, Candidate]]) -> list[Candidate]:
    return [made for _, made in sorted(tried.values(), key=_time)]


def _fastest_time(tried: Mapping[str, tuple[float, Candidate]]) -> float:
    return min(tried.values(), key=_time)[0]
