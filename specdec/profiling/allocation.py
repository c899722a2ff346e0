"""How to split devices between target and draft, and which tree to grow (SwiftSpec 3.1, 5.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.clocks import LatencyProfile, Work
from specdec.clocks.build import build_profile
from specdec.clocks.profile import curve_at
from specdec.errors import UserError
from specdec.metrics import RequestResult, RunTotals, summarise
from specdec.pairs import ModelPair
from specdec.policies.best_first import UNTIL_READY
from specdec.profiling.proposal import clock_node
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import StopRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One split and tree, tried. Times in milliseconds.

    Attributes:
        target, draft: devices of the two groups.
        bs, w, d: of the tree.
        target_ms, draft_ms: of a target pass and a draft pass; None where measured.
        interpolated: whether the profile lacks one of the degrees.
        acceptance_length: emitted tokens per target pass.
        tokens_per_s: of the decode phases.
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

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What is tried: every combination.

    Attributes:
        devices: in all.
        targets: devices of the target; the others are the draft's.
        sizes: bs.
        leaves: w.
    """

    devices: int
    targets: tuple[int, ...]
    sizes: tuple[int, ...]
    leaves: tuple[int, ...]

    @property
    def trees(self) -> list[tuple[int, int, int]]:
        """(devices of the target, bs, w) of every combination."""
        return [(t, bs, w) for t in self.targets for bs in self.sizes for w in self.leaves]

    def check(self) -> None:
        """Refuses splits that leave a group without devices.

        Raises:
            UserError: naming the first.
        """
        wrong = [t for t in self.targets if not 1 <= t < self.devices]
        if wrong:
            raise UserError(
                f"profiling.targets={list(self.targets)}: {wrong[0]} of"
                f" profiling.devices={self.devices} devices leaves none for the draft: name numbers"
                f" from 1 to {self.devices - 1}"
            )


def allocate(
    cfg: Mapping[str, Any],
    pair: ModelPair,
    prompts: Sequence[TokenPrompt],
    stop: StopRules,
    choices: Choices,
    *,
    use: Mapping[str, Any] | None,
    on_split: Callable[[Split], None] = lambda _: None,
) -> list[Split]:
    """Tries every split and tree.

    Args:
        cfg: resolved; its source, verifier, sampling and seed are used.
        pair, prompts, stop: what is decoded.
        choices: what is tried.
        use: a latency profile with times by degree (``name``, ``costs``, ``degrees``) to simulate,
            each tree with d of the times' ratio and one more; None: real ranks by the wall clock,
            with as many expansions as fit.
        on_split: told of each.

    Returns:
        The splits, in the order tried.

    Raises:
        UserError: a split without draft devices, or a profile that has no times for it.
    """
    choices.check()
    found: list[Split] = []
    for target, bs, w in choices.trees:
        draft = choices.devices - target
        profile, interpolated = (None, False) if use is None else _profile(use, target, draft)
        numbers: list[int | str] = [UNTIL_READY]
        if profile is not None:
            ratio = max(1, int(profile.ms(Work.STAGE, bs) / profile.ms(Work.DRAFT, w)))
            numbers = [ratio, ratio + 1]
        for d in numbers:
            summary = _run(cfg, pair, prompts, stop, profile, (target, draft), (bs, w, d))
            found.append(
                Split(
                    target=target,
                    draft=draft,
                    bs=bs,
                    w=w,
                    d=d,
                    target_ms=None if profile is None else profile.ms(Work.STAGE, bs),
                    draft_ms=None if profile is None else profile.ms(Work.DRAFT, w),
                    interpolated=interpolated,
                    acceptance_length=summary["acceptance_length"],
                    tokens_per_s=summary["tokens_per_s"],
                )
            )
            on_split(found[-1])
    return found


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


def _run(
    cfg: Mapping[str, Any],
    pair: ModelPair,
    prompts: Sequence[TokenPrompt],
    stop: StopRules,
    profile: LatencyProfile | None,
    groups: tuple[int, int],
    tree: tuple[int, int, int | str],
) -> dict[str, Any]:
    bs, w, d = tree
    policy = {
        "_target_": "specdec.policies.BestFirst",
        **{"bs": bs, "w": w, "d": d, "asynchronous": True},
    }
    executor = {
        **cfg["executor"],
        **{"stages": 1, "groups": None, "shared": False},
        **{"target_degree": groups[0], "draft_degree": groups[1]},
        "transport": "in_process" if profile is not None else "distributed",
    }
    clock = {"kind": "measured"} if profile is None else clock_node(profile)
    changed = {"policy": policy, "executor": executor, "clock": clock}
    runner = PartsRunner(
        cfg={**cfg, **changed, "batch_size": 1, "trace": False}, pair=pair, stop=stop
    )
    results: list[RequestResult] = []
    try:
        if profile is None:
            runner.run(prompts[:1], lambda _: None)  # first calls allocate and page in
        totals = [runner.run([prompt], results.append) for prompt in prompts]
    finally:
        runner.close()
    summary = summarise(results, RunTotals.merge(totals))
    if not summary["tokens_per_s"]:
        raise UserError(
            f"max_new_tokens={cfg['max_new_tokens']} is too few to see a tree at work: raise it"
        )
    return summary
