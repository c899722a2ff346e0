"""SwiftSpec on simulated device groups: serial against parallel trees, batch sizes, splits, d."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.pipelines.tables import SIMULATED
from experiments.reproduce.arithmetic import computed
from experiments.reproduce.drafts import drafts
from experiments.reproduce.drawing import bars, claims_panel, doublings, figure, legend, lines, tidy
from experiments.reproduce.findings import Findings, Measure, Table
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio

_COLUMNS = (
    "draft",
    "row",
    "tokens/s",
    "accept length",
    "accepted/pass",
    "draft passes/token",
    "loop_share",
)


def parallel_or_serial(item: Item, lab: Lab) -> Findings:
    """Parallel tree generation against the serial form: the best of each over their depths.

    Keys: ``drafts``, ``common``, ``parallel`` and ``serial`` (name -> overrides), ``speedup`` and
    ``speedup_mean`` (claims of the ratio, per draft and as a mean), ``loss`` (claim: compression
    lost between the first row of each, in per cent), ``computed``.
    """
    found, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    shown: dict[str, dict[str, float | None]] = {}
    ratios, loops = [], []
    for draft in drafts(config["drafts"], item, lab, found):
        sides = {
            side: {
                name: lab.run([*draft.words, SIMULATED, *config["common"], *words])
                for name, words in config[side].items()
            }
            for side in ("parallel", "serial")
        }
        rows = {**sides["parallel"], **sides["serial"]}
        table += [_row(draft.title, name, run) for name, run in rows.items()]
        shown[draft.name.replace("_", "\n")] = {n: 1e3 / run.tbt_ms for n, run in rows.items()}
        best, base = (min(sides[s].values(), key=lambda run: run.tbt_ms) for s in sides)
        ratio, low, high = speed_ratio(best, base)
        share = best.summary["loop_share"]
        ratios.append(ratio)
        loops += [share] if share is not None else []
        first, other = (next(iter(sides[s].values())) for s in sides)
        kept = first.summary["accepted_per_pass"] / other.summary["accepted_per_pass"]
        for claim in config.get("speedup", ()):
            found.add(claim, ratio, "simulated", draft.title, loops=share, interval=(low, high))
        if "loss" in config:
            found.add(config["loss"], 100 * (1 - kept), "simulated", draft.title, loops=share)
    if ratios and "speedup_mean" in config:
        found.add(
            config["speedup_mean"],
            fmean(ratios),
            "simulated",
            f"mean of {len(ratios)} drafts",
            loops=fmean(loops) if loops else None,
        )
    found.measures += computed(config)
    found.tables.append(Table("Simulated decoding", _COLUMNS, tuple(table)))
    found.missing += list(config.get("absent", ()))
    found.notes += list(config.get("notes", ()))
    made, (left, right) = figure(12.0, 4.8, 2)
    bars(left, shown, form="{:.0f}")
    tidy(left, x="draft", y="tokens per second (simulated)", title=item.stated.title)
    legend(left)
    claims_panel(right, item.stated.claims, found.measures)
    found.figure = made
    return found


def _row(title: str, name: str, run: Outcome) -> tuple[Any, ...]:
    s = run.summary
    return (
        *(title, name, s["tokens_per_s"], s["acceptance_length"], s["accepted_per_pass"]),
        *(s["draft_passes_per_token"], s["loop_share"]),
    )


def tree_batches(item: Item, lab: Lab) -> Findings:
    """Fig. 2: accepted tokens over the target's and the draft's batch size.

    Keys: ``drafts``, ``common``, ``bs`` and ``w`` ([values], with ``at_w`` and ``at_bs`` fixed),
    claims ``target`` and ``draft`` ([claim, size from which the gain is under ``small`` per cent]),
    ``gain`` ([claim, from, to]).
    """
    found, config = Findings(), item.config
    made, axes = figure(9.5, 3.9, 2)
    table: list[tuple[Any, ...]] = []
    drawn: dict[str, dict[str, tuple[list[float], list[float]]]] = {"bs": {}, "w": {}}
    for draft in drafts(config["drafts"], item, lab, found):
        for key, fixed in (("bs", "w"), ("w", "bs")):
            sizes, found_lengths = config[key], []
            for size in sizes:
                words = [f"policy.{key}={size}", f"policy.{fixed}={config[f'at_{fixed}']}"]
                run = lab.run([*draft.words, SIMULATED, *config["common"], *words])
                found_lengths.append(run.summary["accepted_per_pass"])
                table.append((draft.title, key, size, found_lengths[-1], run.summary["loop_share"]))
            drawn[key][draft.name.replace("_", " ")] = (sizes, found_lengths)
            found.measures += _saturation(
                config, key, sizes, found_lengths, draft.title, table[-1][-1]
            )
    names = (("target's batch size bs (nodes)", "bs"), ("draft's batch size w (leaves)", "w"))
    for ax, (x, key) in zip(axes, names, strict=True):
        lines(ax, drawn[key])
        doublings(ax, config[key])
        tidy(ax, x=x, y="accepted tokens per target pass (simulated)", title=item.stated.title)
        legend(ax)
    columns = ("draft", "varied", "size", "accepted per pass", "loop_share")
    found.tables.append(Table("Compression ratio (without the bonus token)", columns, tuple(table)))
    found.notes += list(config.get("notes", ()))
    found.figure = made
    return found


def _saturation(
    config: Any, key: str, sizes: list[int], lengths: list[float], title: str, loops: float | None
) -> list[Measure]:
    claim, knee = config["target" if key == "bs" else "draft"]
    at = dict(zip(sizes, lengths, strict=True))
    gain = 100 * (at[sizes[-1]] / at[knee] - 1)
    text = f"{title}; {knee} to {sizes[-1]}: {gain:+.1f} %"
    measures = [
        Measure(
            claim=claim,
            value=gain < config["small"],
            kind="simulated",
            conditions=text,
            loop_share=loops,
        )
    ]
    if key == "bs":
        name, low, high = config["gain"]
        value = 100 * (at[high] / at[low] - 1)
        measures.append(
            Measure(claim=name, value=value, kind="simulated", conditions=title, loop_share=loops)
        )
    return measures


def choices(item: Item, lab: Lab) -> Findings:
    """Speed over one choice (the split of devices, or d): is the paper's choice the best?

    Keys: ``drafts``, ``common``, ``rows`` (name -> overrides), ``best`` (claim -> rows that may be
    best).
    """
    found, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    shown: dict[str, dict[str, float | None]] = {}
    for draft in drafts(config["drafts"], item, lab, found):
        runs = {
            name: lab.run([*draft.words, SIMULATED, *config["common"], *words])
            for name, words in config["rows"].items()
        }
        table += [_row(draft.title, name, run) for name, run in runs.items()]
        shown[draft.name.replace("_", "\n")] = {n: 1e3 / run.tbt_ms for n, run in runs.items()}
        best = min(runs, key=lambda name: runs[name].tbt_ms)
        for claim, allowed in config["best"].items():
            found.add(
                claim,
                best in allowed,
                "simulated",
                f"{draft.title}; best: {best}",
                loops=runs[best].summary["loop_share"],
            )
    found.tables.append(Table("Simulated decoding", _COLUMNS, tuple(table)))
    found.missing += list(config.get("absent", ()))
    found.notes += list(config.get("notes", ()))
    made, (ax,) = figure(7.5, 4.0)
    bars(ax, shown, form="{:.0f}")
    tidy(ax, x="draft", y="tokens per second (simulated)", title=item.stated.title)
    legend(ax)
    found.figure = made
    return found
