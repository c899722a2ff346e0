"""Search for the device split between target and draft and its tree (SwiftSpec 3.1, 5.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from specdec.clocks import LatencyProfile, Work
from specdec.clocks.build import build_profile
from specdec.clocks.profile import curve_at
from specdec.errors import UserError
from specdec.pairs import ModelPair
from specdec.policies.best_first import UNTIL_READY
from specdec.profiling.proposal import clock_node, decode_summary
from specdec.runs.runners import TokenPrompt
from specdec.state import StopRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The result of one device split and tree. Times in milliseconds.

    Attributes:
        target, draft: devices of the two groups.
        bs, w, d: parameters of the tree, see ``specdec.policies.BestFirst``.
        target_ms, draft_ms: time of a target pass and of a draft pass; None if not simulated.
        interpolated: whether the time of a degree is interpolated between those of the profile.
        acceptance_length: emitted tokens per target pass.
        tokens_per_s: speed of the decode phase.
    """

    target: int
    draft: int
    bs: int
    w: int
    d: int | str
    target_ms: float | None
    draft_ms: float | None
    interpolated: bool
    acceptance_length: float
    tokens_per_s: float


def allocate(
    cfg: Mapping[str, Any],
    pair: ModelPair,
    prompts: Sequence[TokenPrompt],
    stop: StopRules,
    *,
    devices: int,
    targets: Sequence[int],
    sizes: Sequence[int],
    leaves: Sequence[int],
    use: Mapping[str, Any] | None,
    on_split: Callable[[Split], None] = lambda _: None,
) -> list[Split]:
    """Decodes with every combination of split and tree.

    Args:
        cfg: resolved configuration; its source, verifier, sampling and seed are used.
        pair, prompts, stop: models, prompts and stop rules.
        devices, targets: all devices, and those of the target to try; the draft has the others.
        sizes, leaves: values of bs and of w to try.
        use: a latency profile with times by degree (``name``, ``costs``, ``degrees``) to simulate;
            each tree is tried with d = floor(target time / draft time) and with d + 1. None: runs
            on real ranks, timed by the wall clock, with as many expansions as fit.
        on_split: called with each result.

    Returns:
        The results, in the order tried.

    Raises:
        UserError: a split leaves no device for a group, or the profile has no times for it.
    """
    _check_targets(targets, devices)
    splits: list[Split] = []
    for target, bs, w in product(targets, sizes, leaves):
        draft = devices - target
        profile, interpolated = (None, False) if use is None else _profile(use, target, draft)
        target_ms = draft_ms = None
        depths: list[int | str] = [UNTIL_READY]
        if profile is not None:
            target_ms, draft_ms = profile.ms(Work.STAGE, bs), profile.ms(Work.DRAFT, w)
            ratio = max(1, int(target_ms / draft_ms))
            depths = [ratio, ratio + 1]
        for d in depths:
            tree: dict[str, Any] = {"bs": bs, "w": w, "d": d}
            changed = {**cfg, **_sections(cfg, profile, (target, draft), tree)}
            summary = decode_summary(changed, pair, prompts, stop, warm_up=profile is None)
            splits.append(
                Split(
                    target=target,
                    draft=draft,
                    **tree,
                    target_ms=target_ms,
                    draft_ms=draft_ms,
                    interpolated=interpolated,
                    acceptance_length=summary["acceptance_length"],
                    tokens_per_s=summary["tokens_per_s"],
                )
            )
            on_split(splits[-1])
    return splits


def _check_targets(targets: Sequence[int], devices: int) -> None:
    wrong = [t for t in targets if not 1 <= t < devices]
    if wrong:
        raise UserError(
            f"profiling.targets={list(targets)}: {wrong[0]} of profiling.devices={devices} devices"
            f" leaves none for the draft: name numbers from 1 to {devices - 1}"
        )


def preset(split: Split, *, name: str, about: str) -> str:
    """A strategy's YAML that decodes with a split: `--config-dir DIR strategy=NAME`."""
    return f"""# @package _global_
# {about}
defaults:
  - override /source: draft_model
  - override /policy: swiftspec
  - override /verifier: match
  - override /executor: tensor_parallel
strategy:
  name: {name}
  title: SwiftSpec, {split.target} devices for the target and {split.draft} for the draft
  kind: parts
  baseline: false
policy:
  bs: {split.bs}
  w: {split.w}
  d: {split.d}
executor:
  target_degree: {split.target}
  draft_degree: {split.draft}
"""


def _profile(use: Mapping[str, Any], target: int, draft: int) -> tuple[LatencyProfile, bool]:
    """The profile of a split, and whether one of its degrees is interpolated."""
    degrees = use.get("degrees") or {}
    costs, interpolated = dict(use["costs"]), False
    for kind, degree in (("stage", target), ("draft", draft)):
        known = sorted(int(number) for number in degrees.get(kind, ()))
        if not known or not known[0] <= degree <= known[-1]:
            has = f"it has {known[0]} to {known[-1]}" if known else "it has none by degree"
            raise UserError(
                f"profiling.use={use['name']} has no time of a {kind} pass on {degree} devices"
                f" ({has}): choose other profiling.targets, or a profile with `degrees`, such as"
                " swiftspec_table1"
            )
        costs[kind] = curve_at(degrees[kind], degree)
        interpolated = interpolated or degree not in known
    node = {"profile": use["name"], "costs": costs, "note": use.get("note", "")}
    return build_profile(node), interpolated


def _sections(
    cfg: Mapping[str, Any],
    profile: LatencyProfile | None,
    groups: tuple[int, int],
    tree: Mapping[str, int | str],
) -> dict[str, Any]:
    """Policy, executor and clock sections of a split; simulated if there is a profile."""
    return {
        "policy": {"_target_": "specdec.policies.BestFirst", **tree, "asynchronous": True},
        "executor": {
            **cfg["executor"],
            **{"stages": 1, "groups": None, "shared": False},
            **{"target_degree": groups[0], "draft_degree": groups[1]},
            "transport": "distributed" if profile is None else "in_process",
        },
        "clock": {"kind": "measured"} if profile is None else clock_node(profile),
    }
