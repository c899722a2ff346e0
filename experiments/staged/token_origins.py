"""Staged's text coloured by the model that could have given each token (Fig. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from experiments.reproduce.drawing import figure, legend, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from experiments.staged.measured_runs import compared
from specdec.report.results import read_requests
from specdec.sources.katz import KatzModel


def origins(item: Item, lab: Lab) -> Findings:
    """Fig. 3: a text coloured by the model that could have given each token.

    A token counts for the n-gram model if it is among its ``guesses`` best after the two preceding
    tokens; else for the draft if the target accepted it from the tree; else for the target.
    Keys: ``samplings`` (the first is shown), ``guesses``.
    """
    findings, config = Findings(), item.config
    pair = lab.models()
    katz = pair.artefact(KatzModel)
    result = compared(item, lab, next(iter(config["samplings"])))
    records = [
        r for r in read_requests(result["folder"] / "requests.jsonl") if r.strategy == "staged"
    ]
    names = ("n-gram", "draft", "target")
    counts = {"white space": dict.fromkeys(names, 0), "other": dict.fromkeys(names, 0)}
    shown: list[tuple[str, str]] = []
    longest = max(range(len(records)), key=lambda i: len(records[i].result.output))
    for number, record in enumerate(records):
        output = np.asarray(record.result.output)
        width = katz.order - 1
        windows = [output[i - width : i] for i in range(width, len(output))]
        if not windows:
            continue
        best, _ = katz.top(np.stack(windows), config["guesses"])
        for i, guesses in zip(range(width, len(output)), best, strict=True):
            drafted = record.result.origins[i] >= 0
            origin = "n-gram" if output[i] in guesses else "draft" if drafted else "target"
            text = str(pair.tokenizer.decode([int(output[i])]))
            counts["other" if text.strip() else "white space"][origin] += 1
            if number == longest:
                shown.append((text, origin))
    loops = next(r["loop_share"] for r in result["rows"] if r["strategy"] == "staged")
    shares = {
        kind: {n: c / max(1, sum(of_kind.values())) for n, c in of_kind.items()}
        for kind, of_kind in counts.items()
    }
    rows = [
        (kind, *of_kind.values(), sum(counts[kind].values()), loops)
        for kind, of_kind in shares.items()
    ]
    columns = ("tokens", *names, "count", "loop_share")
    findings.table("Share of tokens by origin", columns, rows)
    value = shares["white space"]["n-gram"]
    rest = shares["other"]["n-gram"]
    text = f"{100 * value:.0f} % of white space, {100 * rest:.0f} % of the rest"
    findings.add("white_space", value > rest, "measured", text, loops=loops)
    findings.figure = _coloured(shown, item.stated.title)
    return findings


def _coloured(shown: Sequence[tuple[str, str]], title: str) -> Any:
    """Text with a background colour per token, in a grid of letters."""
    colors = {"n-gram": "#bfe3bf", "draft": "#c6d8f0", "target": "#f3c1c1"}
    columns, row, column, widest = 84, 0, 0, 0
    num_lines = sum(1 + len(part) // columns for part in "".join(t for t, _ in shown).split("\n"))
    fig, (ax,) = figure(8.6, 1.8 + 0.18 * num_lines)
    for text, origin in shown:
        for letter in text.replace("\t", "    "):
            if letter == "\n" or column >= columns:
                row, column = row + 1, 0
            mark = "." if letter == " " else letter
            if letter != "\n":
                ax.add_patch(Rectangle((column, row), 1, 1, color=colors[origin], lw=0))
                ax.text(
                    column + 0.5, row + 0.7, mark, fontsize=6.5, family="monospace", ha="center"
                )
                column += 1
                widest = max(widest, column)
    for origin, color in colors.items():
        ax.plot([], [], marker="s", lw=0, ms=8, color=color, label=origin)
    ax.set_xlim(0, max(40, widest))
    ax.set_ylim(row + 1, 0)
    tidy(ax, x="letters of a line (a dot: a space)", y="lines", title=title)
    legend(ax)
    return fig
