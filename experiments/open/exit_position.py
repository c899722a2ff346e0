"""PPSD's exit position when transfers cost time: fewer, longer stages or more, shorter ones."""

from __future__ import annotations

from experiments.ppsd.exit_runs import exit_run
from experiments.reproduce.drawing import line_chart
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab


def transfer_latency(item: Item, lab: Lab) -> Findings:
    """Tokens per second of PPSD over exit positions, for several transfer times.

    Speed-ups are over plain decoding on one device, since a pipeline slows plain decoding. Keys:
    ``pass_ms``, ``exits``, ``transfer_ms``, ``words``.
    """
    findings, config = Findings(), item.config
    rows = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    one_device = 1e3 / config["pass_ms"]
    for transfer_ms in config["transfer_ms"]:
        xs, ys = series.setdefault(f"transfer {transfer_ms} ms", ([], []))
        for exit_layer in config["exits"]:
            times = {"pass_ms": config["pass_ms"], "transfer_ms": transfer_ms}
            outcome = exit_run(item, lab, exit_layer, **times, overrides=config["words"])
            speed, plain = 1e3 / outcome.run.tbt_ms, 1e3 / outcome.plain.tbt_ms
            per_device = speed / outcome.stages
            loops = outcome.run.summary["loop_share"]
            key = (transfer_ms, outcome.stages, exit_layer, outcome.alpha)
            rows.append((*key, plain, speed, speed / plain, speed / one_device, per_device, loops))
            xs.append(float(outcome.stages))
            ys.append(speed / one_device)
    columns = (
        *("transfer ms", "stages", "E", "alpha", "PP tokens/s", "PPSD tokens/s", "over PP"),
        *("over one device", "tokens/s per device", "loop_share"),
    )
    findings.table("Simulated, values of the bundled target", columns, rows)
    y = "speed-up over plain decoding on one device (times)"
    findings.figure = line_chart(series, x="stages (N / E)", y=y, title=item.stated.title)
    return findings
