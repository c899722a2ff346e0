"""Simulates what the time of a plan depends on, and what would change its first choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.planning.acceptance import Acceptance
from specdec.planning.candidates import Candidate, rescaled
from specdec.planning.search import Times
from specdec.planning.simulate import Simulator

_CUT = 0.9
_PROMPTS = 6
_FINALISTS = 3  # presets that are simulated again
_ODDS = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)
_LINKS = (0.1, 0.3, 3.0, 10.0, 30.0)
HIDDEN = 0.02
"""A kind of work is called hidden if the time depends on it by less than this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The fastest candidate under one changed input.

    Attributes:
        what: "acceptance" or "link".
        value: hit rate of the first candidate, or factor of the transfers' time.
        told, name: the fastest candidate with its sizes, and its preset alone.
        seconds: its time per token.
    """

    what: str
    value: float
    told: str
    name: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def shares(times: Callable[[Candidate, int], Times], winner: Candidate) -> dict[str, float]:
    """Returns kind of work -> share of the time per token that depends on it.

    Each is from a simulation at 90 % of the kind's cost: (t - t') / (0.1 t). Work that other work
    hides has 0; the shares sum to 1 if nothing overlaps.
    """
    whole = times(winner, _PROMPTS).mean
    found = {}
    for kind in winner.config["clock"]["costs"]:
        less = times(rescaled(winner, {kind: _CUT}), _PROMPTS).mean
        found[kind] = (whole - less) / (whole * (1.0 - _CUT))
    return found


def changes(
    acceptance: Acceptance,
    finalists: Sequence[Candidate],
    *,
    times: Callable[[Candidate, int], Times],
    objective: str,
    length: int,
    path: Path | None,
    report: Callable[[str, int | None], None],
) -> list[Change]:
    """Returns the fastest candidate under each changed acceptance and transfer time.

    ``finalists`` are of different presets, plain decoding last. ``times`` returns times under the
    plan's own acceptance.
    """
    kept = [*finalists[:_FINALISTS], finalists[-1]]
    prompts = _PROMPTS * int(kept[0].config["batch_size"])
    found = []
    for odds in _ODDS:
        try:
            other = acceptance.shifted(odds)
        except UserError:
            break  # a trace has no ranks to change
        simulator = Simulator(other.pair(), path, of=f"odds{odds:+g}", prompts=prompts)

        def shifted(candidate: Candidate, count: int, of: Simulator = simulator) -> Times:
            units = of.units(candidate, count, length)
            return Times.of(units, objective, candidate.layout.devices)

        found.append(_fastest("acceptance", other.hit_rate(), kept, shifted))
        report("sensitivity", None)
    if any("transfer" in c.config["clock"]["costs"] for c in kept):
        for factor in _LINKS:
            slower = [rescaled(candidate, {"transfer": factor}) for candidate in kept]
            found.append(_fastest("link", factor, slower, times))
            report("sensitivity", None)
    return found


def _fastest(
    what: str,
    value: float,
    candidates: Sequence[Candidate],
    times: Callable[[Candidate, int], Times],
) -> Change:
    seconds = [times(candidate, _PROMPTS).mean for candidate in candidates]
    at = min(range(len(seconds)), key=seconds.__getitem__)
    best = candidates[at]
    return Change(what=what, value=value, told=best.told(), name=best.name, seconds=seconds[at])


def sentences_of_changes(found: Sequence[Change], name: str, hit_rate: float) -> list[str]:
    """Says for each input and direction at which nearest value another preset is first."""
    told = []
    for what, here in (("acceptance", hit_rate), ("link", 1.0)):
        of_kind = [change for change in found if change.what == what]
        if not of_kind:
            continue
        others = []
        for side in (
            sorted((c for c in of_kind if c.value < here), key=lambda c: -c.value),
            sorted((c for c in of_kind if c.value > here), key=lambda c: c.value),
        ):
            other = next((c for c in side if c.name != name), None)
            if other is not None:
                others.append(f"{other.told} is first {_at(other, side, here)}")
        values = [change.value for change in of_kind]
        span = _span(what, min(values), max(values))
        if others:
            told.append(f"{_WHAT[what]}: {'; '.join(others)} (tried {span})")
        else:
            told.append(f"{_WHAT[what]}: {name} stays first from {span}")
    return told


_WHAT: Mapping[str, str] = {"acceptance": "hit rate", "link": "transfers"}


def _at(change: Change, side: Sequence[Change], here: float) -> str:
    before = side[: side.index(change)]
    nearest = before[-1].value if before else here
    if change.what == "acceptance":
        return f"at {change.value:.2f} (not at {nearest:.2f})"
    return f"at {change.value:g} times their time (not at {nearest:g})"


def _span(what: str, low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}" if what == "acceptance" else f"{low:g} to {high:g} times"


def sentence_of_shares(found: Mapping[str, float], hidden: float | None) -> str:
    """Says which work the time per token depends on, largest share first."""
    named = {
        **{"stage": "the target's passes", "draft": "drafting", "transfer": "transfers"},
        **{"prune": "pruning", "head": "the output head", "middle": "the middle model"},
    }
    parts = [
        f"{100 * share:.0f} % {named.get(kind, kind)}"
        for kind, share in sorted(found.items(), key=lambda item: -item[1])
        if share >= HIDDEN
    ]
    text = f"its time per token follows {', '.join(parts)}"
    if "draft" in found and found["draft"] < HIDDEN and hidden is not None and hidden > 0.5:
        text += f"; {100 * hidden:.0f} % of the drafting is hidden behind the target"
    return text
