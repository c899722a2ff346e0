"""Throughput and time between tokens over batch sizes (SpecPipe Fig. 16, 17; PipeDec Fig. 8)."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from experiments.reproduce.drafts import Draft, drafts
from experiments.reproduce.drawing import band, doublings, figure, legend, lines, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.intervals import Interval
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio

_FIGURES = (
    *("throughput_tokens_per_s", "tbt_ms_mean", "tbt_ms_p99", "tbt_ms_request_p99"),
    "loop_share",
)


def batches(item: Item, lab: Lab) -> Findings:
    """Throughput and TBT over batch sizes.

    Keys: ``common``, ``drafts``, ``rows`` (name -> overrides), ``batch_sizes``, ``ratios``
    (claim -> [metric, row, other row]: a figure for every batch size from ``from_batch`` on),
    ``below`` (claim -> [metric, row, other]: at every batch size), ``overtakes`` (claim ->
    [metric, rows above at the largest size, row]).
    """
    findings, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    curves: dict[str, dict[str, dict[int, Outcome]]] = {}
    for draft in drafts(config["drafts"], item, lab, findings):
        rows = curves.setdefault(draft.title, {})
        for name, overrides in config["rows"].items():
            fixed = any(word.startswith("batch_size=") for word in overrides)
            for size in config["batch_sizes"][:1] if fixed else config["batch_sizes"]:
                words = draft.words(*config["common"], f"batch_size={size}", *overrides)
                run = rows.setdefault(name, {})[size] = lab.run(words)
                table.append((draft.title, name, size, *(run.summary[key] for key in _FIGURES)))
            if fixed:
                (only,) = rows[name].values()
                rows[name] = dict.fromkeys(config["batch_sizes"], only)
        _add_batch_measures(findings, config, draft, rows)
    columns = (
        *("draft", "row", "batch size", "tokens/s", "TBT ms", "p99 TBT ms"),
        *("p99 of requests' means, ms", "loop_share"),
    )
    findings.table("Simulated, all requests present at the start", columns, table)
    if curves:
        findings.figure = _batch_figure(item, next(iter(curves.items())))
    return findings


def batching(item: Item, lab: Lab) -> Findings:
    """Time outside model calls over time inside them, with real models in one batch.

    Keys: ``claim``, ``words``.
    """
    findings, run = Findings(), lab.run(item.config["words"])
    totals = run.totals
    outside = totals.wall_s - totals.total_model_s - totals.wait_s
    text = f"bundled pair, this CPU, batch of {run.config['batch_size']}, all but model calls"
    loops = run.summary["loop_share"]
    share = outside / totals.total_model_s
    findings.add(item.config["claim"], share, "measured", text, loops=loops)
    return findings


def _add_batch_measures(
    findings: Findings,
    config: Mapping[str, Any],
    draft: Draft,
    rows: Mapping[str, Mapping[int, Outcome]],
) -> None:
    def value(name: str, size: int, metric: str) -> float:
        return float(rows[name][size].summary[metric])

    sizes = list(config["batch_sizes"])
    first = next(iter(next(iter(rows.values())).values()))
    for claim, ratios in _batch_ratios(config, rows).items():
        metric, ours, other = config["ratios"][claim]
        for size, ratio in ratios.items():
            if size < config.get("from_batch", 1):
                continue
            ends: Interval = (None, None)
            if metric.startswith("tbt"):
                ends = speed_ratio(rows[ours][size], rows[other][size])[1:]
            draft.add(findings, claim, ratio, f"batch {size}", run=first, interval=ends)
    for claim, (metric, ours, other) in config.get("below", {}).items():
        worst = max(value(ours, size, metric) / value(other, size, metric) for size in sizes)
        draft.add(findings, claim, worst < 1.0, f"at worst {worst:.2f} of it", run=first)
    for claim, (metric, others, ours) in config.get("overtakes", {}).items():
        last = sizes[-1]
        ahead = {name: value(name, last, metric) / value(ours, last, metric) for name in others}
        text = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ahead.items())
        above = all(r > 1 for r in ahead.values())
        draft.add(findings, claim, above, f"batch {last}: {text}", run=first)


def _batch_ratios(
    config: Mapping[str, Any], rows: Mapping[str, Mapping[int, Outcome]]
) -> dict[str, dict[int, float]]:
    """Ratio of two rows by claim and batch size; inverted for times, so that above 1 is ahead."""
    all_ratios: dict[str, dict[int, float]] = {}
    for claim, (metric, ours, other) in config.get("ratios", {}).items():
        for size in config["batch_sizes"]:
            one, two = (float(rows[name][size].summary[metric]) for name in (ours, other))
            ratio = two / one if metric.startswith("tbt") else one / two
            all_ratios.setdefault(claim, {})[size] = ratio
    return all_ratios


def _batch_figure(item: Item, curve: tuple[str, Mapping[str, Mapping[int, Outcome]]]) -> Any:
    title, rows = curve
    sizes = item.config["batch_sizes"]
    ratios = _batch_ratios(item.config, rows)
    fig, (left, right, *more) = figure(10.5 + 3.5 * bool(ratios), 4.6, 2 + bool(ratios))

    def values(runs: Mapping[int, Outcome], metric: str) -> list[float]:
        return [runs[size].summary[metric] for size in sizes]

    keys = ("tbt_ms_mean", "throughput_tokens_per_s")
    lines(left, {n: (values(runs, keys[0]), values(runs, keys[1])) for n, runs in rows.items()})
    x, y = "time between tokens (ms, simulated)", "throughput (tokens/s, simulated)"
    tidy(left, x=x, y=y, title=fill(title, 50))
    lines(right, {n: (sizes, values(runs, "tbt_ms_p99")) for n, runs in rows.items()})
    y = "p99 time between tokens (ms, simulated)"
    if any("request" in metric for metric, *_ in item.config.get("below", {}).values()):
        y += "\ndotted: p99 of requests' means"
        for line, runs in zip(right.get_lines(), rows.values(), strict=True):
            look = {"ls": ":", "marker": "o", "ms": 4, "color": line.get_color()}
            right.plot(sizes, values(runs, "tbt_ms_request_p99"), **look)
    doublings(right, sizes)
    tidy(right, x="batch size (requests)", y=y)
    for ax in more:
        claims = item.stated.claims
        lines(ax, {claims[c].text: (sizes, list(by.values())) for c, by in ratios.items()})
        for claim in (claims[c] for c in ratios):
            band(ax, *claim.ends, f"stated: {claim.text.split(', ')[-1]}, {claim.stated}")
        doublings(ax, sizes)
        tidy(ax, x="batch size (requests)", y="ratio (times, simulated)")
        legend(ax)
    legend(left)
    fig.suptitle(f"{item.id}: {item.stated.title}", fontsize=10, x=0.01, ha="left")
    return fig
