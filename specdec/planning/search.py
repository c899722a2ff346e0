"""Plan search: short simulations choose device layouts and policy sizes, then successive halving.

Each later round runs fewer candidates on more prompts. Intervals of ratios of two candidates' times
are bootstrapped over prompts, and wider if acceptance comes from few requests (``effective``).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf
from time import monotonic

from specdec.errors import UserError
from specdec.planning.candidates import (
    PLAIN,
    SIZES,
    Candidate,
    Simulator,
    Times,
    Unit,
    effective,
    interval,
)
from specdec.planning.machines import DoesNotFit, Layout, Machine, layouts
from specdec.planning.options import PlanOptions
from specdec.runs.progress import Progress

_FIRST = (3, 48)  # prompts and tokens of the first round
_ROUNDS = ((8, 18), (None, 9))  # prompts (None: all), candidates that are kept
_BESIDE = 0.2  # from this share of drafting during target work, the draft needs its own device
_TUNING, _LOOKING = 0.6, 0.5  # shares of the time for sizes, and for presets that models decode
_HOPELESS = 2.5  # sizes of a preset are not tried if it takes this many times the best time
_PER_PRESET = 3  # candidates of a preset that enter the halving
_SIMULATING, _DECODING = 0.3, 0.4  # shares of what measuring left; the rest is for trials
_LEAST = 0.2  # share of the budget that a search has however long measuring took
_SURE = 3  # candidates of either kind that a round evaluates even without time
NO_TIME = "the budget was spent before it was tried"

_Tried = dict[str, tuple[float, Candidate]]  # key of a candidate -> its time in the first round


@dataclass(slots=True)
class Search:
    machine: Machine
    simulator: Simulator
    chosen: PlanOptions
    requests: float  # units (batches) that acceptance was fitted to; see ``effective``
    length: int  # tokens per prompt
    progress: Progress
    left_out: dict[str, str] = field(default_factory=dict)  # preset -> why it is not simulated
    unknown: list[str] = field(default_factory=list)  # presets that need models
    notes: list[str] = field(default_factory=list)
    complete: bool = True
    # Seconds of simulations (False) and of decoding by models (True). Models decode some hundred
    # tokens per second, which would leave no time to try sizes.
    spent: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    measured_s: float = 0.0  # time spent before the search
    until: float = inf  # value of ``monotonic`` at which trials end
    _tried: dict[str, _Tried] = field(default_factory=dict)

    def run(self, presets: Sequence[Candidate]) -> list[Candidate]:
        """Searches among presets; returns the candidates of the last round and plain decoding."""
        self.progress.phase("layouts", len(presets))
        tried = self._tried
        for preset in presets:
            if found := self._in_layouts(preset):
                tried[preset.name] = found
            self.progress.advance(detail=preset.name)
        if PLAIN not in tried:
            raise UserError(
                f"plain decoding does not fit: {self.left_out.get(PLAIN, 'no layout')}; give more"
                " devices, or a machine that holds the target"
            )
        plain = _fastest(tried[PLAIN])[0]
        order = sorted({*tried} - {PLAIN}, key=lambda name: _best_s(tried[name]))
        best = min((_best_s(tried[name]) for name in order), default=0.0)
        self.progress.phase("sizes", len(order))
        for name in order:
            hopeful = _best_s(tried[name]) <= _HOPELESS * best
            decoded = _fastest(tried[name])[0].decoded
            if hopeful and not decoded:
                self._tune(tried[name])
                best = min(best, _best_s(tried[name]))
            elif decoded and not hopeful:
                self.left_out[name] = f"more than {_HOPELESS} times slower than the best preset"
                del tried[name]
            self.progress.advance(detail=name)
        groups = [_fastest(tried[name])[:_PER_PRESET] for name in order if name in tried]
        # The best of every preset comes first, in case there is no time for all.
        left = [made for nth in zip_longest(*groups) for made in nth if made is not None]
        for prompts, kept in _ROUNDS:
            left = self._round(left, prompts or self.simulator.num_prompts, kept)
        return [*left, plain]

    def so_far(self) -> str:
        """Returns a line with the speed-ups found so far, for a search that is interrupted."""
        best = {name: _best_s(of) for name, of in self._tried.items()}
        ranked = sorted(best, key=lambda name: best[name])
        gains = (f"{name} {best[PLAIN] / best[name]:.2f}x" for name in ranked if PLAIN in best)
        return f"gains so far, on {_FIRST[0]} prompts: {', '.join(gains) or 'none yet'}"

    def times(self, candidate: Candidate, count: int, length: int | None = None) -> Times:
        units = self.units(candidate, count, length)
        return Times.of(units, self.chosen.objective, candidate.layout.devices)

    def units(self, candidate: Candidate, count: int, length: int | None = None) -> list[Unit]:
        began = monotonic()
        try:
            return self.simulator.units(candidate, count, length or self.length)
        finally:
            self.spent[candidate.decoded] += monotonic() - began

    def ranked(self, candidates: Sequence[Candidate], count: int) -> list[Candidate]:
        return sorted(candidates, key=lambda c: self.times(c, count).mean)

    def has_time(self, *, decoded: bool = False, share: float = 1.0) -> bool:
        budget = self.chosen.budget_s
        limit = share * max(_LEAST * budget, budget - self.measured_s)
        if self.until < inf:  # models share the budget
            limit *= _DECODING if decoded else _SIMULATING
        if self.spent[decoded] <= limit:
            return True
        self.complete = False
        return False

    def _in_layouts(self, preset: Candidate) -> _Tried:
        tried: _Tried = {}
        reasons = []
        others = max(preset.free - 1, 0)  # devices of models other than target and draft
        own_draft = preset.free > 0 or self._drafts_beside(preset)
        share = _LOOKING if preset.decoded else 1.0
        for layout in self._layouts(preset, self.machine.devices - others, own_draft):
            if preset.name != PLAIN and not self.has_time(decoded=preset.decoded, share=share):
                reasons.append(NO_TIME)
                break
            try:
                self._try(self._on(preset, replace(layout, others=others)), tried)
            except (DoesNotFit, UserError) as error:
                reasons.append(str(error))
        if not tried:
            self.left_out[preset.name] = reasons[0] if reasons else "it fits no layout"
        return tried

    def _layouts(self, preset: Candidate, devices: int, own_draft: bool) -> list[Layout]:
        return layouts(devices, own_draft=own_draft, staged=preset.staged, copies=preset.copies)

    def _on(self, preset: Candidate, layout: Layout) -> Candidate:
        batch, context = self.chosen.batch[0], self.chosen.context[0]
        return preset.on(self.machine, layout, batch=batch, context=context)

    def _drafts_beside(self, preset: Candidate) -> bool:
        """Returns whether over 20 % of the drafting overlaps target work in a short simulation."""
        for layout in self._layouts(preset, self.machine.devices, False):
            with suppress(DoesNotFit, UserError):
                # Models decode slowly, so this computes the results that the first round reuses.
                count = _FIRST[0] if preset.decoded else 1
                units = self.units(self._on(preset, layout), count, min(_FIRST[1], self.length))
                drafting = sum(unit.draft_s for unit in units)
                if sum(unit.hidden_s for unit in units) > _BESIDE * drafting > 0.0:
                    return True
        return False

    def _try(self, made: Candidate, tried: _Tried) -> None:
        count, length = _FIRST
        tried[made.key] = (self.times(made, count, min(length, self.length)).mean, made)

    def _tune(self, tried: _Tried) -> None:
        """Simulates other values of each policy key in ``SIZES``, key by key; adds to ``tried``."""
        for key, values in SIZES.items():
            best = _fastest(tried)[0]
            current = best.config["policy"].get(key)
            if type(current) not in (int, float, list) and current not in ("auto", "ratio"):
                continue
            for value in values:
                if value == current:
                    continue
                if not self.has_time(share=_TUNING):
                    return
                with suppress(UserError, ValueError):  # sizes that do not fit together
                    self._try(best.with_size(key, value), tried)

    def _round(self, left: Sequence[Candidate], count: int, kept: int) -> list[Candidate]:
        """Runs candidates on ``count`` prompts; returns each preset's best and close others."""
        self.progress.phase(f"{len(left)} candidates on {count} prompts", len(left))
        stay: list[Candidate] = []
        for candidate in left:
            alike = sum(c.decoded == candidate.decoded for c in stay)
            if alike < _SURE or self.has_time(decoded=candidate.decoded):
                self.times(candidate, count)
                stay.append(candidate)
            self.progress.advance(detail=str(candidate))
        if not stay:
            return []
        ordered = self.ranked(stay, count)
        best = self.times(ordered[0], count)
        num = effective(len(best.above), self.requests)
        first = best.resampled(num)
        firsts: dict[str, Candidate] = {}
        others = []
        for candidate in ordered:
            ratio = self.times(candidate, count).resampled(num) / first
            if firsts.setdefault(candidate.name, candidate) is not candidate:
                others += [candidate] if interval(ratio)[0] <= 1.0 else []
        room = max(kept - len(firsts), kept // 2)
        return [*list(firsts.values())[: kept - min(room, len(others))], *others[:room]]


def _fastest(tried: Mapping[str, tuple[float, Candidate]]) -> list[Candidate]:
    return [made for _, made in sorted(tried.values(), key=lambda pair: pair[0])]


def _best_s(tried: Mapping[str, tuple[float, Candidate]]) -> float:
    return min(seconds for seconds, _ in tried.values())
