"""PPSD and EESD on a simulated cluster of 8 stages, compared with PPSD's Eq. 4 and 6.

    python -m experiments.ppsd.exit_speedups [--parts ppsd multi eesd tree]
        [--data humaneval gsm8k xsum] [--prompts 16] [--tokens 128] [--samplings t06 greedy]
        [--out outputs/ppsd] [--results experiments/ppsd/results]

ppsd: `ppsd` against `ar` on equal stages (uniform_30ms), beside Eq. 6 at the run's own alpha.
multi: an exit chosen per token (`ppsd_multi`, B.3) against each exit alone. eesd: acceptance
and speed-up against draft lengths 1 .. 10 (the paper's Fig. 1), beside Eq. 4 and 5. tree:
`ppsd_tree` against `ppsd` on a profile in which stages take longer for more tokens
(specpipe_8x3090). All rows of a part share stages and their times.

If the time of a step does not depend on its work, all prompts are decoded in one batch: a request's
times are those of a single request, except for the last round of `eesd`, in which others may still
draft. Prompts longer than the context lose their first tokens.

Prints a table per part, data set and sampling (speed-ups are over `ar` on the same stages; `loops`
is the share of tokens that end an 8-gram generated before; `as_ar` is 1 if the tokens are those of
`ar`). Writes the figures to bars.csv in --results, where those of other calls remain, all tables to
bars.md, and bars_fig1.png. Runs in --out are reused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from experiments.ppsd.laws import eq5_acceptance
from experiments.reproduce.drawing import as_png, figure, legend, lines, styles, tidy
from experiments.reproduce.lab import Lab, Outcome
from experiments.reproduce.rendering import cell, grid
from specdec.files import write_bytes, write_text
from specdec.report.provenance import provenance

STAGES = "executor.stages=8"
PIPELINE = ("executor=pipeline", STAGES, "model.exit_layer=3")
EESD = ("executor=early_exit", STAGES, "model.exit_layer=3")
GAMMAS = range(1, 11)
UNIFORM = "clock.profile=uniform_30ms"
TOKENS_COST = "clock.profile=specpipe_8x3090"
KEYS = ["part", "data", "sampling"]
HEAD = """# PPSD and EESD against Eq. 4-6, simulated

Written by `python -m experiments.ppsd.exit_speedups`, 8 stages; one section or more per call."""

Run = Callable[..., Outcome]
Rows = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--data", nargs="+", default=["humaneval", "gsm8k", "xsum"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--samplings", nargs="+", default=["t06", "greedy"])
    parser.add_argument("--out", type=Path, default=Path("outputs/ppsd"))
    parser.add_argument("--results", type=Path, default=Path("outputs/ppsd"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    lab = Lab(folder=args.out, quick=False)
    size = (f"data.limit={args.prompts}", f"max_new_tokens={args.tokens}", "data.truncation=left")
    for where in [(p, d, s) for p in args.parts for s in args.samplings for d in args.data]:
        part, data, sampling = where
        common = ("clock=simulated", f"data={data}", f"sampling={sampling}", *size)

        def run(strategy: str, *words: str, common: tuple[str, ...] = common) -> Outcome:
            return lab.run([*common, f"strategy={strategy}", *words])

        rows = PARTS[part](run)
        print(section(where, pd.DataFrame(rows).T), flush=True)
        write(args.results, where, rows)


def section(where: tuple[str, ...], table: pd.DataFrame) -> str:
    part, data, sampling = where
    rows = [[name, *map(cell, row)] for name, row in zip(table.index, table.values, strict=True)]
    return "\n".join([f"## {part}: {data}, {sampling}", "", *grid(["row", *table], rows), ""])


def write(folder: Path, where: tuple[str, ...], rows: Rows) -> None:
    """Writes bars.md, bars.csv and the figure; sections of other calls remain."""
    git = provenance(command=[], config={})["git"] or {}
    revision = str(git.get("revision", "unknown"))[:10]
    new = pd.DataFrame(
        [
            (*where, row, name, value, revision)
            for row, figures in rows.items()
            for name, value in figures.items()
        ],
        columns=[*KEYS, "row", "figure", "value", "revision"],
    )
    path = folder / "bars.csv"
    if path.is_file():
        old = pd.read_csv(path, dtype={"row": str})
        new = pd.concat([old[(old[KEYS] != list(where)).any(axis=1)], new])
    order = new["part"].map(list(PARTS).index)
    new = new.iloc[order.argsort(kind="stable")]
    write_text(path, new.to_csv(index=False, float_format="%.4f"))
    tables = {
        key: group.pivot_table("value", "row", "figure", sort=False)
        for key, group in new.groupby(KEYS, sort=False)
    }
    write_text(folder / "bars.md", "\n\n".join([HEAD, *(section(*kv) for kv in tables.items())]))
    curves = {", ".join(k[1:]): t for k, t in tables.items() if k[0] == "eesd"}
    if curves:
        draw(folder / "bars_fig1.png", curves)


def draw(path: Path, curves: dict[str, pd.DataFrame]) -> None:
    """The paper's Fig. 1: acceptance and speed-up against the draft length."""
    gammas = list(GAMMAS)
    fig, (left, right) = figure(11.0, 4.4, 2)
    for ax, name in ((left, "accepted"), (right, "speedup")):
        lines(ax, {title: (gammas, table[name].tolist()) for title, table in curves.items()})
    for title, look in styles(curves).items():
        left.plot(gammas, curves[title]["eq5"], ls=":", lw=1, color=look.color)
    x = "draft length (tokens)"
    tidy(left, x=x, y="accepted / proposed (simulated)", title="EESD (dotted: Eq. 5)")
    tidy(right, x=x, y="speed-up over plain decoding (times, simulated)", title="E = N/8")
    for ax in (left, right):
        legend(ax)
    write_bytes(path, as_png(fig))


def plain_of(run: Run, profile: str) -> Outcome:
    """A short run of plain decoding, whose tokens all take the same time."""
    return run("ar", *PIPELINE, profile, "data.limit=1", "max_new_tokens=32")


def outputs(outcome: Outcome) -> list[tuple[int, ...]]:
    return sorted(tuple(result.output) for result in outcome.results)


def exits(run: Run, profile: str, strategies: dict[str, tuple[str, ...]]) -> Rows:
    """alpha, the law and the speed-up of strategies that decode all prompts in one batch."""
    plain, batch = plain_of(run, profile), "batch_size=16"
    tokens = outputs(run("ar", *PIPELINE, UNIFORM, batch))
    rows = {}
    for name, words in strategies.items():
        found = run(words[0], *PIPELINE, *words[1:], profile, batch)
        s, speedup = found.summary, plain.tbt_ms / found.tbt_ms
        rows[name] = {"alpha": s["acceptance_rate_verified"], "speedup": speedup}
        if words == ("ppsd",):
            rows[name] |= {"eq6": s["speedup_law"], "ratio": speedup / s["speedup_law"]}
        rows[name] |= {"loops": s["loop_share"], "as_ar": float(outputs(found) == tokens)}
    return rows


def ppsd(run: Run) -> Rows:
    return exits(run, UNIFORM, {UNIFORM.partition("=")[2]: ("ppsd",)})


def multi(run: Run) -> Rows:
    """An exit per token against each exit alone, with equal times of all steps."""
    late = ("ppsd", "model.exit_layer=6")
    names = {"ppsd": ("ppsd",), "ppsd, exit at 6": late}
    return exits(run, UNIFORM, {**names, "ppsd_multi, exits at 3 and 6": ("ppsd_multi",)})


def eesd(run: Run) -> Rows:
    """Fig. 1: overall acceptance falls with the draft length, speed-up rises and falls."""
    plain, rows = plain_of(run, UNIFORM), {}
    for gamma in GAMMAS:
        found = run("eesd", *EESD, f"policy.gamma={gamma}", UNIFORM, "batch_size=16")
        s = found.summary
        alpha = s["acceptance_rate_verified"]
        rows[str(gamma)] = {
            **{"alpha": alpha, "accepted": s["acceptance_rate"]},
            **{"eq5": eq5_acceptance(alpha, gamma), "speedup": plain.tbt_ms / found.tbt_ms},
            **{"eq4": s["speedup_law"], "loops": s["loop_share"]},
        }
    return rows


def tree(run: Run) -> Rows:
    """A level of candidates per step against one token per step."""
    plain, rows = plain_of(run, TOKENS_COST), {}
    for name in ("ppsd", "ppsd_tree"):
        found = run(name, *PIPELINE, TOKENS_COST)
        keys = ("hit_rate", "rows_per_target_pass", "tbt_ms_mean")
        rows[name] = {key: found.summary[key] for key in keys}
        rows[name]["speedup"] = plain.tbt_ms / found.tbt_ms
    return rows


PARTS: dict[str, Callable[[Run], Rows]] = {"ppsd": ppsd, "multi": multi, "eesd": eesd, "tree": tree}


if __name__ == "__main__":
    main()
