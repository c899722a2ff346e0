"""Memory traffic of staged decoding over tree shapes and n-gram guesses."""

from __future__ import annotations

from experiments.reproduce.drafts import size_overrides
from experiments.reproduce.drawing import bar_chart
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab


def staged_shape(item: Item, lab: Lab) -> Findings:
    """Traffic of staged decoding over tree shapes and over how much the n-gram model guesses.

    Keys: ``data`` (overrides of model and data), ``pair`` (its name), ``trees`` (name ->
    branching), ``guesses`` (name -> overrides), ``share`` (draft over target weights of the paper).
    """
    findings, config = Findings(), item.config
    size = [*config["data"], *size_overrides(item, lab)]
    rows = []
    best: dict[str, dict[str, float | None]] = {}
    for tree, branching in config["trees"].items():
        for name, overrides in config["guesses"].items():
            shape = f"policy.branching={branching}".replace(" ", "")
            run = lab.run(["strategy=staged", *size, shape, *overrides])
            s = run.summary
            scaled = (s["target_passes"] + s["draft_passes"] * config["share"]) / s["new_tokens"]
            passes = s["draft_passes"] / s["target_passes"]
            row = (tree, name, s["acceptance_length"], passes, s["relative_memory_traffic"])
            rows.append((*row, scaled, s["rows_per_target_pass"], s["loop_share"]))
            best.setdefault(tree, {})[name] = scaled
    columns = (
        *("tree", "guesses", "accept length", "draft passes per target pass", "traffic, own sizes"),
        *("traffic, the paper's sizes", "nodes/pass", "loop_share"),
    )
    findings.table(f"Counts of runs on {config['pair']} (exact)", columns, rows)
    x, title = "tree (children per level); n-gram guesses by depth", item.stated.title
    y = "relative memory traffic at the paper's sizes"
    findings.figure = bar_chart(best, x=x, y=y, title=title, size=(9.0, 4.2), form="{:.2f}")
    return findings
