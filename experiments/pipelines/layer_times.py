"""Time of a pass on this machine over its number of rows (SpecPipe Fig. 9)."""

from __future__ import annotations

from typing import cast

from experiments.reproduce.drawing import band, figure, legend, lines, tidy
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from specdec.clocks import Work
from specdec.pairs import HuggingFacePair
from specdec.profiling.passes import measure_model

_CONTEXT = 128


def layer_times(item: Item, lab: Lab) -> Findings:
    """Milliseconds of a stage and of a draft pass over the rows of a pass, minimum of repeats.

    Other load of the machine only increases times, so the minimum is the best estimate.

    Keys: ``stages``, ``rows``, ``repeats``, ``flat_rows`` (rows within which time should be flat).
    """
    findings, config = Findings(), item.config
    rows = list(config["rows"])
    repeats = config["repeats"]["quick" if lab.quick else "full"]
    pair = cast("HuggingFacePair", lab.models())
    size = {"stages": config["stages"], "tokens": rows}
    samples = measure_model(pair, **size, repeats=repeats, context=_CONTEXT)
    ms = {
        work: {sample.tokens: min(sample.ms) for sample in samples[work]}
        for work in (Work.STAGE, Work.DRAFT)
    }
    stage = [ms[Work.STAGE][num] for num in rows]
    table = [(num, ms[Work.STAGE][num], ms[Work.DRAFT][num]) for num in rows]
    columns = ("rows", "stage ms", "draft pass ms")
    title = f"Least of {repeats}, {_CONTEXT} tokens of context, float32, one thread"
    findings.table(title, columns, table)
    flat = ms[Work.STAGE][config["flat_rows"]] / ms[Work.STAGE][8]
    where = f"this CPU, 1/{config['stages']} of the bundled target"
    text = f"{where}; {config['flat_rows']} rows take {flat:.2f} of the time of 8"
    findings.add("rises", stage[-1] > stage[0], "measured", where)
    findings.add("steps", flat < 1.1, "measured", text)
    fig, (ax,) = figure(6.5, 4.2)
    lines(ax, {"stage": (rows, stage), "draft": (rows, [ms[Work.DRAFT][n] for n in rows])})
    band(ax, 1, config["flat_rows"], "flat in the paper (Fig. 9)", vertical=True)
    tidy(ax, x="rows per pass (tokens)", y="time (ms, measured)", title=item.stated.title)
    legend(ax)
    findings.figure = fig
    return findings
