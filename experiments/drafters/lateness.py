"""What late hidden states cost an EAGLE head: acceptance over the number of stages.

    python -m experiments.drafters.lateness [--stages 2 4 8 16] [--prompts 16] [--tokens 128]

Level-per-step and best-first pipelines (``specpipe``, ``specpipe_bf``) of N stages with the bundled
head: a feature arrives with its answer, N - 1 steps after its token was submitted, or as soon as
its layers have computed it (``source.early=true``). The draft model, which reads no features, is
the control: what N costs it is not lateness. The two-group executor (``swiftspec``) drafts during
one pass of the target; its reference waits for each answer (``swiftspec_base``). Simulated time;
counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

from experiments.drafters.measure import Measured, Runs, parsed, parser, write

DRAFTS = {
    "eagle3, features with the answers": ("source=eagle",),
    "eagle3, early features": ("source=eagle", "source.early=true"),
    "draft model": ("source=draft_model",),
}
PIPELINES = ("specpipe", "specpipe_bf")
PROFILE = "clock.profile=uniform_30ms"  # drafting is free: only the order of events counts
GROUPS = {"two groups in turns": "swiftspec_base", "two groups at once": "swiftspec"}


def main(words: Sequence[str] | None = None) -> int:
    """Runs all configurations; writes lateness.json and eagle_lateness.png."""
    arguments = parser(__doc__ or "", "experiments.drafters.lateness")
    arguments.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8, 16])
    arguments.add_argument("--width", type=int, default=16, help="nodes per step of a pipeline")
    args = parsed(arguments, words)
    runs, rows = Runs(args), list[dict[str, Any]]()
    for strategy in PIPELINES:
        for num in args.stages:
            for draft, overrides in DRAFTS.items():
                where = (f"strategy={strategy}", f"executor.stages={num}")
                size = f"policy.width={args.width}"
                found = runs.measured("hit rate", *where, *overrides, size, PROFILE)
                _add(rows, strategy, num, draft, found)
    for name, strategy in GROUPS.items():
        for draft, overrides in DRAFTS.items():
            found = runs.measured("tokens per pass", f"strategy={strategy}", *overrides, PROFILE)
            _add(rows, name, 1, draft, found)
    write("lateness", {**runs.about, "width": args.width}, rows, args.results)
    draw(rows, args)
    return 0


def _add(
    rows: list[dict[str, Any]], strategy: str, num: int, draft: str, found: Measured | None
) -> None:
    if found is not None:
        rows.append({"strategy": strategy, "stages": num, "draft": draft, "measured": found})
        print(f"{strategy:20} N={num:2}  {draft:34} {found}  loops {found.loop_share:.2f}")


def draw(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Hit rate over the number of stages, a panel per pipeline."""
    figure, axes = plt.subplots(1, len(PIPELINES), figsize=(9, 3.4), sharey=True, squeeze=False)
    for axis, strategy in zip(axes[0], PIPELINES, strict=True):
        for draft in DRAFTS:
            here = [r for r in rows if (r["strategy"], r["draft"]) == (strategy, draft)]
            at: list[int] = [row["stages"] for row in here]
            found: list[Measured] = [row["measured"] for row in here]
            low = [m.value - m.low for m in found]
            high = [m.high - m.value for m in found]
            axis.errorbar(at, [m.value for m in found], (low, high), marker="o", label=draft)
        axis.set(title=strategy, xlabel="stages", xscale="log")
        axis.set_xticks(args.stages, [str(num) for num in args.stages])
        axis.minorticks_off()
    axes[0, 0].set_ylabel("hit rate (simulated)")
    axes[0, 0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    args.images.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.images / "eagle_lateness.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
