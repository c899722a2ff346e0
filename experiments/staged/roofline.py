"""Staged's roofline (Fig. 1)."""

from __future__ import annotations

import numpy as np

from experiments.reproduce.drawing import figure, legend, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab


def roofline(item: Item, lab: Lab) -> Findings:
    """Fig. 1: arithmetic on the stated speeds. Keys: ``parameters``, ``bytes``, ``tokens_per_s``,
    ``peak_flops``, ``peak_bytes``, ``traffic`` (label -> relative traffic)."""
    findings, config = Findings(), item.config
    flops = 2.0 * config["parameters"] * config["tokens_per_s"]
    moved = config["parameters"] * config["bytes"] * config["tokens_per_s"]
    where = "arithmetic: 2 operations and 2 bytes per parameter and token"
    findings.add("intensity", flops / moved, "formula", where)
    where += f"; {config['peak_flops'] / 1e12:.0f} TFLOP/s"
    findings.add("utilisation", 100 * flops / config["peak_flops"], "formula", where)
    points = {"baseline": 1.0, **config["traffic"]}
    rows = tuple((n, 1.0 / t, 100 * moved / config["peak_bytes"]) for n, t in points.items())
    columns = ("row", "FLOP/byte", "bandwidth used by the baseline, %")
    findings.table("Operations per byte of weights", columns, rows)
    fig, (ax,) = figure(6.5, 4.0)
    xs = np.logspace(-1, 3, 60)
    roof = np.minimum(xs * config["peak_bytes"], config["peak_flops"]) / 1e12
    ax.plot(xs, roof, color="#4a4a4a", lw=1.4, label="RTX 4090 (public figures)")
    for i, (name, part) in enumerate(points.items()):
        speed_of = config["speeds"][name] * 2.0 * config["parameters"] / 1e12
        ax.plot([1.0 / part], [speed_of], lw=0, marker="os^Dv"[i], ms=7, label=f"{name}, stated")
    ax.set_xscale("log")
    ax.set_yscale("log")
    x, y = "arithmetic intensity (FLOP per byte)", "useful TFLOP/s (computed)"
    tidy(ax, x=x, y=y, title=item.stated.title)
    legend(ax)
    findings.figure = fig
    return findings
