"""``specdec profile profiling.devices=K``: tries device splits and writes the best as a preset.

This is the search of SwiftSpec 3.1 and 5.5, over trees and over the number of devices that the
target and the draft each get.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.clocks import LatencyProfile, Work
from specdec.clocks.build import build_profile
from specdec.clocks.profile import curve_at
from specdec.errors import UserError
from specdec.files import write_json, write_text
from specdec.policies.best_first import UNTIL_READY
from specdec.profiling.job import RESULT_FILE
from specdec.profiling.proposal import Workload, clock_node
from specdec.report.provenance import provenance
from specdec.report.tables import number
from specdec.runs.jobs import Progress

BEST = "swiftspec_best"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The result of one device split and tree.

    Attributes:
        bs, w, d: parameters of the tree, see ``specdec.policies.BestFirst``.
        target_ms, draft_ms: milliseconds of one pass; None if measured on real ranks.
        interpolated: whether a time is interpolated between device counts of the profile.
        acceptance_length: emitted tokens per target pass.
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


def allocation_job(cfg: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Writes profile.json (all splits) and strategy/swiftspec_best.yaml (the best) into ``folder``.

    ``cfg`` is as for ``profile_job``. Returns the content of profile.json.
    """
    work = Workload.of(cfg, progress)
    options = work.options
    use = None if options.use is None else {"name": options.use, **cfg["use"]}
    runs = len(options.targets) * len(options.bs) * len(options.w)
    progress.phase("trying splits", runs if use is None else 2 * runs)
    splits = []
    for split in allocate(work, use):
        splits.append(split)
        progress.advance(detail=f"{split.target}:{split.draft}, d {split.d}")
    best = max(splits, key=lambda split: split.tokens_per_s)
    source = "measured on real ranks" if use is None else f"simulated on {options.use}"
    about = f"The fastest of {len(splits)} splits and trees, {source}, by `specdec profile`."
    write_text(folder / "strategy" / f"{BEST}.yaml", preset(best, name=BEST, about=about))
    result = {
        "source": source,
        "splits": [asdict(split) for split in splits],
        "best": asdict(best),
        "provenance": provenance(command=sys.argv, config=cfg),
    }
    write_json(folder / RESULT_FILE, result)
    return result


def allocate(work: Workload, use: Mapping[str, Any] | None) -> Iterator[Split]:
    """Decodes all prompts with every combination of split and tree, and yields each result.

    The section ``profiling`` gives the total ``devices``, the ``targets`` to try (the target's
    devices; the draft gets the rest), and the tree parameters ``bs`` and ``w`` to try. If ``use``
    is a latency profile (``name``, ``costs``, ``degrees``), each tree is simulated with d =
    floor(target time / draft time) and with d + 1. If it is None, decoding runs on real ranks,
    timed by the wall clock, with as many draft expansions as fit into a target pass.
    """
    options = work.options
    devices = options.devices or 0
    wrong = [target for target in options.targets if target >= devices]
    if wrong:
        raise UserError(
            f"profiling.targets={options.targets}: {wrong[0]} of profiling.devices={devices}"
            f" devices leaves none for the draft: name numbers from 1 to {devices - 1}"
        )
    for target, bs, w in product(options.targets, options.bs, options.w):
        executor: dict[str, Any] = {
            **work.cfg["executor"],
            **{"stages": 1, "groups": None, "shared": False, "transport": "distributed"},
            **{"target_degree": target, "draft_degree": devices - target},
        }
        clock: dict[str, Any] = {"kind": "measured"}
        depths: list[int | str] = [UNTIL_READY]
        interpolated, target_ms, draft_ms = False, None, None
        if use is not None:
            profile, interpolated = _profile(use, target, devices - target)
            target_ms, draft_ms = profile.ms(Work.STAGE, bs), profile.ms(Work.DRAFT, w)
            ratio = max(1, int(target_ms / draft_ms))
            depths = [ratio, ratio + 1]
            executor["transport"], clock = "in_process", clock_node(profile)
        for d in depths:
            tree: dict[str, Any] = {"bs": bs, "w": w, "d": d}
            policy = {"_target_": "specdec.policies.BestFirst", **tree, "asynchronous": True}
            changes = {"policy": policy, "executor": executor, "clock": clock}
            summary = work.decode(changes, warm_up=use is None)
            yield Split(
                target=target,
                draft=devices - target,
                **tree,
                target_ms=target_ms,
                draft_ms=draft_ms,
                interpolated=interpolated,
                acceptance_length=summary["acceptance_length"],
                tokens_per_s=summary["tokens_per_s"],
            )


def preset(split: Split, *, name: str, about: str) -> str:
    """Returns the YAML of a strategy that decodes with this split."""
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


def print_splits(result: Mapping[str, Any]) -> None:
    console = Console()
    heads = ("target:draft", "bs", "w", "d", "t target", "t draft", "accepted", "tokens/s")
    table = Table(*heads, box=None, padding=(0, 1))
    for split in sorted(result["splits"], key=lambda s: -s["tokens_per_s"]):
        mark = "*" if split["interpolated"] else ""
        times = (split["target_ms"], split["draft_ms"])
        table.add_row(
            f"{split['target']}:{split['draft']}{mark}",
            *(str(split[key]) for key in ("bs", "w", "d")),
            *("-" if ms is None else number(ms, 2) for ms in times),
            number(split["acceptance_length"], 2),
            number(split["tokens_per_s"], 1),
        )
    console.print(table)
    interpolated = any(split["interpolated"] for split in result["splits"])
    best = Split(**result["best"])
    console.print(
        f"{result['source']}; accepted: emitted tokens per target pass"
        + ("; * a degree between two of the profile's" if interpolated else ""),
        highlight=False,
    )
    console.print(
        f"best: {best.target}:{best.draft}, bs {best.bs}, w {best.w}, d {best.d}", highlight=False
    )
