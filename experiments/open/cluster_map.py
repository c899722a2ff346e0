"""Which method for which cluster: devices, draft cost and network latency at equal hits.

The target's pass is split evenly over the stages; there is a transfer between stages and one for
each answer. Each cell has a generated profile, marked as an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.reproduce.drafts import SIMULATED, make_draft
from experiments.reproduce.drawing import figure, styles
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome
from experiments.reproduce.profiles import write_profile

Cell = tuple[int, float, float]


def cluster_map(item: Item, lab: Lab) -> Findings:
    """The fastest method per cell, in tokens/s and in tokens/s per device.

    Keys: ``draft`` (whose hits), ``target_ms``, ``devices``, ``draft_ms``, ``transfer_ms``,
    ``methods`` (name -> overrides; ``local`` ones use one device, all others one per stage and one
    for the draft where they have one: ``extra``).
    """
    findings, config = Findings(), item.config
    draft = make_draft(config["draft"], item, lab)
    best: dict[Cell, dict[str, tuple[float, float]]] = {}
    loops: float | None = None
    for transfer_ms in config["transfer_ms"]:
        for draft_ms in config["draft_ms"]:
            for devices in config["devices"]:
                cell = (devices, draft_ms, transfer_ms)
                best[cell], loops = _speeds(config, lab, draft.overrides, cell)
    rows = []
    for (devices, draft_ms, transfer_ms), speeds in best.items():
        fastest = max(speeds, key=lambda name: speeds[name][0])
        thrifty = max(speeds, key=lambda name: speeds[name][1])
        each = (f"{speeds[name][0]:.1f}" for name in config["methods"])
        rows.append((devices, draft_ms, transfer_ms, *each, fastest, thrifty, loops))
    columns = (
        *("stages", "draft ms", "transfer ms", *(f"{n}, tokens/s" for n in config["methods"])),
        *("fastest", "most tokens/s per device", "loop_share"),
    )
    title = f"{draft.title}; target pass {config['target_ms']:g} ms"
    findings.table(title, columns, rows)
    findings.figure = _map_figure(item, config, best)
    return findings


def _speeds(
    config: Mapping[str, Any], lab: Lab, draft: Sequence[str], cell: Cell
) -> tuple[dict[str, tuple[float, float]], float | None]:
    """(tokens/s, tokens/s per device) by method for one cell, and the loop share of the hits."""
    devices, draft_ms, transfer_ms = cell
    speeds, loops = {}, None
    for name, method in config["methods"].items():
        used = 1 if method.get("local") else devices
        path = write_profile(
            lab.folder,
            target_ms=config["target_ms"],
            stages=used,
            draft_ms=draft_ms,
            transfer_ms=0.0 if used == 1 else transfer_ms,
        )
        where = [] if method.get("local") else ["executor=pipeline", f"executor.stages={used}"]
        overrides = [*draft, SIMULATED, f"clock.profile={path}", *method["words"], *where]
        run: Outcome = lab.run(overrides)
        speed, loops = 1e3 / run.tbt_ms, run.summary["loop_share"]
        speeds[name] = (speed, speed / (used + method.get("extra", 0)))
    return speeds, loops


def _map_figure(
    item: Item, config: Mapping[str, Any], best: Mapping[Cell, Mapping[str, tuple[float, float]]]
) -> Any:
    """One panel per transfer time and measure: the winner's colour and speed in every cell."""
    looks = styles(config["methods"])
    panels = [(ms, which) for which in (0, 1) for ms in config["transfer_ms"]]
    fig, axes = figure(3.1 * len(panels), 3.9, len(panels))
    for ax, (transfer_ms, which) in zip(axes, panels, strict=True):
        for x, devices in enumerate(config["devices"]):
            for y, draft_ms in enumerate(config["draft_ms"]):
                speeds = best[devices, draft_ms, transfer_ms]
                winner = max(looks, key=lambda name: speeds[name][which])
                look = {**looks[winner].bar(), "lw": 1.0}
                ax.bar(x, 1.0, 1.0, bottom=y - 0.5, **look)
                text = f"{speeds[winner][which]:.1f}" if which == 0 else f"{speeds[winner][1]:.2f}"
                ax.text(x, y, text, ha="center", va="center", fontsize=8, color="white")
        ax.set_xticks(range(len(config["devices"])), config["devices"], fontsize=8)
        ax.set_yticks(range(len(config["draft_ms"])), config["draft_ms"], fontsize=8)
        ax.set_xlabel("pipeline stages (devices)", fontsize=8)
        ax.set_ylabel("draft pass (ms)", fontsize=8)
        what = "tokens/s" if which == 0 else "tokens/s per device"
        ax.set_title(f"{what}, transfer {transfer_ms:g} ms", fontsize=8.5)
    for name, style in looks.items():
        axes[0].plot([], [], marker="s", lw=0, ms=8, color=style.color, label=name)
    fig.legend(loc="outside lower center", ncols=len(looks), fontsize=8, frameon=False)
    fig.suptitle(f"{item.stated.title} (simulated; fastest method per cell)", fontsize=10)
    return fig
