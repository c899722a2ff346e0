"""The cases of ``open/asynchronous``, the settings of methods in each, and a method's speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from experiments.open.time_laws import ssd_time
from experiments.reproduce.lab import Outcome
from specdec.config.options import options, own_values
from specdec.metrics.speedup import expected_accepted
from strategies.ssd import fan_outs

MAX_CHAIN = 12
ASSUMED = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point of the comparison.

    Attributes:
        ratio: target pass over draft pass.
        acceptance: chance of a draft token; None: ``hits`` has its own.
    """

    layout: str
    ratio: float
    acceptance: float | None
    hits: str
    link_ms: float
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A method's speed-up over the reference in one case.

    Attributes:
        value: times as fast; low, high: its 95 % interval over prompts.
        devices: devices that the method uses, as a multiple of the reference's.
    """

    value: float
    low: float | None
    high: float | None
    devices: float
    loops: float | None
    run: Outcome

    @property
    def per_device(self) -> float:
        return self.value / self.devices


Speeds = Mapping[Case, Mapping[str, Speed]]


def cases(config: Mapping[str, Any], *, quick: bool) -> list[Case]:
    """The grid over ratio and acceptance, and the further values of each axis at the base."""
    size, base = ("quick" if quick else "full"), config["base"]
    found = []
    for layout in config["layouts"]:
        middle = Case(layout=layout, hits="synthetic", **base)
        grid = config["grid"][size]
        found += [middle]
        found += [
            replace(middle, ratio=ratio, acceptance=acceptance)
            for ratio in grid["ratio"]
            for acceptance in grid["acceptance"]
        ]
        for axis, values in config["axes"][size].items():
            found += [replace(middle, **{axis: value}) for value in values]
    return list(dict.fromkeys(found))


def numbers(law: Mapping[str, Any], case: Case, stages: int) -> dict[str, Any]:
    """The settings that follow from the case, by their names in ``words``.

    Lengths of chains are the best ones by the methods' laws; hits that have no stated acceptance
    count as ``ASSUMED``.
    """
    alpha = ASSUMED if case.acceptance is None else case.acceptance
    tail = [rank ** -float(law["decay"]) for rank in range(2, 65)]
    ranks = [alpha, *((1 - alpha) * (1 - law["miss"]) * t / sum(tail) for t in tail)]
    preset = own_values(options("policy")["ssd"])
    shape = {key: preset[key] for key in ("outcomes", "acceptance", "power")}

    def serial(gamma: int) -> float:
        return (1 + gamma / case.ratio) / (1 + expected_accepted(alpha, gamma))

    def enumerated(gamma: int) -> float:
        fan = fan_outs(gamma=gamma, **shape)
        return ssd_time(ranks=ranks, fan_outs=fan, target=case.ratio, draft=1.0)

    lengths = range(1, MAX_CHAIN + 1)
    per_step = max(1, int(case.ratio / stages + 1e-9))
    return {
        "stages": stages,
        "per_step": per_step,
        "chain": min(lengths, key=serial),
        "enumerated": min(lengths, key=enumerated),
        "levels": min(6, per_step),
        "block": ceil(case.ratio / 3),
        "middle": _top1(law, (1.0 + alpha) / 2),
    }


def hits_of(law: Mapping[str, Any], acceptance: float) -> list[str]:
    """Overrides of ``model=synthetic`` with this mean acceptance."""
    classes = len(law["weights"])
    shape = {"weights": law["weights"], **{k: [law[k]] * classes for k in ("decay", "miss")}}
    return [
        *("model=synthetic", "ignore_eos=true", f"model.top1={_top1(law, acceptance)}"),
        *(f"model.{key}={values}".replace(" ", "") for key, values in shape.items()),
    ]


def _top1(law: Mapping[str, Any], acceptance: float) -> str:
    """``top1`` of the law's classes for this mean acceptance, as a word of an override."""
    values = [round(1.0 - wrong * (1.0 - acceptance), 6) for wrong in law["wrong"]]
    return str(values).replace(" ", "")
