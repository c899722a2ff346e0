"""Sources on three executors: local, a pipeline of 8 stages, two groups of devices.

    python -m experiments.drafters.sources [--data humaneval] [--sampling t06] [--prompts 16]
        [--tokens 128]

Tokens per pass of the target on one device and on two groups, hit rate and steps per token on the
pipeline; each source with the tree of ``best_first``, ``specpipe`` and ``swiftspec``, except where
its own preset has another one (Medusa's static tree, the exit's chain and ``ppsd_tree``). "refused"
is a combination that the library refuses. Simulated time; counts do not depend on the machine.
``python -m experiments.drafters.page`` writes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from experiments.drafters.measure import Runs, parsed, parser, write

EXECUTORS = {
    "local": ("tokens per pass", ("strategy=best_first",)),
    "pipeline of 8": (
        "hit rate",
        ("strategy=specpipe", "executor.stages=8", "policy.width=16"),
    ),
    "two groups": ("tokens per pass", ("strategy=swiftspec",)),
}
_SAME = ("ngram", "prompt_lookup", "suffix", "medusa")
SOURCES = {
    **{"draft_model": ("source=draft_model",), "eagle3": ("source=eagle",)},
    **{name: (f"source={name}",) for name in _SAME},
    "exit": ("source=early_exit",),
}
OWN = {
    ("medusa", "local"): ("strategy=medusa",),
    ("exit", "local"): ("strategy=eesd",),
    ("exit", "pipeline of 8"): ("strategy=ppsd_tree", "executor.stages=8"),
}
"""Presets in place of the executor's: (source, executor) -> overrides."""

PROFILE = "clock.profile=uniform_30ms"


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__ or "", "experiments.drafters.sources")
    arguments.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES))
    args = parsed(arguments, words)
    runs, rows = Runs(args), list[dict[str, Any]]()
    for source in args.only:
        for executor, (measure, preset) in EXECUTORS.items():
            own = OWN.get((source, executor))
            overrides = own or (*preset, *SOURCES[source])
            found = runs.measured(measure, *overrides, PROFILE)
            rows.append({"source": source, "executor": executor, "measured": found})
            print(f"{source:14} {executor:14} {found or 'refused'}", flush=True)
    write("sources", runs.about, rows, args.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
