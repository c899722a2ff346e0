"""SwiftSpec on simulated device groups: serial against parallel trees, batch sizes, splits, d."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.pipelines.token_times import run_rows
from experiments.reproduce.arithmetic import computed
from experiments.reproduce.drafts import Draft, drafts
from experiments.reproduce.drawing import (
    band,
    bar_chart,
    bars,
    claims_panel,
    doublings,
    figure,
    legend,
    lines,
    tidy,
)
from experiments.reproduce.findings import Findings, surely
from experiments.reproduce.intervals import Interval, accepted_of, beside, interval, share
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio

_COLUMNS = (
    *("draft", "row", "tokens/s", "accept length", "accepted/pass", "draft passes/token"),
    "loop_share",
)


def parallel_or_serial(item: Item, lab: Lab) -> Findings:
    """Parallel tree generation against the serial form: the best of each over their depths.

    Keys: ``drafts``, ``common``, ``parallel`` and ``serial`` (name -> overrides, both ending in
    "d = D"), ``speedup`` (claim of the ratio), ``loss`` (claim: accepted guesses per pass lost at
    equal d, in per cent), ``speeds`` (side -> claim: tokens/s of its best row, of drafts that are
    what-ifs), ``computed``, ``sets`` (see ``add_sets``).
    """
    findings, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    shown: dict[str, dict[str, float | None]] = {}
    for draft in drafts(config["drafts"], item, lab, findings):
        sides = {
            side: run_rows(lab, draft, config["common"], config[side])
            for side in ("parallel", "serial")
        }
        rows = {**sides["parallel"], **sides["serial"]}
        table += [_row(draft.title, name, run) for name, run in rows.items()]
        shown[draft.short] = {n: 1e3 / run.tbt_ms for n, run in rows.items()}
        best, base = (min(sides[s].values(), key=lambda run: run.tbt_ms) for s in sides)
        ratio, low, high = speed_ratio(best, base)
        draft.add(findings, config["speedup"], ratio, run=best, interval=(low, high))
        for side, claim in config.get("speeds", {}).items() if draft.kind == "what-if" else ():
            name = min(sides[side], key=lambda row: sides[side][row].tbt_ms)
            run = sides[side][name]
            draft.add(findings, claim, 1e3 / run.tbt_ms, f"its best: {name}", run=run)
        for name, ours in sides["parallel"].items() if "loss" in config else ():
            d = name.partition(", ")[2]
            _add_loss(findings, config["loss"], draft, d, ours, sides["serial"][f"serial, {d}"])
    findings.measures += computed(config)
    findings.table("Simulated decoding", _COLUMNS, table)
    if "sets" in config:
        add_sets(item, lab, findings, config["sets"])
    fig, (left, right) = figure(12.0, 4.8, 2)
    bars(left, shown, form="{:.0f}")
    tidy(left, x="draft", y="tokens per second (simulated)", title=item.stated.title)
    legend(left)
    claims_panel(right, item.stated.claims, findings.measures, unit="x")
    findings.figure = fig
    return findings


def _add_loss(
    findings: Findings, claim: str, draft: Draft, d: str, ours: Outcome, other: Outcome
) -> None:
    """Adds the loss of accepted tokens per pass of one run against another in per cent."""
    ratio = ours.summary["accepted_per_pass"] / other.summary["accepted_per_pass"]
    rows = beside(ours.results, other.results, accepted_of)
    ends = interval(rows, lambda s: 100.0 * (1.0 - s[0] / s[1] / (s[2] / s[3])))
    draft.add(
        findings, claim, 100 * (1 - ratio), f"both with {d} and equal w", run=ours, interval=ends
    )


def _row(title: str, name: str, run: Outcome) -> tuple[Any, ...]:
    s = run.summary
    return (
        *(title, name, s["tokens_per_s"], s["acceptance_length"], s["accepted_per_pass"]),
        *(s["draft_passes_per_token"], s["loop_share"]),
    )


def add_sets(item: Item, lab: Lab, findings: Findings, config: Mapping[str, Any]) -> None:
    """Table 6 set by set: a figure per form and set, the mean speeds, and the mean loss.

    Guesses are accepted tokens per pass without the bonus token, as Table 6 counts; the draft
    ``qwen_NAME`` gives the claim ``FORM_NAME``. Speeds are the mean of the sets' tokens per second.

    Keys: ``drafts`` (one per set), ``forms`` (parallel and serial: overrides), ``speeds`` (form ->
    claim), ``loss`` (claim).
    """
    table, kind = [], ""
    runs: dict[str, list[Outcome]] = {form: [] for form in config["forms"]}
    for draft in drafts(config["drafts"], item, lab, findings):
        kind = draft.kind
        name = draft.name.removeprefix("qwen_")
        for form, overrides in config["forms"].items():
            run = lab.run(draft.words(*item.config["common"], *overrides))
            runs[form].append(run)
            s = run.summary
            guesses, loops = s["accepted_per_pass"], s["loop_share"]
            ends = interval(accepted_of(run.results), share)
            claim = f"{form}_{name}"
            if claim in item.stated.claims:
                draft.add(findings, claim, guesses, run=run, interval=ends, kind=draft.kind)
            table.append((draft.title, form, guesses, *ends, s["tokens_per_s"], loops))
    columns = ("set", "form", "guesses per pass", "95 % from", "to", "tokens/s", "loop_share")
    findings.table("Set by set, simulated on Table 6's times", columns, table)
    if not all(runs.values()):
        return
    text = f"mean of {len(config['drafts'])} sets"
    loops = fmean(float(run.summary["loop_share"] or 0.0) for run in runs["parallel"])
    for form, claim in config["speeds"].items():
        speed = fmean(float(run.summary["tokens_per_s"]) for run in runs[form])
        findings.add(claim, speed, "simulated", text, kind=kind, loops=loops)
    means = {
        form: fmean(float(run.summary["accepted_per_pass"]) for run in of)
        for form, of in runs.items()
    }
    lost = 100.0 * (1.0 - means["parallel"] / means["serial"])
    text = f"{text}; equal d and w"
    findings.add(config["loss"], lost, "simulated", text, kind=kind, loops=loops)


def tree_batches(item: Item, lab: Lab) -> Findings:
    """Fig. 2: accepted tokens over the target's and the draft's batch size.

    Keys: ``drafts``, ``common``, ``bs`` and ``w`` ([values], with ``at_w`` and ``at_bs`` fixed),
    claims ``target`` and ``draft`` ([claim, size from which the gain is under ``small`` per cent]),
    ``gain`` ([claim, from, to]).
    """
    findings, config = Findings(), item.config
    fig, axes = figure(9.5, 3.9, 2)
    table: list[tuple[Any, ...]] = []
    drawn: dict[str, dict[str, tuple[list[float], list[float]]]] = {"bs": {}, "w": {}}
    for draft in drafts(config["drafts"], item, lab, findings):
        for key, fixed in (("bs", "w"), ("w", "bs")):
            sizes, lengths, runs = config[key], [], {}
            for size in sizes:
                overrides = [f"policy.{key}={size}", f"policy.{fixed}={config[f'at_{fixed}']}"]
                run = lab.run(draft.words(*config["common"], *overrides))
                runs[size] = run
                lengths.append(run.summary["accepted_per_pass"])
                table.append((draft.title, key, size, lengths[-1], run.summary["loop_share"]))
            drawn[key][draft.short] = (sizes, lengths)
            _saturation(findings, config, key, runs, draft.title)
    names = (("target's batch size bs (nodes)", "bs"), ("draft's batch size w (leaves)", "w"))
    for ax, (x, key) in zip(axes, names, strict=True):
        lines(ax, drawn[key])
        knee = config["target" if key == "bs" else "draft"][1]
        band(ax, knee, knee, f"stated: saturates at {knee}", vertical=True)
        doublings(ax, config[key])
        tidy(ax, x=x, y="accepted tokens per target pass (simulated)", title=item.stated.title)
        legend(ax)
    columns = ("draft", "varied", "size", "accepted per pass", "loop_share")
    findings.table("Compression ratio (without the bonus token)", columns, table)
    findings.figure = fig
    return findings


def _saturation(
    findings: Findings, config: Any, key: str, runs: Mapping[int, Outcome], title: str
) -> None:
    """Adds whether the largest size gains little over the stated one; for bs also the gain."""
    claim, knee = config["target" if key == "bs" else "draft"]
    text, value, _ = _gain(runs, knee, max(runs))
    loops, where = runs[knee].summary["loop_share"], f"{title}; {text}: {value:+.1f} %"
    findings.add(claim, value < config["small"], "simulated", where, loops=loops)
    if key == "bs":
        name, low, high = config["gain"]
        _, value, ends = _gain(runs, low, high)
        findings.add(name, value, "simulated", title, loops=loops, interval=ends)


def _gain(runs: Mapping[int, Outcome], low: int, high: int) -> tuple[str, float, Interval]:
    """Gain of accepted tokens per pass by the larger size in per cent, with its interval."""
    less, more = (runs[size].summary["accepted_per_pass"] for size in (low, high))
    rows = beside(runs[high].results, runs[low].results, accepted_of)
    ends = interval(rows, lambda s: 100.0 * (s[0] / s[1] / (s[2] / s[3]) - 1.0))
    return f"{low} to {high}", 100.0 * (more / less - 1.0), ends


def choices(item: Item, lab: Lab) -> Findings:
    """Speed over one parameter (the split of devices, or d), and whether the paper's is best.

    Keys: ``drafts``, ``common``, ``rows`` (name -> overrides), ``best`` (claim -> rows that may be
    best), ``pairs`` (model pair -> its own ``common`` and ``best``; None for one pair).
    """
    findings, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    shown: dict[str, dict[str, float | None]] = {}
    pairs = config.get("pairs", {"": {}})
    for draft in drafts(config["drafts"], item, lab, findings):
        for pair, own in pairs.items():
            of = {**config, **own}
            title = f"{pair}: {draft.title}" if pair else draft.title
            runs = run_rows(lab, draft, of["common"], of["rows"])
            table += [_row(title, name, run) for name, run in runs.items()]
            short = f"{pair}: {draft.short}" if pair else draft.short
            shown[short] = {n: 1e3 / run.tbt_ms for n, run in runs.items()}
            for claim, allowed in of["best"].items():
                _add_best(findings, claim, draft, title, runs, allowed)
    findings.table("Simulated decoding", _COLUMNS, table)
    allowed_rows = (rows for own in pairs.values() for rows in {**config, **own}["best"].values())
    stated = sorted({name for rows in allowed_rows for name in rows})
    title = f"{item.stated.title} (the paper's best: {' or '.join(stated)})"
    y = "tokens per second (simulated)"
    findings.figure = bar_chart(shown, x="draft", y=y, title=title, size=(7.5, 4.0), form="{:.0f}")
    return findings


def _add_best(
    findings: Findings,
    claim: str,
    draft: Draft,
    title: str,
    runs: Mapping[str, Outcome],
    allowed: Sequence[str],
) -> None:
    """Adds whether the fastest row is one of ``allowed``; open if its lead is not sure."""
    best = min(runs, key=lambda name: runs[name].tbt_ms)
    rivals = [n for n in runs if (n in allowed) != (best in allowed)]
    rival = min(rivals, key=lambda name: runs[name].tbt_ms)
    lead, low, high = speed_ratio(runs[best], runs[rival])
    ends = "" if low is None or high is None else f" ({low:.2f}-{high:.2f})"
    holds = (best in allowed) if surely(low, high) else None
    text = f"{title}; best: {best}, {lead:.2f}x{ends} of {rival}"
    loops = runs[best].summary["loop_share"]
    findings.add(claim, holds, "simulated", text, kind=draft.kind, loops=loops)
