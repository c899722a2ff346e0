"""Loads latency profiles (times of each kind of pass), and sets configuration values from them.

It sets the costs for tensor-parallel degrees and the draft, and ``policy.d`` if it is a time ratio.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from specdec.clocks.profile import CostCurve, Work, curve_at
from specdec.config.options import Node, Trees, options, read_yaml
from specdec.errors import UserError
from specdec.parts.fields import Count, did_you_mean


def _curve(curve: Any) -> Any:
    try:
        CostCurve.of(curve)
    except (TypeError, AttributeError) as error:
        form = "lists `tokens` and `ms`, and may have block_tokens, block_ms, devices"
        raise ValueError(f"it needs {form}") from error
    return curve


_Kind: Any = Literal[*map(str, Work)]
_Curve = Annotated[Any, AfterValidator(_curve)]
_Degrees = Annotated[dict[int, _Curve], Field(min_length=1)]


class _Profile(TypedDict, total=False):
    note: str
    costs: dict[_Kind, _Curve]
    degrees: dict[Annotated[str, Field(pattern="^(stage|draft)$")], _Degrees]
    stages: Count
    draft_name: str
    drafts: Annotated[dict[str, _Curve], Field(min_length=1)]
    origins: dict[str, Annotated[str, Field(pattern="^(stated|measured|assumed)")]]


def load_profile(name: str, extra: Trees = (), *, key: str = "clock.profile") -> dict[str, Any]:
    """Loads and checks the latency profile ``name``, an option of ``profile`` or a path of a YAML.

    Returns "note", "costs": {kind of work: cost curve} and, if the file has them, "degrees": {kind:
    {number of devices that share a layer: curve}}, the testbed's number of "stages", "draft_name"
    (the draft timed in "costs") and "drafts": {name: curve}. ``key`` is for error messages.
    """
    at, known = f"{key}={name}", options("profile", extra)
    path = known.get(name) or Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"{at} is neither a profile nor a YAML file: {did_you_mean(name, known)}")
    loaded = read_yaml(path, f"{at} is not readable YAML", resolve=True)
    costs = loaded.get("costs") if isinstance(loaded, dict) else None
    if not isinstance(costs, dict) or not costs:
        raise UserError(f"{at} needs a mapping `costs` of kind to cost curve")
    try:
        checked = TypeAdapter(_Profile).validate_python(loaded, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "[key]")
        text = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{at}: {where}: {text}") from error
    profile: dict[str, Any] = {"note": "", **checked}
    for kind, curves in profile.get("degrees", {}).items():
        if len({tuple(curve["tokens"]) for curve in curves.values()}) > 1:
            raise UserError(f"{at}: degrees.{kind}: all curves need the same `tokens`")
    if origins := profile.pop("origins", None):
        if set(origins) != set(costs):
            raise UserError(f"{at}: origins needs one text for each of {', '.join(costs)}")
        figures = "; ".join(f"{kind} {origin}" for kind, origin in origins.items())
        profile["note"] = f"{profile['note']} Figures: {figures}.".strip()
    return profile


_DEGREES = {"stage": "target_degree", "draft": "draft_degree"}


def fit(config: dict[str, Any]) -> dict[str, Any]:
    """Returns ``config`` with ``clock.costs`` for the executor's tensor-parallel degrees and the
    draft, and with a number for ``policy.d=ratio``; UserError if the profile lacks these times.
    """
    clock, executor = dict(config["clock"]), config["executor"]
    if degrees := clock.pop("degrees", None):
        clock = _with_degrees(clock, degrees, executor)
    for kind, curve in clock.get("costs", {}).items():
        if num := len(curve.get("devices", ())):  # a profile of unlike devices, which prices these
            used = executor.get("stages") if "lock_step" in executor else None
            if used != num or executor.get("groups") or (executor.get("target_degree") or 1) > 1:
                raise UserError(
                    f"clock.profile={clock['profile']} has one {kind} time for each of {num}"
                    " devices: use a pipeline of a stage on each (executor=pipeline"
                    f" executor.stages={num}), or another profile"
                )
    clock = with_draft(clock, config["model"].get("draft_name"))
    config, policy = {**config, "clock": clock}, config.get("policy")
    if isinstance(policy, dict) and policy.get("d") in ("ratio", "ratio_plus_one"):
        config["policy"] = {**policy, "d": _expansions(policy, clock)}
    return config


def with_caveat(config: Node, num_layers: int) -> dict[str, Any]:
    """Returns the clock's section, with a ``caveat`` if its times cannot be compared to other rows.

    A profile has the time of one stage of its testbed, so with another number of stages it models
    another target. On a measured clock (wall time), devices that share a process take turns.
    """
    clock, executor = dict(config["clock"]), config.get("executor", {})
    several = (executor.get(key) or 1 for key in ("stages", *_DEGREES.values()))
    in_turns = executor.get("transport") == "in_process" and max(several) > 1
    if clock.get("kind") == "measured" and in_turns:
        clock["caveat"] = (
            "the devices of its pipeline take turns in one process, so its measured time is not a"
            " pipeline's; use executor.transport=distributed or clock=simulated"
        )
    priced = clock.pop("stages", None)
    used = sum(executor.get("groups") or ()) or executor.get("stages", 1)
    if used is None:  # executors with early exits: layers / exit layer, rounded up
        used = -(-num_layers // (config["model"].get("exit_layer") or num_layers))
    if priced is not None and used != priced:
        clock["caveat"] = (
            f"clock.profile={clock['profile']} has the time of one of {priced} stages and this row"
            f" has {used}, so its target is {used}/{priced} of the testbed's: compare its times"
            " with no row of another number of stages"
        )
    return clock


def with_draft(clock: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Returns the clock's section with the time of the draft ``name``; unchanged for None.

    A profile without draft times fits every draft, which then costs nothing; a profile that has
    only the times of other drafts is refused.
    """
    own, others = clock.pop("draft_name", None), clock.pop("drafts", {})
    if name is None or name == own or "draft" not in clock.get("costs", {}):
        return clock
    if name not in others:
        known = ", ".join([*([own] if own else []), *others]) or "a draft that it does not name"
        raise UserError(
            f"model.draft_name={name} has the acceptance of this draft, but"
            f" clock.profile={clock['profile']} has the time of {known}: add the time of {name} to"
            " the profile's `drafts`, or choose a profile or a model=law_NAME of the same draft"
        )
    note = f"{clock.get('note', '')} Here: draft times of {name}.".strip()
    return {**clock, "costs": {**clock["costs"], "draft": others[name]}, "note": note}


def _with_degrees(clock: Node, degrees: Node, executor: Node) -> dict[str, Any]:
    """Returns the clock's section with the costs for the executor's tensor-parallel degrees (None
    leaves them unchanged). Costs of degrees that the profile lacks are interpolated.
    """
    costs, note = dict(clock["costs"]), str(clock.get("note", ""))
    for kind, curves in degrees.items():
        if (degree := executor.get(_DEGREES[kind])) is None:
            continue
        known = sorted(int(number) for number in curves)
        if not known[0] <= degree <= known[-1]:
            raise UserError(
                f"executor.{_DEGREES[kind]}={degree} is not in clock.profile={clock['profile']},"
                f" which has times for {known[0]} to {known[-1]} devices: choose one of them, or"
                " another profile"
            )
        costs[kind] = curve_at(curves, degree)
        if degree not in known:
            note += f" Here: {kind} on {degree} devices, interpolated."
    return {**clock, "costs": costs, "note": note}


def _expansions(policy: Node, clock: Node) -> int:
    """Returns d of SwiftSpec section 5.5: how many draft passes of w leaves take as long as one
    target pass of bs nodes, at least 1; ``ratio_plus_one`` adds one.
    """
    if "costs" not in clock or not {"stage", "draft"} <= clock["costs"].keys():
        raise UserError(
            f"policy.d={policy['d']} follows from a latency profile that prices stage and draft:"
            " use clock=simulated or clock=paced with one, policy.d=until_ready, or a number"
        )
    target, draft = (CostCurve.of(clock["costs"][kind]) for kind in ("stage", "draft"))
    ratio = target(int(policy["bs"])) / max(draft(int(policy["w"])), 1e-9)
    return max(1, int(ratio)) + (policy["d"] == "ratio_plus_one")
