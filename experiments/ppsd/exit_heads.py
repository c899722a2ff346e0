"""Exit heads of PPSD: acceptance by head (Fig. 5) and the training recipe (Table 4, D.1)."""

from __future__ import annotations

import json
from importlib import resources

from experiments.ppsd.exit_runs import add_runs
from experiments.ppsd.laws import eq6_speedup
from experiments.reproduce.drawing import bar_chart
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab


def heads(item: Item, lab: Lab) -> Findings:
    """Fig. 5 from stated cells. Keys: ``acceptance`` (model -> head -> per set, %), ``theory``,
    ``runs`` (see ``add_runs``)."""
    findings, config = Findings(), item.config
    by_head = config["acceptance"]
    pairs = (zip(of["norm"], of["transformer"], strict=True) for of in by_head.values())
    lower = all(norm < own for pair in pairs for norm, own in pair)
    theory = config["theory"]
    law = eq6_speedup(theory["alpha"], theory["exit_layer"], theory["layers"])
    findings.add("lower", lower, "formula", "stated cells of Tables 6, 7")
    findings.add("gsm8k", law, "formula", f"Eq. 6 at alpha {theory['alpha']}")
    add_runs(item, lab, findings, config["runs"])
    names = ("XSum", "GSM8K", "HumanEval")
    rows = tuple((m, head, *values) for m, pair in by_head.items() for head, values in pair.items())
    findings.table("Stated acceptance, %", ("model", "head", *names), rows)
    shown = {
        f"{model}\n{name}": {head: values[i] for head, values in pair.items()}
        for model, pair in by_head.items()
        for i, name in enumerate(names)
    }
    x, y, title = "model, data set", "acceptance rate (per cent, stated)", item.stated.title
    findings.figure = bar_chart(shown, x=x, y=y, title=title, size=(6.5, 3.7))
    return findings


def training(item: Item, lab: Lab) -> Findings:
    """Table 4 and D.1: the recipe's defaults and the shipped heads, without training.

    Claims: KIND_VALUE of Table 4 (``norm_batch``). Keys: ``absent``.
    """
    from specdec.train.heads import STATED

    findings = Findings()
    where = "default of `specdec train exit`"
    for claim in item.stated.claims:
        kind, _, name = claim.partition("_")
        if name:
            findings.add(claim, float(getattr(STATED[kind], name)), "formula", where)
    rows = []
    heads = resources.files("specdec.assets") / "tiny" / "heads"
    for path in sorted(heads.iterdir(), key=lambda path: path.name):
        if path.name.startswith("measured-"):
            for cell in json.loads(path.read_text(encoding="utf-8")):
                size = (cell["prompts"], cell["tokens"], cell["loop_share"])
                rows.append(
                    (cell["head"], cell["data"], cell["sampling"], cell["outside"][0], *size)
                )
    columns = (
        *("head", "data", "sampling", "top-1 agreement outside loops", "prompts", "tokens"),
        "loop_share",
    )
    title = "Heads that ship (measured when they were trained; docs/early_exit.md)"
    findings.table(title, columns, rows)
    return findings
