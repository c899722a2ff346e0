"""The paced column: real processes paced by a latency profile, a rank per stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.reproduce.findings import Findings
from experiments.reproduce.lab import Lab
from specdec.metrics.compare import speed_ratio_interval
from specdec.report.results import read_requests


def add_paced(config: Mapping[str, Any], lab: Lab, findings: Findings) -> None:
    """Runs ``paced`` of an item's config: strategies interleaved on the same prompts.

    Rows with more than 2 % overruns do not count and are reported as missing.

    Args:
        config: ``words`` (overrides of ``specdec compare``), ``where`` (conditions as text),
            ``ratios`` (claim -> [slow, fast], two strategies), ``follows`` (claim -> a strategy
            whose speed-up over ``ar`` should be within 5 per cent of its law's), ``pair`` and
            ``kind`` of verdicts if the pair is not the bundled one.
    """
    compared = lab.compare(config["words"])
    rows = {row["strategy"]: row for row in compared["rows"]}
    virtual = ("clock=simulated", "executor.transport=in_process")
    simulated = {row["strategy"]: row for row in lab.compare([*config["words"], *virtual])["rows"]}
    first = next(iter(rows.values()))
    table = tuple(
        (
            *(name, row["tbt_ms_mean"], simulated[name]["tbt_ms_mean"]),
            first["tbt_ms_mean"] / row["tbt_ms_mean"],
            *(row["overrun_share"], row["hit_rate"], row["acceptance_length"]),
            *(row["num_differing"] == 0, row["loop_share"], row["num_prompts"], row["repeats"]),
        )
        for name, row in rows.items()
    )
    columns = (
        *("row", "TBT ms (clock.scale times the profile's)", "the same simulated"),
        *(f"over {first['strategy']}", "overrun_share", "hit rate", "accept length"),
        *("tokens as the first row", "loop_share", "prompts", "repeats"),
    )
    findings.table("Paced: a process per stage, real messages", columns, table)
    records = read_requests(compared["folder"] / "requests.jsonl")
    pairs = {claim: (slow, fast) for claim, (slow, fast) in config.get("ratios", {}).items()}
    pairs |= {claim: ("ar", fast) for claim, fast in config.get("follows", {}).items()}
    for claim, (slow, fast) in pairs.items():
        overrun = [name for name in (slow, fast) if not rows[name]["paced_counts"]]
        for name in overrun:
            share = f"{100 * rows[name]['overrun_share']:.1f} %"
            findings.missing.append(f"paced {name}: {share} of its work overran its profile")
        if overrun:
            continue
        ours, other = ([r.result for r in records if r.strategy == n] for n in (fast, slow))
        ends = speed_ratio_interval(ours, other) or (None, None)
        value = rows[slow]["tbt_ms_mean"] / rows[fast]["tbt_ms_mean"]
        loops, text = (
            rows[fast]["loop_share"],
            f"{config.get('pair', 'bundled pair')}, {config['where']}",
        )
        if claim in config.get("ratios", {}):
            kind = config.get("kind", "")
            findings.add(claim, value, "paced", text, kind=kind, loops=loops, interval=ends)
            continue
        law = rows[fast]["speedup_law"]
        text += f": {value:.2f}x, law {law:.2f}x, wall over theory {value / law:.2f}"
        findings.add(claim, abs(value / law - 1.0) <= 0.05, "paced", text, loops=loops)
