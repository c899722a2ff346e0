"""Presets beside those that they replace: ``ddtree`` and ``medusa``, ``suffix`` and prompt lookup.

    python -m experiments.drafters.presets [--data humaneval] [--sampling t06] [--prompts 16]
        [--tokens 128]
    python -m experiments.drafters.presets --data edits --prompts 96 --tokens 700

Tokens per pass and rows of the target. ``ddtree`` and ``medusa`` submit 64 rows per pass. With
``--data edits`` the target writes the agent's own texts (``model=transcript``), and only sources
that copy text are run. Simulated time; counts do not depend on the machine.
``python -m experiments.drafters.page`` writes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from experiments.drafters.measure import Runs, parsed, parser, write
from specdec.data.edits import chosen_turns

PROFILE = "clock.profile=uniform_30ms"
PRESETS: dict[str, tuple[str, ...]] = {
    name: (f"strategy={name}",) for name in ("medusa", "ddtree", "prompt_lookup", "suffix")
}
COPYING: dict[str, tuple[str, ...]] = {
    "prompt_lookup": ("strategy=prompt_lookup",),
    "prompt_lookup policy.gamma=31": ("strategy=prompt_lookup", "policy.gamma=31"),
    "prompt_lookup policy=suffix": ("strategy=prompt_lookup", "policy=suffix"),
    "suffix policy=prompt_lookup": ("strategy=suffix", "policy=prompt_lookup"),
    "suffix": ("strategy=suffix",),
}
EDITS = "edits"
"""The data set of an agent's edits."""


def main(given: Sequence[str] | None = None) -> int:
    args = parsed(parser(__doc__ or "", "experiments.drafters.presets"), given)
    runs, rows = Runs(args), list[dict[str, Any]]()
    own = COPYING if args.data == EDITS else PRESETS
    for name, overrides in own.items():
        words = (*overrides, PROFILE)
        if args.data == EDITS:
            words += ("model=transcript",)
        found = runs.measured("tokens per pass", *words)
        outcome = runs.counted(*words)
        row: dict[str, Any] = {"preset": name, "measured": found}
        row["target_rows"] = int(outcome.summary["target_rows"])
        if args.data == EDITS:
            turns = chosen_turns(None, "data.subset")
            row["kinds"] = [turns[result.id].kind for result in outcome.results]
        rows.append(row)
        print(f"{name:30} {found}  {row['target_rows']} rows", flush=True)
    write("presets", runs.about, rows, args.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
