"""Layouts (which devices run target and draft), and machines, which give the time of each pass.

A pass of R token rows, with each layer split over d devices of a described machine, takes

    L (layer_ms + [d > 1] reduce_ms) + max(B / (d memory_share bandwidth),
                                           2 P R / (d flop_share peak)),

with L layers, P parameters and B bytes of weights, keys and values that are read. The other names
are ``Constants``; ``eager_layer_ms`` replaces ``layer_ms`` for engines without captured graphs.
The constants are fitted (``experiments/plan/roofline.py``, with the error on held-out models) to
156 published pass times: 16-bit weights of 10 models, 0.07 to 71 billion parameters, on 8 GPUs
(AnthonyHuo/An-Empirical-Study-on-Tree-based-Speculative-Decoding 0428ac25, jianc99/FastHesse,
swiss-ai/apertus-speculative-decoding, spitzblattr/spec-bench-vllm).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from math import log
from pathlib import Path
from typing import Any

from specdec.clocks.profile import curve_at
from specdec.config.options import options, read_yaml
from specdec.config.profiles import load_profile, with_draft
from specdec.errors import UserError
from specdec.parts.fields import Count, NotNegative, Positive, did_you_mean, errors_of, validated
from specdec.planning.options import PlanOptions

_DEGREES = (1, 2, 4, 8, 16)
_POINTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
"""Numbers of rows for which the time of a pass on a described machine is computed."""

_LAYERS = {0.07: 2, 0.5: 24, 1.2: 16, 3.0: 28, 8.0: 32, 13.0: 40, 33.0: 60, 70.0: 80}
"""Billions of parameters -> number of layers, of published Llama and Qwen models."""

ERROR = 0.25
"""Relative error assumed for computed pass times; 75 % of held-out times had less, median 11 %."""


class DoesNotFit(Exception):
    """The machine lacks devices, times or memory for a layout; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    stages: int = 1
    degree: int = 1  # devices that share every layer of a stage, as ``draft_degree``
    draft_degree: int = 1
    replicas: int = 1  # copies of the target
    own_draft: bool = False  # whether the draft has own devices and works beside the target
    others: int = 0  # devices of further models, one each

    @property
    def devices(self) -> int:
        target = self.stages * self.degree * self.replicas
        return target + (self.draft_degree if self.own_draft else 0) + self.others

    def __str__(self) -> str:
        words = [f"{self.stages} stages"] if self.stages > 1 else []
        words += [f"TP {self.degree}"] if self.degree > 1 else []
        words += [f"{self.replicas} copies"] if self.replicas > 1 else []
        draft = f"draft TP {self.draft_degree}" if self.draft_degree > 1 else "draft"
        text = " x ".join(words or ["1 device"]) + (f" + {draft}" if self.own_draft else "")
        return text + (f" + {self.others} more" if self.others else "")


def layouts(devices: int, *, own_draft: bool, staged: bool, copies: bool) -> list[Layout]:
    """Returns the layouts of target and draft that are tried on ``devices`` devices.

    If ``staged``, for each tensor-parallel degree d: as many stages of d devices as fit, and one
    stage of d devices; then pipelines of one device per stage on 1/2, 1/4, ... of the devices.

    Args:
        own_draft: whether the draft has devices of its own.
        staged: whether the executor has pipeline stages.
        copies: whether the executor runs copies of the target instead, on one device each.
    """
    found: dict[Layout, None] = {}
    for draft_degree in _DEGREES if own_draft and staged else (1,):
        left = devices - (draft_degree if own_draft else 0)
        if left < draft_degree:
            continue
        targets = [Layout(replicas=n) for n in range(2, left + 1)] if copies else [Layout()]
        if staged and not copies:
            for degree in (d for d in _DEGREES if d <= left):
                targets += [Layout(stages=left // degree, degree=degree), Layout(degree=degree)]
            half = left
            while half > 2:
                half //= 2
                targets.append(Layout(stages=half))
        for target in targets:
            found[replace(target, draft_degree=draft_degree, own_draft=own_draft)] = None
    return list(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    name: str
    devices: int
    note: str = ""  # origin of the times
    error: float = 0.05  # relative error of the times, assumed for measured ones
    memory_gb: float | None = None  # of a device; None if it and the models' sizes are unknown
    target_gb: float = 0.0
    draft_gb: float = 0.0
    kv_kb: float = 0.0  # kilobytes of the target's keys and values per token

    @property
    def prices_context(self) -> bool:
        """Whether times depend on the context length; measured times are for one length only."""
        return False

    def costs(self, layout: Layout, batch: int, context: int) -> dict[str, Any]:
        raise NotImplementedError

    def used_gb(self, layout: Layout, batch: int, context: int) -> float | None:
        """Returns gigabytes of weights, keys and values on the fullest device; None if unknown."""
        if self.memory_gb is None:
            return None
        target = self.target_gb + 1e-6 * self.kv_kb * batch * context
        target /= layout.stages * layout.degree
        draft = self.draft_gb / layout.draft_degree
        return max(target, draft) if layout.own_draft else target + draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled(Machine):
    """A machine with pass times from a latency profile, or measured here for each batch size.

    Stage times are scaled to the layout's number of stages. Layouts with fewer target devices than
    the profile has stages are refused, since the target is assumed not to fit on them.
    """

    stages: int  # of the target that the times are of
    by_batch: Mapping[int, Mapping[str, Any]]  # requests that share a pass -> costs
    degrees: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)  # as in a profile

    def costs(self, layout: Layout, batch: int, context: int) -> dict[str, Any]:
        used = layout.stages * layout.degree
        if used < self.stages:
            raise DoesNotFit(
                f"the target of {self.name} is on {self.stages} devices, and {used} are taken not"
                " to hold it"
            )
        nearest = min(self.by_batch, key=lambda known: abs(log(known / batch)))
        costs = dict(self.by_batch[nearest])
        for kind, degree in (("stage", layout.degree), ("draft", layout.draft_degree)):
            curves = self.degrees.get(kind, {})
            known = [*map(int, curves)] or [0]
            if min(known) <= degree <= max(known):
                costs[kind] = curve_at(curves, degree)
            elif degree > 1:
                raise DoesNotFit(f"{self.name} has no time of a {kind} on {degree} devices")
        as_measured = (layout.stages, layout.degree) == (self.stages, 1)
        if any("devices" in c for c in costs.values()) and not as_measured:
            raise DoesNotFit(
                f"the devices of {self.name} differ: {self.stages} stages, one on each, are priced"
            )
        if "stage" in costs:
            costs["stage"] = scaled(costs["stage"], self.stages / layout.stages)
        return costs


def scaled(curve: Mapping[str, Any], factor: float) -> dict[str, Any]:
    blocks = {"block_ms": curve["block_ms"] * factor} if "block_ms" in curve else {}
    return {**curve, "ms": [ms * factor for ms in curve["ms"]], **blocks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants of the formula for the time of a pass (module docstring).

    Attributes:
        memory_share, flop_share: the part of the data sheet's bandwidth and peak that is reached.
        layer_ms, eager_layer_ms: overhead per layer, with and without captured graphs.
        reduce_ms: time per layer to sum partial results over the devices that share it.
    """

    memory_share: float = 0.75
    flop_share: float = 0.5
    layer_ms: float = 0.08
    eager_layer_ms: float = 0.2
    reduce_ms: float = 0.06


CONSTANTS = Constants()


def pass_ms(
    rows: int,
    *,
    parameters: float,
    num_bytes: float,
    layers: int,
    bytes_per_s: float,
    flops_per_s: float,
    degree: int = 1,
    eager: bool = False,
    constants: Constants = CONSTANTS,
) -> float:
    """Returns the milliseconds of a pass of ``rows`` rows: overhead per layer, plus the larger of
    the times to read ``num_bytes`` and to compute on ``degree`` devices that share every layer.
    ``bytes_per_s`` and ``flops_per_s`` are the bandwidth and peak of one device's data sheet.
    """
    reading = num_bytes / (degree * constants.memory_share * bytes_per_s)
    computing = 2.0 * parameters * rows / (degree * constants.flop_share * flops_per_s)
    fixed = constants.eager_layer_ms if eager else constants.layer_ms
    fixed += constants.reduce_ms if degree > 1 else 0.0
    return fixed * layers + 1e3 * max(reading, computing)


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class Described(Machine):
    """A machine that the user describes (keys: docs/plan.md); a roofline formula gives its times.
    In a layout over several hosts (``boxes``), every transfer takes as long as one between hosts.
    """

    note: str = "described machine: roofline, efficiencies fitted to 156 published pass times"
    error: float = ERROR
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

    @property
    def prices_context(self) -> bool:
        return self.kv_kb > 0

    def costs(self, layout: Layout, batch: int, context: int) -> dict[str, Any]:
        degree, in_box = max(layout.degree, layout.draft_degree), self.devices // self.boxes
        if degree * self.boxes > self.devices:
            raise DoesNotFit(f"a box has {in_box} devices, fewer than {degree} that share a layer")
        used = self.used_gb(layout, batch, context)
        if used is not None and used > self.memory_gb:
            raise DoesNotFit(f"{used:.1f} GB on a device ({layout}), and it has {self.memory_gb:g}")
        layers = self.target_layers or self._layers(self.target_gb)
        stage_gb, kv_gb = self.target_gb / layout.stages, 1e-6 * self.kv_kb * batch * context
        per_stage = {"layers": -(-layers // layout.stages), "degree": layout.degree}
        costs = {"stage": self._passes(stage_gb, kv_gb / layout.stages, **per_stage)}
        if self.draft_gb:
            draft = {"layers": self.draft_layers or self._layers(self.draft_gb)}
            costs["draft"] = self._passes(self.draft_gb, 0.0, degree=layout.draft_degree, **draft)
        if layout.stages > 1 or layout.own_draft:
            latency, speed = self.link_ms, self.link_gb_s
            if self.boxes > 1 and layout.devices > in_box:
                latency = latency if self.box_link_ms is None else self.box_link_ms
                speed = speed if self.box_link_gb_s is None else self.box_link_gb_s
            # A layer of width E has about 12 E^2 parameters.
            width = (1e9 * self.target_gb / self.weight_bytes / (12.0 * layers)) ** 0.5
            costs["transfer"] = _curve(lambda rows: latency + rows * width * 2.0 / (speed * 1e6))
        return costs

    def _layers(self, size_gb: float) -> int:
        billions = size_gb / self.weight_bytes
        return _LAYERS[min(_LAYERS, key=lambda known: abs(known / billions - 1.0))]

    def _passes(self, size_gb: float, kv_gb: float, *, layers: int, degree: int) -> dict[str, Any]:
        return _curve(
            lambda rows: pass_ms(
                rows,
                parameters=1e9 * size_gb / self.weight_bytes,
                num_bytes=1e9 * (size_gb + kv_gb),
                layers=layers,
                bytes_per_s=1e9 * self.memory_gb_s,
                flops_per_s=1e12 * self.tflops,
                degree=degree,
                eager=not self.graphs,
            )
        )


def _curve(ms: Callable[[int], float]) -> dict[str, Any]:
    return {"tokens": list(_POINTS), "ms": [round(ms(rows), 6) for rows in _POINTS]}


def machine_of(
    chosen: PlanOptions, extra: Sequence[Path] = (), *, draft_name: str | None = None
) -> Machine:
    """Returns the machine that the option ``profile`` names: a latency profile, with the draft
    times for ``draft_name``, or a described machine.
    """
    if chosen.profile is None:
        raise UserError(
            "a plan needs the times of a machine: give profile=NAME (specdec list profiles), the"
            " path of a profile or of a described machine, or profile=measured"
        )
    path, where = Path(chosen.profile).expanduser(), f"profile={chosen.profile}"
    if chosen.profile not in options("profile", extra) and path.is_file():
        loaded = read_yaml(path, f"{where} is not readable YAML", resolve=True)
        if isinstance(loaded, dict) and "costs" not in loaded:
            return _described(chosen, path.stem, where, loaded)
    profile = load_profile(chosen.profile, extra, key="profile")
    profile = with_draft({**profile, "profile": chosen.profile}, draft_name)
    if "stages" not in profile:
        raise UserError(
            f"{where} does not say of how many stages its target is, so it cannot be split"
            " otherwise: add `stages: NUMBER` to a copy of it"
        )
    if chosen.link_gb_s is not None:
        raise UserError(
            f"link_gb_s={chosen.link_gb_s:g} is for a described machine, whose hidden states have a"
            f" size; {where} has times: leave it out, or use link_ms"
        )
    costs = dict(profile["costs"])
    if chosen.link_ms is not None:
        costs["transfer"] = {"tokens": [1], "ms": [chosen.link_ms]}
    return Profiled(
        name=path.stem if path.is_file() else chosen.profile,
        devices=chosen.devices or profile["stages"] + 1,
        note=profile["note"],
        stages=profile["stages"],
        by_batch={1: costs},
        degrees=profile.get("degrees", {}),
    )


def _described(chosen: PlanOptions, name: str, where: str, loaded: Mapping[str, Any]) -> Described:
    not_keys = ("name", "note", "error")
    known = {f.name: f.default is MISSING for f in fields(Described) if f.name not in not_keys}
    for key in loaded:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise UserError(f"{where}: {key} is no key of a described machine: {hint}")
    own = {"devices": chosen.devices, "link_ms": chosen.link_ms, "link_gb_s": chosen.link_gb_s}
    values = {**loaded, **{key: value for key, value in own.items() if value is not None}}
    missing = [key for key, needed in known.items() if needed and key not in values]
    if missing:
        raise UserError(
            f"{where} describes a machine without {', '.join(missing)}: add them (docs/plan.md)"
        )
    for error in errors_of(Described, values):
        raise UserError(f"{where}: {error}")
    machine = Described(name=name, **values)
    if machine.devices % machine.boxes:
        raise UserError(f"{where}: {machine.devices} devices are not {machine.boxes} equal boxes")
    return machine
