"""Runs the last candidates briefly, to measure what simulations on a measured profile miss.

Each candidate decodes prompts of the record for real, in turns of a fraction of a second with the
others, and the same prompts in simulation. The ratio of the two times per token then scales all its
costs, so that ranking, intervals and the written profile agree with the runs. Since the prompts are
the same, the ratio has no variance from prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.files import write_json
from specdec.planning.candidates import PLAIN, Candidate, rescaled
from specdec.planning.measuring import ModelsHere
from specdec.planning.search import Search, Times
from specdec.planning.simulate import Unit

TRIALS_FILE = "trials.json"
"""Key of a candidate -> ratio of its times, tokens per answer, and tokens/s of its runs."""

_RUNS = 16  # runs of each candidate, on different prompts as far as possible
_STEADY = 1.1  # a note is given if plain decoding's fastest run exceeds this times the slowest


def calibrated(
    candidates: Sequence[Candidate], *, search: Search, models: ModelsHere, path: Path
) -> list[Candidate]:
    """Scales the candidates' costs to measured runs; drops those that do not run here.

    ``search`` receives the reasons and a note. Ratios that the file ``path`` has are not measured
    again.
    """
    known: dict[str, dict[str, Any]] = {}
    if path.is_file():
        with suppress(ValueError):
            known = json.loads(path.read_text(encoding="utf-8"))
    missing = [made for made in candidates if made.key not in known]
    runnable = [made for made in missing if _runs(made, search, models)]
    if runnable:
        known |= _trials(runnable, search, models)
        write_json(path, known)
    kept = [made for made in candidates if made.key in known]
    ratios = [float(known[made.key]["ratio"]) for made in kept]
    search.notes.append(
        f"runs of the {len(kept)} best candidates took {min(ratios):.2f} to {max(ratios):.2f} of"
        " their simulated times on the same prompts; the plan's times are those of the runs"
    )
    for made in kept:
        if made.name == PLAIN and (told := _unsteady(known[made.key].get("tokens_per_s", []))):
            search.notes.append(told)
    found = []
    for made, ratio in zip(kept, ratios, strict=True):
        found.append(rescaled(made, dict.fromkeys(made.config["clock"]["costs"], ratio)))
        search.simulator.copy_scaled(made, found[-1], ratio)
    return found


def _config(made: Candidate, models: ModelsHere) -> dict[str, object]:
    """Returns the configuration of a real run, with the candidate's policy and executor."""
    config = models.config(made.name)
    return {**config, "policy": made.config["policy"], "executor": made.config["executor"]}


def _runs(made: Candidate, search: Search, models: ModelsHere) -> bool:
    """Returns whether the candidate can decode a few tokens here; if not, notes the reason."""
    try:
        models.decode([_config(made, models)], batch=1, count=1, length=2)
    except UserError as error:
        search.left_out[made.name] = f"{made.told()} does not run here: {error}"
        return False
    return True


def _trials(
    candidates: Sequence[Candidate], search: Search, models: ModelsHere
) -> dict[str, dict[str, Any]]:
    """Returns each candidate's ratio of times, and both tokens per answer, which should agree."""
    batch = int(candidates[0].config["batch_size"])
    count = min(_RUNS, max(search.simulator.num_prompts // batch, 1))
    rounds = _RUNS // count
    search.report("runs of the best candidates", len(candidates) * count * rounds)
    real = models.decode(
        [_config(made, models) for made in candidates],
        batch=batch,
        count=count,
        length=search.length,
        rounds=rounds,
        on_turn=lambda: search.report("", None),
    )
    objective = search.chosen.objective
    found = {}
    for made, units in zip(candidates, real, strict=True):
        played = search.simulator.units(made, count, search.length)
        measured = Times.of(units, objective, made.layout.devices).mean
        found[made.key] = {
            "candidate": made.told(),
            "ratio": measured / search.times(made, count).mean,
            "tokens_per_answer": tokens_per_answer(units),
            "simulated_tokens_per_answer": tokens_per_answer(played),
            "tokens_per_s": [round(u.tokens / u.seconds, 2) for u in units if u.seconds > 0.0],
        }
    return found


def _unsteady(speeds: Sequence[float]) -> str | None:
    """Returns a note if the machine's speed changed during the runs of plain decoding.

    A pass of plain decoding costs nearly the same on all prompts, so differences between its runs
    are due to the machine.
    """
    if not speeds or max(speeds) <= _STEADY * min(speeds):
        return None
    return (
        f"plain decoding ran at {min(speeds):.4g} to {max(speeds):.4g} tokens/s per request in its"
        f" {len(speeds)} runs: this machine's speed changes, and tokens/s at another time may"
        " differ as much; gains were measured in turns of a fraction of a second"
    )


def tokens_per_answer(units: Sequence[Unit]) -> float:
    return sum(unit.emitted for unit in units) / max(sum(unit.answers for unit in units), 1)
