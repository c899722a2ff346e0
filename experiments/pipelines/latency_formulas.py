"""PipeDec's latency formulas against the simulator, and its TBT against a small model's."""

from __future__ import annotations

from experiments.pipelines.token_times import run_rows, tbt_interval
from experiments.reproduce.drafts import drafts
from experiments.reproduce.drawing import line_chart
from experiments.reproduce.findings import Findings, below
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome
from specdec.clocks import Work
from specdec.clocks.build import build_profile


def latency_formulas(item: Item, lab: Lab) -> Findings:
    """PipeDec 2.4: PP = sum T_c + sum T_t; PipeDec = max(T_draft, C max T_c + max T_t).

    Keys: ``drafts``, ``stages``, ``plain``, ``dynamic`` (overrides; ``{stages}`` is filled in),
    claims ``pp`` and ``pipedec``, ``claims_of`` (the draft that decides them).
    """
    findings, config = Findings(), item.config
    table = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    for draft in drafts(config["drafts"], item, lab, findings):
        off: dict[str, list[float]] = {"pp": [], "pipedec": []}
        for stages in config["stages"]:
            rows = {
                name: [word.format(stages=stages) for word in config[key]]
                for name, key in (("PP", "plain"), ("PipeDec", "dynamic"))
            }
            runs = run_rows(lab, draft, [], rows)
            rows_per_pass = round(runs["PipeDec"].summary["rows_per_target_pass"])
            laws = _latency_laws(runs["PP"], stages, rows_per_pass)
            for key, run in zip(off, runs.values(), strict=True):
                off[key].append(100 * (laws[key] / run.tbt_ms - 1))
                hit, share = run.summary["hit_rate"], run.summary["loop_share"]
                found_ms = (laws[key], run.tbt_ms, off[key][-1])
                table.append((draft.title, key, stages, *found_ms, hit, share))
        series[draft.short] = (config["stages"], off["pipedec"])
        for key, errors in off.items() if draft.name == config["claims_of"] else ():
            worst = max(errors, key=abs)
            text = f"the formula is {worst:+.1f} % off"
            draft.add(findings, config[f"claim_{key}"], abs(worst) <= 5.0, text, run=run)
    columns = (
        *("draft", "method", "stages", "formula ms", "simulated ms", "formula off, %"),
        *("hit rate", "loop_share"),
    )
    findings.table("Latency per token", columns, table)
    y = "PipeDec's formula against the simulator (per cent)"
    met = (-5.0, 5.0, "met: within 5 %")
    findings.figure = line_chart(series, x="stages", y=y, title=item.stated.title, within=met)
    return findings


def _latency_laws(run: Outcome, stages: int, rows: int) -> dict[str, float]:
    """Milliseconds per token by the formulas, from a run's profile; ``rows`` are PipeDec's nodes
    per level, and the maxima over stages those of the slowest.
    """
    ms, devices = build_profile(run.config["clock"]).ms, range(1, stages + 1)
    plain = sum(ms(Work.STAGE, 1, device) for device in devices)
    plain += (stages - 1) * ms(Work.TRANSFER, 1)  # a transfer less
    pipedec = max(ms(Work.DRAFT, rows), ms(Work.STAGE, rows) + ms(Work.TRANSFER, rows))
    return {"pp": plain, "pipedec": pipedec}


def small_model(item: Item, lab: Lab) -> Findings:
    """PipeDec's TBT against a small model alone, whose pass is stated.

    Keys: ``drafts``, ``dynamic``, ``small_ms``, ``claim``, ``near`` (ratio that still approaches).
    """
    findings, config = Findings(), item.config
    rows = []
    for draft in drafts(config["drafts"], item, lab, findings):
        run = run_rows(lab, draft, [], {"PipeDec": config["dynamic"]})["PipeDec"]
        ratio = run.tbt_ms / config["small_ms"]
        rows.append((draft.title, run.tbt_ms, config["small_ms"], ratio, run.summary["loop_share"]))
        near = below(tbt_interval(run), config["near"] * config["small_ms"])
        text = f"{ratio:.2f} of the small model's time"
        draft.add(findings, config["claim"], near, text, run=run)
    columns = ("draft", "PipeDec TBT ms", "8B alone ms (stated)", "ratio", "loop_share")
    findings.table("70B in a pipeline against 8B alone", columns, rows)
    return findings
