"""What late hidden states cost an EAGLE head: acceptance over the number of stages.

    python -m experiments.drafters.lateness [--data humaneval] [--sampling t06] [--prompts 16]
        [--tokens 128] [--stages 1 2 4 8 12 16] [--only "draft model"]

Level-per-step and best-first pipelines (``specpipe``, ``specpipe_bf``) of N stages with the bundled
head: a feature arrives with its answer, N - 1 steps after its token was submitted, or as soon as
its layers have computed it (``source.early=true``; run only where that is sooner). The draft model,
which reads no features, is the control of what N costs without lateness. The two-group executor
(``swiftspec``) drafts during one pass of the target; its reference waits for each answer
(``swiftspec_base``). Simulated time; counts do not depend on the machine. Hit rates are without a
prompt's first verdict: in a level-per-step pipeline early features of the prompt arrive before it,
and those with the answers after it, so it is a hit or a miss by construction.
``python -m experiments.drafters.page`` writes tables and figure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from experiments.drafters.measure import Measured, Runs, parsed, parser, write
from specdec.executors.stage import split_layers
from specdec.models.bundled import family_path
from specdec.models.eagle_loading import HeadFiles
from specdec.models.inspection import inspect_model

DRAFTS: dict[str, tuple[str, ...]] = {
    "with the answers": ("source=eagle",),
    "early": ("source=eagle", "source.early=true"),
    "draft model": ("source=draft_model",),
}
PLANTED = ("at once", "spoiled")
"""Two stored controls: features that leave the first stage, and the same with wrong ones."""
PIPELINES = ("specpipe", "specpipe_bf")
PROFILE = "clock.profile=uniform_30ms"  # drafting is free: only the order of events counts
GROUPS = {"two groups in turns": "swiftspec_base", "two groups at once": "swiftspec"}


def main(given: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__ or "", "experiments.drafters.lateness")
    arguments.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16])
    arguments.add_argument("--only", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    arguments.add_argument("--width", type=int, default=16, help="nodes per step of a pipeline")
    args = parsed(arguments, given)
    runs, rows = Runs(args), list[dict[str, Any]]()
    for name, strategy in GROUPS.items():
        for draft in _differing(args.only, 1):
            words = (f"strategy={strategy}", *DRAFTS[draft], PROFILE)
            _add(rows, name, 1, draft, runs.measured("tokens per pass", *words))
    for num in args.stages:
        for strategy in PIPELINES:
            if (strategy, num) == ("specpipe", 1):
                continue  # one stage answers before a level can follow: no hits with any source
            where = (f"strategy={strategy}", f"executor.stages={num}", f"policy.width={args.width}")
            for draft in _differing(args.only, num):
                found = runs.measured("later hit rate", *where, *DRAFTS[draft], PROFILE)
                _add(rows, strategy, num, draft, found)
            write("lateness", {**runs.about, "width": args.width}, rows, args.results)
    return 0


def steps_gained(num_stages: int) -> int:
    """Steps by which early features of the bundled head precede the answers in a pipeline.

    A feature is complete when the layer below its highest stream has been computed.
    """
    ids = HeadFiles(family_path("bundled:eagle3")).config["eagle_config"]
    highest = max(ids["eagle_aux_hidden_state_layer_ids"]) - 1  # an id is of a stream that enters
    bounds = split_layers(inspect_model(family_path("bundled:target")).num_layers, num_stages)
    return num_stages - 1 - next(i for i, (_, last) in enumerate(bounds) if highest < last)


def _differing(drafts: Sequence[str], num_stages: int) -> list[str]:
    """Without early features where they arrive with the answers: the run is the same."""
    return [name for name in drafts if name != "early" or steps_gained(num_stages)]


def _add(
    rows: list[dict[str, Any]], strategy: str, num: int, draft: str, found: Measured | None
) -> None:
    if found is not None:
        gained = steps_gained(num)
        row = {"strategy": strategy, "stages": num, "steps_gained": gained, "draft": draft}
        rows.append({**row, "measured": found})
        print(f"{strategy:20} N={num:2}  {draft:17} {found}  {found.cpu_s} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
