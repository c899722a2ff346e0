"""Prices a cluster's work in a layout, from a latency profile or a described machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from specdec.clocks.profile import curve_at
from specdec.config.options import options, read_yaml
from specdec.config.profile_costs import with_draft
from specdec.config.profiles import load_profile
from specdec.errors import UserError
from specdec.parts.fields import Count, NotNegative, Positive, errors_of, validated
from specdec.parts.suggest import did_you_mean
from specdec.planning import roofline
from specdec.planning.layouts import Layout
from specdec.planning.options import PlanOptions

CLOCK_ERROR = 0.05
"""The relative error that is assumed for the times of a measured or given profile."""

_POINTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
"""Numbers of rows at which a described machine is priced."""


class DoesNotFit(Exception):
    """The machine does not have a layout or cannot hold the models; the message says why."""


class Machine(Protocol):
    """A cluster that prices the work of a layout.

    Attributes:
        note: origin of the times.
        error: relative error of the times.
        prices_context: whether times depend on the context.
        limit_gb: gigabytes of a device; None if unknown.
        batches: numbers of requests at a time for which times are known; None for any number.
    """

    @property
    def name(self) -> str: ...

    @property
    def note(self) -> str: ...

    @property
    def devices(self) -> int: ...

    @property
    def error(self) -> float: ...

    @property
    def prices_context(self) -> bool: ...

    @property
    def limit_gb(self) -> float | None: ...

    @property
    def batches(self) -> tuple[int, ...] | None: ...

    def costs(self, layout: Layout, batch: int, context: int) -> dict[str, Any]:
        """Returns cost curves by kind of work, as in a profile; raises ``DoesNotFit``."""
        ...

    def memory_gb(self, layout: Layout, batch: int, context: int) -> float | None:
        """Returns gigabytes on the fullest device; None if unknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A latency profile, which has the times of one stage of a target on ``stages`` devices.

    With another number of stages a stage has more or fewer layers, and its times are scaled in
    proportion. Fewer devices than the profile's are assumed not to hold the target. The curve
    ``transfer`` replaces that of the profile, unless it is None.
    """

    name: str
    profile: Mapping[str, Any]
    devices: int
    transfer: Mapping[str, Any] | None = None
    error: float = CLOCK_ERROR
    prices_context: bool = False
    batches: tuple[int, ...] | None = None

    @property
    def note(self) -> str:
        return str(self.profile.get("note", ""))

    @property
    def limit_gb(self) -> float | None:
        return None

    @property
    def priced(self) -> int:
        """The number of stages that the profile's target has."""
        return int(self.profile["stages"])

    def costs(self, layout: Layout, batch: int, context: int) -> dict[str, Any]:
        """Prices a layout; batch and context have no effect."""
        if layout.stages * layout.degree < self.priced:
            raise DoesNotFit(
                f"the target of {self.name} is on {self.priced} devices, and"
                f" {layout.stages * layout.degree} are taken not to hold it"
            )
        costs = {kind: dict(curve) for kind, curve in self.profile["costs"].items()}
        for kind, degree in (("stage", layout.degree), ("draft", layout.draft_degree)):
            curves = self.profile.get("degrees", {}).get(kind, {})
            known = sorted(int(number) for number in curves)
            if known and known[0] <= degree <= known[-1]:
                costs[kind] = curve_at(curves, degree)
            elif degree > 1:
                raise DoesNotFit(f"{self.name} has no time of a {kind} on {degree} devices")
        if "stage" in costs:
            costs["stage"] = scaled(costs["stage"], self.priced / layout.stages)
        if self.transfer is not None:
            costs["transfer"] = dict(self.transfer)
        return costs

    def memory_gb(self, layout: Layout, batch: int, context: int) -> float | None:
        return None


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The keys of a described machine; those with a default may be left out.

    Attributes:
        devices: number of devices in total, all alike.
        memory_gb_s, tflops, memory_gb: bandwidth, peak arithmetic rate for the weights' type, and
            memory of a device.
        link_ms, link_gb_s: latency and bandwidth of a transfer between two devices.
        target_gb, draft_gb: size of the weights; 0 without a draft.
        weight_bytes: bytes per parameter; 0.5 for 4 bits.
        kv_kb: kilobytes of the target's keys and values per token; 0 ignores the context.
        target_layers, draft_layers: None uses those of a published model of that size.
        graphs: whether the engine captures graphs; without them a layer costs more.
        boxes: groups of devices; tensor parallelism stays inside one of them.
        box_link_ms, box_link_gb_s: link between two boxes; None if it is as fast as inside one.
    """

    devices: Count
    memory_gb_s: Positive
    tflops: Positive
    memory_gb: Positive
    link_ms: NotNegative
    link_gb_s: Positive
    target_gb: Positive
    draft_gb: NotNegative
    weight_bytes: Positive = 2.0
    kv_kb: NotNegative = 0.0
    target_layers: Count | None = None
    draft_layers: Count | None = None
    graphs: bool = True
    boxes: Count = 1
    box_link_ms: NotNegative | None = None
    box_link_gb_s: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A described machine, priced by ``specdec.planning.roofline``.

    All transfers of a step take as long as the slowest, so a pipeline over several boxes pays for
    the link between them.
    """

    name: str
    about: Description
    devices: int
    error: float = roofline.ERROR
    batches: tuple[int, ...] | None = None
    note: str = field(
        default=f"described machine: roofline, efficiencies fitted to {roofline.SOURCE}"
    )

    @property
    def prices_context(self) -> bool:
        return self.about.kv_kb > 0

    @property
    def limit_gb(self) -> float | None:
        return self.about.memory_gb

    def costs(self, layout: Layout, batch: int, context: int) -> dict[str, Any]:
        about = self.about
        if max(layout.degree, layout.draft_degree) * about.boxes > max(self.devices, 1):
            raise DoesNotFit(
                f"a box has {self.devices // about.boxes} devices, fewer than"
                f" {max(layout.degree, layout.draft_degree)} that share a layer"
            )
        held = self.memory_gb(layout, batch, context)
        if held is not None and held > about.memory_gb:
            raise DoesNotFit(
                f"{held:.1f} GB on a device ({layout.told()}), and it has {about.memory_gb:g}"
            )
        kv = 1e3 * about.kv_kb * batch * context / layout.stages
        weights = 1e9 * about.target_gb / layout.stages
        layers = self._layers(about.target_gb, about.target_layers)
        limits: dict[str, Any] = {
            "bytes_per_s": 1e9 * about.memory_gb_s,
            "flops_per_s": 1e12 * about.tflops,
            "eager": not about.graphs,
        }
        costs = {
            "stage": _curve(
                lambda rows: roofline.pass_ms(
                    rows,
                    parameters=weights / about.weight_bytes,
                    num_bytes=weights + kv,
                    layers=-(-layers // layout.stages),
                    degree=layout.degree,
                    **limits,
                )
            )
        }
        if about.draft_gb:
            costs["draft"] = _curve(
                lambda rows: roofline.pass_ms(
                    rows,
                    parameters=1e9 * about.draft_gb / about.weight_bytes,
                    num_bytes=1e9 * about.draft_gb,
                    layers=self._layers(about.draft_gb, about.draft_layers),
                    degree=layout.draft_degree,
                    **limits,
                )
            )
        if layout.stages > 1 or layout.own_draft:
            costs["transfer"] = _curve(lambda rows: self._transfer_ms(layout, layers, rows))
        return costs

    def memory_gb(self, layout: Layout, batch: int, context: int) -> float | None:
        """Includes weights, keys and values."""
        about = self.about
        return fullest_gb(
            layout,
            target_gb=about.target_gb + 1e-6 * about.kv_kb * batch * context,
            draft_gb=about.draft_gb,
        )

    def _layers(self, size_gb: float, stated: int | None) -> int:
        return stated or roofline.layers_of(1e9 * size_gb / self.about.weight_bytes)

    def _transfer_ms(self, layout: Layout, layers: int, rows: int) -> float:
        about = self.about
        crosses = about.boxes > 1 and layout.devices > self.devices // about.boxes
        slow_ms = about.link_ms if about.box_link_ms is None else about.box_link_ms
        slow_gb_s = about.link_gb_s if about.box_link_gb_s is None else about.box_link_gb_s
        latency, speed = (slow_ms, slow_gb_s) if crosses else (about.link_ms, about.link_gb_s)
        width = roofline.hidden_of(1e9 * about.target_gb / about.weight_bytes, layers)
        return latency + rows * width * 2.0 / (speed * 1e6)


def fullest_gb(layout: Layout, *, target_gb: float, draft_gb: float) -> float:
    """Returns gigabytes on the fullest device; ``target_gb`` and ``draft_gb`` are totals."""
    target = target_gb / (layout.stages * layout.degree)
    draft = draft_gb / layout.draft_degree
    return max(target, draft) if layout.own_draft else target + draft


def machine_of(
    chosen: PlanOptions, extra: Sequence[Path] = (), *, draft_name: str | None = None
) -> Machine:
    """Returns the machine that ``profile`` names, which is a latency profile or a description.

    The profile must have the time of the draft ``draft_name``, unless that is None.
    """
    if chosen.profile is None:
        raise UserError(
            "a plan needs the times of a machine: give profile=NAME (specdec list profiles), the"
            " path of a profile or of a described machine, or profile=measured"
        )
    path = Path(chosen.profile).expanduser()
    if chosen.profile not in options("profile", extra) and path.is_file():
        loaded = read_yaml(path, f"profile={chosen.profile} is not readable YAML", resolve=True)
        if isinstance(loaded, dict) and "costs" not in loaded:
            return _described(chosen, path, loaded)
    profile = load_profile(chosen.profile, extra, key="profile")
    profile = with_draft({**profile, "profile": chosen.profile}, draft_name)
    if "stages" not in profile:
        raise UserError(
            f"profile={chosen.profile} does not say of how many stages its target is, so it cannot"
            " be split otherwise: add `stages: NUMBER` to a copy of it"
        )
    priced = int(profile["stages"])
    transfer = None
    if chosen.link_ms is not None:
        transfer = {"tokens": [1], "ms": [chosen.link_ms]}
    if chosen.link_gb_s is not None:
        raise UserError(
            f"link_gb_s={chosen.link_gb_s:g} is for a described machine, whose hidden states have a"
            f" size; profile={chosen.profile} has times: leave it out, or use link_ms"
        )
    return Profiled(
        name=path.stem if path.is_file() else chosen.profile,
        profile=profile,
        devices=chosen.devices or priced + 1,
        transfer=transfer,
    )


def _described(chosen: PlanOptions, path: Path, loaded: Mapping[str, Any]) -> Described:
    known = [item.name for item in fields(Description)]
    for key in loaded:
        if key not in known:
            raise UserError(
                f"profile={chosen.profile}: {key} is no key of a described machine:"
                f" {did_you_mean(str(key), known)}"
            )
    values = {**loaded}
    own = {"devices": chosen.devices, "link_ms": chosen.link_ms, "link_gb_s": chosen.link_gb_s}
    values |= {key: value for key, value in own.items() if value is not None}
    needed = [item.name for item in fields(Description) if item.default is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise UserError(
            f"profile={chosen.profile} describes a machine without {', '.join(missing)}: add them"
            " (docs/plan.md)"
        )
    for error in errors_of(Description, values):
        raise UserError(f"profile={chosen.profile}: {error}")
    about = Description(**values)
    if about.devices % about.boxes:
        raise UserError(
            f"profile={chosen.profile}: {about.devices} devices are not {about.boxes} equal boxes"
        )
    return Described(name=path.stem, about=about, devices=about.devices)


def scaled(curve: Mapping[str, Any], factor: float) -> dict[str, Any]:
    result = {**curve, "ms": [ms * factor for ms in curve["ms"]]}
    if "block_ms" in curve:
        result["block_ms"] = curve["block_ms"] * factor
    return result


def _curve(ms: Any) -> dict[str, Any]:
    return {"tokens": list(_POINTS), "ms": [round(ms(rows), 6) for rows in _POINTS]}
