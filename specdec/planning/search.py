"""The search: layouts and sizes by short simulations, then successive halving on prompts.

Candidates are compared on the same prompts. The uncertainty of a ratio is estimated by drawing
prompts anew (``Times.resampled``), as many as there is information (``effective``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from time import monotonic

from specdec.errors import UserError
from specdec.planning.candidates import (
    PLAIN,
    SIZES,
    Candidate,
    Family,
    Simulator,
    Times,
    Unit,
    effective,
    interval,
)
from specdec.planning.machines import DoesNotFit, Layout, Machine, layouts
from specdec.planning.options import PlanOptions

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

_Tried = dict[str, tuple[float, Candidate]]  # key of a candidate -> its time in the first round


@dataclass(slots=True)
class Search:
    """A search over presets, layouts and sizes.

    Attributes:
        requests: number of units that the acceptance was fitted to; see ``effective``.
        length: tokens per prompt.
        chain_length: draft tokens of the best chain by formula, which are tried too.
        report: called with the label and number of steps of a phase, or with a finished step.
        left_out: preset -> why it is not simulated; ``unknown`` are those that need models.
    """

    machine: Machine
    simulator: Simulator
    chosen: PlanOptions
    requests: float
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
        tried: dict[str, _Tried] = {}
        for family in families:
            if found := self._in_layouts(family):
                tried[family.name] = found
            self.report(family.name, None)
        if PLAIN not in tried:
            raise UserError(
                f"plain decoding does not fit: {self.left_out.get(PLAIN, 'no layout')}; give more"
                " devices, or a machine that holds the target"
            )
        plain = _fastest(tried.pop(PLAIN))[0]
        order = sorted(tried, key=lambda name: _best_s(tried[name]))
        best = min(map(_best_s, tried.values()), default=0.0)
        self.report("sizes", len(order))
        decoded = {family.name for family in families if family.decoded}
        for name in order:
            hopeful = _best_s(tried[name]) <= _HOPELESS * best
            if hopeful and name not in decoded:
                self._tune(tried[name])
                best = min(best, _best_s(tried[name]))
            elif name in decoded and not hopeful:
                self.left_out[name] = f"more than {_HOPELESS} times slower than the best preset"
                del tried[name]
            self.report(name, None)
        groups = [self._entering(tried[name]) for name in order if name in tried]
        # The best of every preset comes first, in case there is no time for all.
        entered = [made for nth in zip_longest(*groups) for made in nth if made is not None]
        return [*self._halved(entered), plain]

    def times(self, candidate: Candidate, count: int, length: int | None = None) -> Times:
        units = self.units(candidate, count, length)
        return Times.of(units, self.chosen.objective, candidate.layout.devices)

    def units(self, candidate: Candidate, count: int, length: int | None = None) -> list[Unit]:
        """Returns the results of a candidate; decoding by models does not use up the search's time.

        Models decode some hundred tokens per second, which would leave no time to try sizes.
        """
        began = monotonic()
        try:
            return self.simulator.units(candidate, count, length or self.length)
        finally:
            if candidate.decoded:
                took = monotonic() - began
                self._decoding_s += took
                self.extend(took)

    def ranked(self, candidates: Sequence[Candidate], count: int) -> list[Candidate]:
        return sorted(candidates, key=lambda c: self.times(c, count).mean)

    def extend(self, seconds: float) -> None:
        """Adds to the budget, for work that is not part of the search."""
        self._ends += seconds
        self._tuned_by += seconds

    @property
    def out_of_time(self) -> bool:
        return monotonic() > self._ends

    def _decoded_for(self, share: float = 1.0) -> bool:
        """Returns whether models have decoded for longer than this share of their time limit."""
        return self._decoding_s > share * _DECODING * self.chosen.budget_s

    def _in_layouts(self, family: Family) -> _Tried:
        """Tries a preset as it is in every layout that fits."""
        tried: _Tried = {}
        reasons: list[str] = []
        if family.decoded and self._decoded_for(_LOOKING):
            self.complete = False
            self.left_out[family.name] = _NO_TIME
            return tried
        others = max(family.free - 1, 0)  # devices of models other than target and draft
        own_draft = family.free > 0 or self._drafts_beside(family)
        for layout in self._layouts(family, self.machine.devices - others, own_draft):
            if self.out_of_time and family.name != PLAIN:
                self.complete = False
                reasons.append(_NO_TIME)
                break
            try:
                self._try(self._candidate(family, replace(layout, others=others)), tried)
            except (DoesNotFit, UserError) as error:
                reasons.append(str(error))
        if not tried:
            self.left_out[family.name] = reasons[0] if reasons else "it fits no layout"
        return tried

    def _layouts(self, family: Family, devices: int, own_draft: bool) -> list[Layout]:
        return layouts(devices, own_draft=own_draft, staged=family.staged, copies=family.copies)

    def _candidate(self, family: Family, layout: Layout) -> Candidate:
        batch, context = self.chosen.batch[0], self.chosen.context[0]
        return family.candidate(self.machine, layout, batch=batch, context=context)

    def _drafts_beside(self, family: Family) -> bool:
        """Simulates briefly, on any layout, whether drafting overlaps with target work."""
        for layout in self._layouts(family, self.machine.devices, False):
            with suppress(DoesNotFit, UserError):
                # Models decode slowly, so this computes the results that the first round reuses.
                count = _FIRST[0] if family.decoded else 1
                made = self._candidate(family, layout)
                units = self.units(made, count, min(_FIRST[1], self.length))
                drafting = sum(unit.draft_s for unit in units)
                if sum(unit.hidden_s for unit in units) > _BESIDE * drafting > 0.0:
                    return True
        return False

    def _try(self, made: Candidate, tried: _Tried) -> None:
        count, length = _FIRST
        tried[made.key] = (self.times(made, count, min(length, self.length)).mean, made)

    def _tune(self, tried: _Tried) -> None:
        """Adds sizes in the best layout, one key after the other, each from the best so far."""
        for key, values in SIZES.items():
            best = _fastest(tried)[0]
            current = best.config["policy"].get(key)
            if type(current) not in (int, float, list) and current not in ("auto", "ratio"):
                continue
            for value in values:
                if value == current:
                    continue
                if monotonic() > self._tuned_by:
                    self.complete = False
                    return
                with suppress(UserError, ValueError):  # sizes that do not fit together
                    self._try(best.with_size(key, value), tried)

    def _entering(self, tried: _Tried) -> list[Candidate]:
        """Returns the best sizes of a preset; for chains also the length from the formula."""
        kept = _fastest(tried)[:_PER_FAMILY]
        lengths = [c.config["policy"].get("gamma") for c in kept]
        if self.chain_length and type(lengths[0]) is int and self.chain_length not in lengths:
            kept.append(kept[0].with_size("gamma", self.chain_length))
        return kept

    def _halved(self, entered: Sequence[Candidate]) -> list[Candidate]:
        left = list(entered)
        for prompts, kept in _ROUNDS:
            count = prompts or self.simulator.num_prompts
            self.report(f"{len(left)} candidates on {count} prompts", len(left))
            stay: list[Candidate] = []
            for candidate in left:
                if self._has_time(candidate, stay, kept):
                    self.times(candidate, count)
                    stay.append(candidate)
                else:
                    self.complete = False
                self.report(str(candidate), None)
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
        num = effective(len(best.above), self.requests)
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


def _fastest(tried: Mapping[str, tuple[float, Candidate]]) -> list[Candidate]:
    return [made for _, made in sorted(tried.values(), key=lambda pair: pair[0])]


def _best_s(tried: Mapping[str, tuple[float, Candidate]]) -> float:
    return min(seconds for seconds, _ in tried.values())
