"""Sentences for designers, made from the figures of ``open/asynchronous``.

A method *beats* another in a case if the whole 95 % interval of the ratio of their speeds, over
prompts, is above 1; the case is *open* if the interval contains 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from experiments.open.asynchronous_cases import Case, Speed, Speeds
from experiments.reproduce.findings import surely
from experiments.reproduce.lab import speed_ratio

_AXES = {"link_ms": "a link of {:g} ms", "batch": "a batch of {:g}"}


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast one method is as another, with its interval."""

    value: float
    low: float | None
    high: float | None

    @property
    def beats(self) -> bool | None:
        """Whether the first is surely faster; None if the interval contains 1."""
        return surely(self.low, self.high)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


def sentences(config: Mapping[str, Any], speeds: Speeds) -> list[str]:
    """One sentence per duel, and per layout who leads and where drafting beside the target pays."""
    found = [duel(config, speeds, *spec) for spec in config["duels"]]
    for layout in config["layouts"]:
        found.append(leaders(config, speeds, layout))
        found += [along(config, speeds, layout, axis) for axis in _AXES]
    return [text for text in found if text]


def duel(
    config: Mapping[str, Any],
    speeds: Speeds,
    first: str,
    second: str,
    name: str,
    other: str,
    layout: str,
) -> str:
    """Where on the grid of ratios and acceptances the first method beats the second."""
    grid = {
        case: Ratio(*speed_ratio(methods[first].run, methods[second].run))
        for case, methods in _grid(config, speeds, layout).items()
        if first in methods and second in methods
    }
    if not grid:
        return ""
    parts = []
    by_ratio = sorted(grid, key=lambda case: (case.ratio, case.acceptance))
    phrases = [
        (ratio, _where({case.acceptance or 0.0: grid[case].beats for case in of_ratio}))
        for ratio, of_ratio in groupby(by_ratio, key=lambda case: case.ratio)
    ]
    for phrase, group in groupby(phrases, key=lambda entry: entry[1]):
        ratios = [ratio for ratio, _ in group]
        parts.append(f"with {_span(ratios)} {phrase}")
    least, most = (pick(grid.values(), key=lambda r: r.value) for pick in (min, max))
    title = config["layouts"][layout]["title"]
    return (
        f"{name.capitalize()} ({first}) beats {other} ({second}), {title}: with t_target/t_draft"
        f" of {'; '.join(parts).removeprefix('with ')}. It is {least} to {most} as fast."
    )


def leaders(config: Mapping[str, Any], speeds: Speeds, layout: str) -> str:
    """Which methods have the highest speed-up, and the highest per device, in how many cases."""
    grid = _grid(config, speeds, layout)
    texts = []
    for what, figure in (("fastest", "value"), ("most per device", "per_device")):
        key = attrgetter(figure)
        wins: dict[str, list[Case]] = {}
        for case, methods in grid.items():
            wins.setdefault(max(methods, key=lambda name: key(methods[name])), []).append(case)
        ranked = sorted(wins.items(), key=lambda entry: -len(entry[1]))
        counts = (
            f"{name} in {len(won)} of {len(grid)} cases"
            f" (t_target/t_draft {_span({c.ratio for c in won})},"
            f" acceptance {_span({c.acceptance for c in won})})"
            for name, won in ranked
        )
        texts.append(f"{what}: {', '.join(counts)}")
    return f"With {config['layouts'][layout]['title']}, {'; '.join(texts)}."


def along(config: Mapping[str, Any], speeds: Speeds, layout: str, axis: str) -> str:
    """The best asynchronous method over the best serial one at each value of an axis."""
    base = config["base"]
    others = {key: value for key, value in base.items() if key != axis}
    points = {
        getattr(case, axis): methods
        for case, methods in speeds.items()
        if case.layout == layout
        and all(getattr(case, key) == value for key, value in others.items())
    }
    if len(points) < 2:
        return ""
    parts = []
    for value in sorted(points):
        methods = points[value]
        serial, beside = (
            max(names, key=lambda name: methods[name].value) for names in _kinds(config, methods)
        )
        ratio = Ratio(*speed_ratio(methods[beside].run, methods[serial].run))
        parts.append(f"at {_AXES[axis].format(value)} {beside} is {ratio} as fast as {serial}")
    title = config["layouts"][layout]["title"]
    return (
        f"Best method that drafts beside the target over the best serial one, {title},"
        f" t_target/t_draft {base['ratio']:g}, acceptance {base['acceptance']:g}:"
        f" {'; '.join(parts)}."
    )


def _kinds(config: Mapping[str, Any], methods: Mapping[str, Speed]) -> tuple[list[str], list[str]]:
    """Names of the serial methods, which need no further device, and of the others."""
    extra = {name: config["methods"][name]["extra"] for name in methods}
    return [n for n in methods if not extra[n]], [n for n in methods if extra[n]]


def _grid(
    config: Mapping[str, Any], speeds: Speeds, layout: str
) -> dict[Case, Mapping[str, Speed]]:
    base = config["base"]
    return {
        case: methods
        for case, methods in speeds.items()
        if (case.layout, case.link_ms, case.batch) == (layout, base["link_ms"], base["batch"])
    }


def _where(beats: Mapping[float, bool | None]) -> str:
    """The acceptances at which a duel is won, lost and open, in words."""
    won = [a for a, outcome in beats.items() if outcome]
    if len(won) == len(beats):
        return "at every acceptance"
    lost = [a for a, outcome in beats.items() if outcome is False]
    still = [a for a, outcome in beats.items() if outcome is None]
    head = f"at acceptance {_span(won)}" if won else "at no acceptance"
    rest = [f"{word} at {_span(v)}" for word, v in (("slower", lost), ("open", still)) if v]
    return f"{head} ({', '.join(rest)})"


def _span(values: Iterable[float | None]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(v for v in values if v is not None))
