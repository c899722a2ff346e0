"""What trees catch: SpecPipe Fig. 7, 10, 14 and PipeDec Fig. 3, 4, 6.

Accuracy is "the proportion of speculative tree layers containing the ground-truth token": of a
pipeline fed level by level its hit rate; of a static tree the share of levels that the target
followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pipelines.tables import SIMULATED, run_rows
from experiments.reproduce.drafts import Draft, drafts, known_drafts, make_draft
from experiments.reproduce.drawing import band, doublings, figure, legend, lines, tidy
from experiments.reproduce.findings import Findings, Measure, Table
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome
from specdec.recording.record import read_record
from specdec.sources.synthetic import SyntheticPair

_LAW = ("weights", "top1", "decay", "miss")


def tree_sizes(item: Item, lab: Lab) -> Findings:
    """TBT and accuracy over tree width and children.

    Keys: ``common``, ``strategy``, ``draft``, ``widths``, ``children``, ``choice`` ([width,
    children]), and the claims ``saturates``, ``few_children``, ``optimum``.
    """
    found, config = Findings(), item.config
    names = [config["draft"]]
    table, cells = [], {}
    for draft in drafts(names, item, lab, found):
        for children in config["children"]:
            for width in config["widths"]:
                words = [f"policy.width={width}", f"policy.children={children}"]
                run = lab.run([*draft.words, SIMULATED, *config["common"], *words])
                cells[width, children] = run
                s = run.summary
                table.append((width, children, s["hit_rate"], run.tbt_ms, s["loop_share"]))
        found.measures += _size_measures(config, draft, cells)
    columns = ("width", "children", "accuracy (hit rate)", "TBT ms", "loop_share")
    found.tables.append(Table("Tree parameters, simulated", columns, tuple(table)))
    made, (left, right) = figure(10.0, 3.9, 2)
    for ax, pick in ((left, "hit_rate"), (right, "tbt_ms_mean")):
        lines(
            ax,
            {
                f"{c} children": (
                    config["widths"],
                    [cells[w, c].summary[pick] for w in config["widths"]],
                )
                for c in config["children"]
                if cells
            },
        )
        doublings(ax, config["widths"])
        band(ax, config["choice"][0], config["choice"][0], "the paper's choice", vertical=True)
    tidy(left, x="tree width (nodes per level)", y="accuracy (hit rate)")
    tidy(right, x="tree width (nodes per level)", y="time between tokens (ms, simulated)")
    legend(left)
    found.figure = made
    found.notes += list(config.get("notes", ()))
    return found


def _size_measures(
    config: Mapping[str, Any], draft: Draft, cells: Mapping[tuple[int, int], Outcome]
) -> list[Measure]:
    """Saturation: the last doubling gains under 2 points. Collapse: the fewest children lose over 5
    points at the choice's width. Optimum: the choice is within 3 per cent of the grid's best."""
    widths, children = config["widths"], config["children"]
    width, many = config["choice"]
    hit = {key: run.summary["hit_rate"] for key, run in cells.items()}
    ms = {key: run.tbt_ms for key, run in cells.items()}
    gain = 100 * (hit[widths[-1], many] - hit[widths[-2], many])
    loss = 100 * (hit[width, many] - hit[width, children[0]])
    best = min(ms, key=lambda key: ms[key])
    excess = 100 * (ms[width, many] / ms[best] - 1)
    loops = cells[width, many].summary["loop_share"]
    facts = {
        "saturates": (gain < 2.0, f"{widths[-2]} to {widths[-1]} nodes gain {gain:+.1f} points"),
        "few_children": (loss > 5.0, f"{children[0]} children lose {loss:.1f} points"),
        "optimum": (excess <= 3.0, f"best is {best[0]}/{best[1]}, the choice {excess:+.1f} %"),
    }
    return [
        Measure(
            claim=claim,
            value=bool(value),
            kind="simulated",
            conditions=f"{draft.title}: {text}",
            loop_share=loops,
        )
        for claim, (value, text) in facts.items()
    ]


def top_k(item: Item, lab: Lab) -> Findings:
    """Share of the target's tokens among the draft's k best: recorded pairs, and laws.

    Keys: ``drafts``, ``claims`` (claim -> k), ``times`` (claims that need the paper's hardware).
    """
    found, config = Findings(), item.config
    ks = (1, 2, 4, 8, 16, 32)
    table, series = [], {}
    for draft in drafts(config["drafts"], item, lab, found):
        shares, loops = _rank_shares(draft, ks)
        kind = "formula" if loops is None else "measured"
        table.append((draft.title, kind, *shares, loops))
        series[draft.name.replace("_", " ")] = (ks, shares)
        for claim, k in config["claims"].items():
            if loops is not None:
                found.add(claim, shares[ks.index(k)], "measured", draft.title, loops=loops)
    columns = ("draft", "kind", *(f"top-{k}" for k in ks), "loop_share")
    found.tables.append(Table("Hit ratio of the draft's k best tokens", columns, tuple(table)))
    found.missing += list(config.get("times", ()))
    found.notes += list(config.get("notes", ()))
    made, (ax,) = figure(7.0, 4.2)
    lines(ax, series)
    for claim in item.stated.claims.values():
        if claim.id in config["claims"] and claim.low is not None and claim.high is not None:
            k = config["claims"][claim.id]
            ax.plot([k, k], [claim.low, claim.high], lw=7, color="#e0b050", alpha=0.8, zorder=1)
            ax.plot([k], [claim.high], marker="_", ms=9, color="#c9982e", zorder=1)
    ax.plot([], [], lw=7, color="#e0b050", label="stated for Llama 8B / 1B and 70B")
    doublings(ax, ks)
    tidy(
        ax, x="k (candidates)", y="share of the target's tokens among them", title=item.stated.title
    )
    legend(ax)
    found.figure = made
    return found


def _rank_shares(draft: Draft, ks: Sequence[int]) -> tuple[list[float], float | None]:
    """Cumulative rank shares of a record, with its loop share; of a law, with None."""
    known = known_drafts().get(draft.name, {})
    if any("synthetic" in word for word in known.get("words", ())):
        law = SyntheticPair(**_law_of(known["words"]))
        cumulated = np.cumsum(law.rank_probabilities())
        return [float(cumulated[k - 1]) for k in ks], None
    path = next((w.partition("=")[2] for w in draft.words if w.startswith("model.record=")), "")
    record = read_record(Path(path)) if path else _shipped()
    ranks = np.concatenate([request.ranks for request in record.requests])
    return [float((ranks < k).mean()) for k in ks], float(record.about.get("loop_share") or 0.0)


def _law_of(words: Sequence[str]) -> dict[str, list[float]]:
    import json

    split = (word.removeprefix("model.").partition("=") for word in words)
    return {key: json.loads(value) for key, _, value in split if key in _LAW}


def _shipped() -> Any:
    from importlib import resources

    with resources.as_file(resources.files("specdec.assets") / "records" / "humaneval.npz") as path:
        return read_record(path)


def quality_words(easy: float) -> list[str]:
    """A synthetic draft of rising quality: ``easy``, the share of positions it is sure of."""
    rest = (1.0 - easy) / 2
    return ["model=synthetic", f"model.weights=[{easy},{rest:.3f},{rest:.3f}]", "ignore_eos=true"]


def static_or_dynamic(item: Item, lab: Lab) -> Findings:
    """Accuracy against TBT for drafts of rising quality, static tree and dynamic tree.

    Keys: ``common``, ``static``, ``dynamic`` (overrides), ``levels`` (of the static tree),
    ``easy_static`` and ``easy_dynamic`` (shares of easy positions), ``claim``.
    """
    found, config = Findings(), item.config
    size = make_draft("law_1b", item, lab).words[-2:]
    curves: dict[str, tuple[list[float], list[float]]] = {}
    table = []
    for name, words in (("static", config["static"]), ("dynamic", config["dynamic"])):
        xs, ys = curves.setdefault(f"{name} tree", ([], []))
        for easy in config[f"easy_{name}"]:
            run = lab.run([*quality_words(easy), *size, SIMULATED, *config["common"], *words])
            s = run.summary
            accuracy = s["hit_rate"]
            if accuracy is None:
                accuracy = s["accepted_per_pass"] / config["levels"]
            xs.append(accuracy)
            ys.append(run.tbt_ms)
            table.append((name, easy, accuracy, run.tbt_ms, s["steps_per_token"]))
    columns = ("tree", "share of easy positions", "accuracy", "TBT ms", "steps/token")
    found.tables.append(Table("Simulated, synthetic drafts", columns, tuple(table)))
    shared = _shared_grid(*(xs for xs, _ in curves.values()))
    static, dynamic = (np.interp(shared, *map(np.asarray, c)) for c in curves.values())
    lower = bool(len(shared)) and bool((dynamic < static).all())
    where = (
        f"accuracies {shared[0]:.2f} to {shared[-1]:.2f}" if len(shared) else "no shared accuracy"
    )
    found.add(config["claim"], lower, "simulated", where)
    made, (ax,) = figure(7.0, 4.2)
    lines(ax, curves)
    title = "equal drafts, rising quality"
    tidy(
        ax,
        x="accuracy (share of levels with the right token)",
        y="TBT (ms, simulated)",
        title=title,
    )
    legend(ax)
    found.figure = made
    found.notes += list(config.get("notes", ()))
    return found


def _shared_grid(*xs: Sequence[float]) -> Any:
    low, high = max(min(x) for x in xs), min(max(x) for x in xs)
    return np.linspace(low, high, 9) if low < high else np.zeros(0)


def by_depth(item: Item, lab: Lab) -> Findings:
    """Accuracy of dynamic trees at several pipeline depths, and of a static tree (PipeDec Fig. 6).

    Keys: ``drafts``, ``dynamic`` and ``static`` (label -> overrides), ``levels``, claims
    ``higher`` (dynamic above static) and ``with_depth`` (the deepest loses under ``points``).
    """
    found, config = Findings(), item.config
    table: list[tuple[Any, ...]] = []
    series: dict[str, tuple[list[float], list[float]]] = {}
    for draft in drafts(config["drafts"], item, lab, found):
        dynamic = run_rows(lab, draft, [], config["dynamic"])
        static = run_rows(lab, draft, [], config["static"])
        accuracy = {name: run.summary["hit_rate"] for name, run in dynamic.items()}
        still = {n: r.summary["accepted_per_pass"] / config["levels"] for n, r in static.items()}
        loops = next(iter(dynamic.values())).summary["loop_share"]
        table += [(draft.title, n, a, loops) for n, a in {**accuracy, **still}.items()]
        ends = list(accuracy.values())
        series[draft.name.replace("_", " ")] = (config["depths"], ends)
        lost = 100 * (ends[0] - ends[-1])
        facts = {
            config["higher"]: (
                min(ends) > max(still.values()),
                f"{min(ends):.2f} at least, static {max(still.values()):.2f}",
            ),
            config["with_depth"]: (
                lost < config["points"],
                f"{lost:.1f} points lost from the shallowest to the deepest",
            ),
        }
        found.measures += [
            Measure(
                claim=claim,
                value=bool(v),
                kind="simulated",
                conditions=f"{draft.title}: {text}",
                loop_share=loops,
            )
            for claim, (v, text) in facts.items()
        ]
    found.tables.append(
        Table("Accuracy", ("draft", "tree", "accuracy", "loop_share"), tuple(table))
    )
    made, (ax,) = figure(7.0, 4.0)
    lines(ax, series)
    tidy(
        ax,
        x="pipeline stages",
        y="accuracy (hit rate of the dynamic tree)",
        title=item.stated.title,
    )
    legend(ax)
    found.figure = made
    return found
