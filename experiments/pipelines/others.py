"""Tables of pipelines besides their TBT: memory, features, batches, latency formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.pipelines.tables import SIMULATED, run_rows
from experiments.reproduce.drafts import Draft, drafts
from experiments.reproduce.drawing import (
    band,
    doublings,
    figure,
    legend,
    line_chart,
    lines,
    tidy,
)
from experiments.reproduce.findings import Findings
from experiments.reproduce.intervals import Interval
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome, speed_ratio
from specdec.clocks import Work
from specdec.clocks.build import build_profile
from specdec.profiling.equations import StepTimes, pipedec_latency, plain_latency

_MIB, _GIB = 2**20, 2**30


def memory(item: Item, lab: Lab) -> Findings:
    """Memory per device from the model's shape, and what the tree adds (SpecPipe Table 1).

    Keys and values of tree nodes lie in the context budget that the totals hold already (4.5), so
    the tree adds its rows in flight and its mask.

    Keys: ``shape`` (hidden, layers, kv_heads, head_dim, ffn, vocab), ``devices``,
    ``context_tokens``, ``runtime_mib``, ``width``, ``levels``.
    """
    found, config = Findings(), item.config
    s = config["shape"]
    kv_size = s["kv_heads"] * s["head_dim"]
    layer = 2 * s["hidden"] ** 2 + 2 * s["hidden"] * kv_size + 3 * s["hidden"] * s["ffn"]
    layers = s["layers"] // config["devices"]
    kv_token = 2 * kv_size * 2 * layers  # bytes on one device: keys and values, 2 bytes each
    weights = 2 * layer * layers / _GIB
    cache = kv_token * config["context_tokens"] / _GIB
    runtime = config["runtime_mib"] * _MIB / _GIB
    middle = weights + cache + runtime
    table = 2 * s["hidden"] * s["vocab"] / _GIB
    width, nodes = config["width"], 1 + config["width"] * config["levels"]
    hidden = 2 * width * s["hidden"] * 2 / _MIB  # in and out, 2 bytes each
    mask = nodes**2 / _MIB
    rows = (
        ("parameters of a layer (millions)", layer / 1e6),
        (f"weights of {layers} layers, bf16 (GiB)", weights),
        (f"KV of {config['context_tokens']} tokens (GiB)", cache),
        ("embedding or output table (GiB)", table),
        ("runtime (GiB)", runtime),
        ("KV of one token on a device (KiB)", kv_token / 1024),
        (f"KV of {nodes} tree nodes, first stage (MiB, of the KV budget)", nodes * kv_token / _MIB),
        (f"hidden states of a level of {width}, in and out (MiB)", hidden),
        (f"mask of {nodes} nodes, a byte each (MiB)", mask),
    )
    found.table("Arithmetic on the model's shape", ("what", "value"), rows)
    for claim, value in (
        ("first", middle + table),
        ("middle", middle),
        ("last", middle + table),
        ("tree", hidden + mask),
    ):
        found.add(claim, value, "formula", config["conditions"])
    return found


def features(item: Item, lab: Lab) -> Findings:
    """What SpecPipe's row of Table 2 means here: a run, or a reason, per feature.

    Keys: ``common``, ``draft``, ``batch`` (presets that stand for feature 3).
    """
    from specdec.config.options import options

    found, config = Findings(), item.config
    presets = options("strategy", ())
    for draft in drafts([config["draft"]], item, lab, found):
        run = lab.run([*draft.words, SIMULATED, *config["common"]])
        step = 1e3 * run.summary["clock_s"] / run.summary["steps"]
        draft_ms = build_profile(run.config["clock"]).ms(Work.DRAFT, 1)
        batch = [name for name in config["batch"] if name in presets]
        facts: list[tuple[str, bool, str, str]] = [
            (
                "no_latency",
                draft_ms < step,
                "simulated",
                f"a draft pass of {draft_ms:.0f} ms beside a mean step of {step:.0f} ms",
            ),
            ("no_training", True, "formula", "any pair that shares a tokenizer runs as it is"),
            ("dynamic", True, "formula", "the tree grows and is pruned each step (specdec trace)"),
        ]
        if batch:
            facts.append(("large_batch", True, "formula", f"preset {', '.join(batch)}"))
        for claim, value, kind, text in facts:
            found.add(claim, bool(value), kind, text)
    return found


def batches(item: Item, lab: Lab) -> Findings:
    """Throughput and TBT over batch sizes.

    Keys: ``common``, ``drafts``, ``rows`` (name -> overrides), ``batch_sizes``, ``ratios`` (claim
    -> [metric, row, other row]: the middle over batch sizes from ``from_batch`` on is held against
    the claim), ``below`` (claim -> [metric, row, other]: at every batch size), ``overtakes`` (claim
    -> [metric, rows that end above, row]), ``batching`` (measured, see ``_batching``).
    """
    found, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    curves: dict[str, dict[str, dict[int, Outcome]]] = {}
    for draft in drafts(config["drafts"], item, lab, found):
        rows = curves.setdefault(draft.title, {})
        for name, words in config["rows"].items():
            fixed = any(word.startswith("batch_size=") for word in words)
            for size in config["batch_sizes"][:1] if fixed else config["batch_sizes"]:
                run = run_rows(
                    lab, draft, config["common"], {name: [f"batch_size={size}", *words]}
                )[name]
                rows.setdefault(name, {})[size] = run
                s = run.summary
                table.append(
                    (
                        draft.title,
                        name,
                        size,
                        s["throughput_tokens_per_s"],
                        s["tbt_ms_mean"],
                        s["tbt_ms_p99"],
                        s["tbt_ms_request_p99"],
                        s["loop_share"],
                    )
                )
            if fixed:
                (only,) = rows[name].values()
                rows[name] = dict.fromkeys(config["batch_sizes"], only)
        _add_batch_measures(found, config, draft, rows)
    columns = (
        *("draft", "row", "batch size", "tokens/s", "TBT ms", "p99 TBT ms"),
        *("p99 of requests' means, ms", "loop_share"),
    )
    found.table("Simulated, all requests present at the start", columns, table)
    if "batching" in config:
        _batching(config["batching"], lab, found)
    if curves:
        found.figure = _batch_figure(item, next(iter(curves.items())))
    return found


def _batching(config: Mapping[str, Any], lab: Lab, found: Findings) -> None:
    """Time outside model calls over time inside, real models on this machine, in one batch.

    Keys: ``claim``, ``words``.
    """
    run = lab.run(config["words"])
    totals = run.totals
    outside = totals.wall_s - totals.total_model_s - totals.wait_s
    text = f"bundled pair, this CPU, batch of {run.config['batch_size']}, all but model calls"
    loops = run.summary["loop_share"]
    found.add(config["claim"], outside / totals.total_model_s, "measured", text, loops=loops)


def _add_batch_measures(
    found: Findings,
    config: Mapping[str, Any],
    draft: Draft,
    rows: Mapping[str, Mapping[int, Outcome]],
) -> None:
    def value(name: str, size: int, metric: str) -> float:
        return float(rows[name][size].summary[metric])

    sizes = list(config["batch_sizes"])
    loops = next(iter(next(iter(rows.values())).values())).summary["loop_share"]
    for claim, ratios in _batch_ratios(config, rows).items():
        later = {size: r for size, r in ratios.items() if size >= config.get("from_batch", 1)}
        size = sorted(later, key=lambda size: later[size])[len(later) // 2]
        metric, mine, other = config["ratios"][claim]
        ends: Interval = (None, None)
        if metric.startswith("tbt"):
            _, low, high = speed_ratio(rows[mine][size], rows[other][size])
            ends = (low, high)
        spread = f"{min(later.values()):.2f} to {max(later.values()):.2f} over batches of"
        where = f"{draft.title}; batch {size}; {spread} {min(later)} to {max(later)}"
        found.add(claim, later[size], "simulated", where, loops=loops, interval=ends)
    for claim, (metric, mine, other) in config.get("below", {}).items():
        worst = max(value(mine, size, metric) / value(other, size, metric) for size in sizes)
        where = f"{draft.title}; at worst {worst:.2f} of it"
        found.add(claim, worst < 1.0, "simulated", where, loops=loops)
    for claim, (metric, others, mine) in config.get("overtakes", {}).items():
        last = sizes[-1]
        ahead = {name: value(name, last, metric) / value(mine, last, metric) for name in others}
        text = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ahead.items())
        above = all(r > 1 for r in ahead.values())
        where = f"{draft.title}; batch {last}: {text}"
        found.add(claim, above, "simulated", where, loops=loops)


def _batch_ratios(
    config: Mapping[str, Any], rows: Mapping[str, Mapping[int, Outcome]]
) -> dict[str, dict[int, float]]:
    """claim -> batch size -> how far one row is ahead of another (of times: the inverse)."""
    found: dict[str, dict[int, float]] = {}
    for claim, (metric, mine, other) in config.get("ratios", {}).items():
        for size in config["batch_sizes"]:
            one, two = (float(rows[name][size].summary[metric]) for name in (mine, other))
            ratio = two / one if metric.startswith("tbt") else one / two
            found.setdefault(claim, {})[size] = ratio
    return found


def _batch_figure(item: Item, found: tuple[str, Mapping[str, Mapping[int, Outcome]]]) -> Any:
    title, rows = found
    sizes = item.config["batch_sizes"]
    ratios = _batch_ratios(item.config, rows)
    made, (left, right, *more) = figure(10.5 + 3.5 * bool(ratios), 4.6, 2 + bool(ratios))
    by_size = {
        name: (sizes, [runs[size].summary["tbt_ms_p99"] for size in sizes])
        for name, runs in rows.items()
    }
    plane = {
        name: (
            [run.tbt_ms for run in runs.values()],
            [run.summary["throughput_tokens_per_s"] for run in runs.values()],
        )
        for name, runs in rows.items()
    }
    lines(left, plane)
    tidy(
        left,
        x="time between tokens (ms, simulated)",
        y="throughput (tokens/s, simulated)",
        title=title,
    )
    lines(right, by_size)
    y = "p99 time between tokens (ms, simulated)"
    if any("request" in metric for metric, *_ in item.config.get("below", {}).values()):
        y += "\ndotted: p99 of requests' means"
        for line, runs in zip(right.get_lines(), rows.values(), strict=True):
            tail = [runs[size].summary["tbt_ms_request_p99"] for size in sizes]
            right.plot(sizes, tail, ls=":", marker="o", ms=4, color=line.get_color())
    doublings(right, sizes)
    tidy(right, x="batch size (requests)", y=y, title=item.id)
    for ax in more:
        claims = item.stated.claims
        lines(ax, {claims[c].text: (sizes, list(by.values())) for c, by in ratios.items()})
        for claim in (claims[c] for c in ratios):
            band(ax, *claim.ends, f"stated: {claim.text.split(', ')[-1]}, {claim.stated}")
        doublings(ax, sizes)
        tidy(ax, x="batch size (requests)", y="ratio (times, simulated)")
        legend(ax)
    legend(left)
    return made


def latency_formulas(item: Item, lab: Lab) -> Findings:
    """PipeDec 2.4: PP = sum T_c + sum T_t; PipeDec = max(T_draft, C max T_c + max T_t).

    Keys: ``drafts``, ``stages``, ``width``, ``plain``, ``dynamic`` (overrides; ``{stages}`` is
    filled in), claims ``pp`` and ``pipedec``.
    """
    found, config = Findings(), item.config
    table = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    for draft in drafts(config["drafts"], item, lab, found):
        off: dict[str, list[float]] = {"pp": [], "pipedec": []}
        for stages in config["stages"]:
            rows = {
                name: [word.format(stages=stages) for word in config[key]]
                for name, key in (("PP", "plain"), ("PipeDec", "dynamic"))
            }
            runs = run_rows(lab, draft, [], rows)
            laws = _latency_laws(runs["PP"], stages, config["width"])
            for key, run in zip(off, runs.values(), strict=True):
                off[key].append(100 * (laws[key] / run.tbt_ms - 1))
                hit, share = run.summary["hit_rate"], run.summary["loop_share"]
                found_ms = (laws[key], run.tbt_ms, off[key][-1])
                table.append((draft.title, key, stages, *found_ms, hit, share))
        loops = table[-1][-1]
        series[draft.short] = (config["stages"], off["pipedec"])
        for key, errors in off.items():
            worst = max(errors, key=abs)
            found.add(
                config[f"claim_{key}"],
                abs(worst) <= 5.0,
                "simulated",
                f"{draft.title}; the formula is {worst:+.1f} % off",
                loops=loops,
            )
    columns = (
        *("draft", "method", "stages", "formula ms", "simulated ms", "formula off, %"),
        *("hit rate", "loop_share"),
    )
    found.table("Latency per token", columns, table)
    y = "PipeDec's formula against the simulator (per cent)"
    met = (-5.0, 5.0, "met: within 5 %")
    found.figure = line_chart(series, x="stages", y=y, title=item.stated.title, within=met)
    return found


def _latency_laws(run: Outcome, stages: int, width: int) -> dict[str, float]:
    """Milliseconds per token by the formulas, from a run's profile."""
    profile = build_profile(run.config["clock"])
    one, full = (StepTimes.of(profile, width=num, stages=stages) for num in (1, width))
    return {"pp": plain_latency(one), "pipedec": pipedec_latency(full)}


def small_model(item: Item, lab: Lab) -> Findings:
    """PipeDec's TBT against a small model alone, whose pass is stated.

    Keys: ``drafts``, ``dynamic``, ``small_ms``, ``claim``, ``near`` (ratio that still approaches).
    """
    found, config = Findings(), item.config
    rows = []
    for draft in drafts(config["drafts"], item, lab, found):
        run = run_rows(lab, draft, [], {"PipeDec": config["dynamic"]})["PipeDec"]
        ratio = run.tbt_ms / config["small_ms"]
        rows.append((draft.title, run.tbt_ms, config["small_ms"], ratio, run.summary["loop_share"]))
        found.add(
            config["claim"],
            ratio <= config["near"],
            "simulated",
            f"{draft.title}; {ratio:.2f} of the small model's time",
            loops=run.summary["loop_share"],
        )
    columns = ("draft", "PipeDec TBT ms", "8B alone ms (stated)", "ratio", "loop_share")
    found.table("70B in a pipeline against 8B alone", columns, rows)
    return found
