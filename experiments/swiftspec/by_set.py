"""SwiftSpec's Table 6 set by set: guesses per pass and speed of both forms."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from experiments.reproduce.drafts import drafts
from experiments.reproduce.findings import Findings
from experiments.reproduce.intervals import accepted_of, interval, share
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome


def add_sets(item: Item, lab: Lab, findings: Findings, config: Mapping[str, Any]) -> None:
    """Adds a figure per form and set, the mean speeds, and the mean loss.

    Guesses are accepted tokens per pass without the bonus token, as Table 6 counts; the draft
    ``set_NAME`` gives the claim ``FORM_NAME``. Speeds are the mean of the sets' tokens per second.

    Args:
        item: has the claims, ``common`` and the sizes.
        lab: runs.
        findings: extended by measures and a table.
        config: ``drafts`` (one per set), ``forms`` (parallel and serial: overrides), ``speeds``
            (form -> claim), ``loss`` (claim).
    """
    table = []
    runs: dict[str, list[Outcome]] = {form: [] for form in config["forms"]}
    for draft in drafts(config["drafts"], item, lab, findings):
        name = draft.name.removeprefix("set_")
        for form, overrides in config["forms"].items():
            run = lab.run(draft.words(*item.config["common"], *overrides))
            runs[form].append(run)
            s = run.summary
            guesses, loops = s["accepted_per_pass"], s["loop_share"]
            ends = interval(accepted_of(run.results), share)
            claim = f"{form}_{name}"
            if claim in item.stated.claims:
                findings.add(claim, guesses, "simulated", draft.title, loops=loops, interval=ends)
            table.append((draft.title, form, guesses, *ends, s["tokens_per_s"], loops))
    columns = ("set", "form", "guesses per pass", "95 % from", "to", "tokens/s", "loop_share")
    findings.table("Set by set, simulated on Table 6's times", columns, table)
    if not all(runs.values()):
        return
    text = f"bundled pair, mean of {len(config['drafts'])} sets"
    loops = fmean(float(run.summary["loop_share"] or 0.0) for run in runs["parallel"])
    for form, claim in config["speeds"].items():
        speed = fmean(float(run.summary["tokens_per_s"]) for run in runs[form])
        findings.add(claim, speed, "simulated", text, loops=loops)
    means = {
        form: fmean(float(run.summary["accepted_per_pass"]) for run in of)
        for form, of in runs.items()
    }
    lost = 100.0 * (1.0 - means["parallel"] / means["serial"])
    findings.add(config["loss"], lost, "simulated", f"{text}; equal d and w", loops=loops)
