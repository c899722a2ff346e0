"""Plans for a target without a draft model, by timing presets that draft from text or heads.

Acceptance is unknown before the target decodes, so nothing is simulated: all presets decode the
same prompts in turns of a fraction of a second, until prompts or time (``budget_s``) run out.
"""

from collections.abc import Sequence
from itertools import chain
from time import monotonic
from typing import Any

from specdec.errors import UserError
from specdec.planning.answer import Plan, choices_of
from specdec.planning.candidates import PLAIN, Candidate, Simulator, presets
from specdec.planning.machines import Profiled
from specdec.planning.measuring import ModelsHere
from specdec.planning.options import PlanOptions
from specdec.planning.search import NO_TIME, Search

PRESETS_BY_KEY = {
    "target": ("suffix", "prompt_lookup"),
    "eagle_head": ("eagle", "eagle2", "eagle3"),
    "exit_heads": ("eesd", "ppsd"),
    "translated": ("translated",),
}
"""Key of the configuration section ``model`` -> presets that are tried if the key is set."""

_LENGTH, _SHORT = 64, 16  # tokens per prompt, and where the time is short
_TRYING = 0.4  # share of the time after which no smaller tree is loaded
_FEW = 3  # prompts; of fewer, intervals say nothing


def measure_alone(
    models: ModelsHere, chosen: PlanOptions, keys: Sequence[str]
) -> tuple[Plan, Candidate]:
    """Returns the plan and its best candidate; ``keys``: those with a value in section ``model``.

    Ctrl+C ends the measurement; the plan then uses the prompts decoded so far.
    """
    began, progress, batch = monotonic(), models.progress, chosen.batch[0]
    names = chosen.strategies or [name for key in keys for name in PRESETS_BY_KEY.get(key, ())]
    found, left_out = presets(models.words, models.extra, [PLAIN, *names], measured=True)
    tried: dict[str, tuple[Candidate, dict[str, Any], float]] = {}
    kept = (made for made in found if made.name not in left_out)  # once ``found`` was tried
    for size in chain(found, (size for made in kept for size in made.smaller()[:1])):
        parts = {part: size.config[part] for part in ("policy", "executor")}
        config = {**models.config(size.name), **parts}
        try:
            if size not in found and monotonic() - began > _TRYING * chosen.budget_s:
                raise UserError(NO_TIME)
            ((unit,),) = models.decode([config], batch=batch, count=1, length=8)
            tried[size.key] = (size, config, unit.clock_s / unit.emitted * batch)
        except UserError as error:  # such as a head of another method
            left_out[str(size)] = str(error)
    candidates = [size for size, _, _ in tried.values()]
    count = max(1, min(chosen.prompts, len(models.loaded[1]) // batch))
    token_s = sum(token_s for _, _, token_s in tried.values())  # of all candidates
    trying_s = monotonic() - began  # loading again takes as long
    left_s = max(0.0, chosen.budget_s - 2 * trying_s)
    length = max(_SHORT, min(_LENGTH, int(left_s / token_s / (_FEW + 1))))
    progress.note(
        f"{len(tried)} candidates decode {count} x {batch} prompts of {length} tokens: about"
        f" {trying_s + min((count + 1) * length * token_s, left_s):.0f} s, at most what is left of"
        f" budget_s={chosen.budget_s:g}; Ctrl+C ends it with the results so far"
    )
    progress.phase("runs", len(tried) * count)
    shape = {"batch": batch, "count": count, "length": length}
    units = models.decode(
        [config for _, config, _ in tried.values()],
        **shape,
        on_turn=progress.advance,
        until=began + chosen.budget_s,
    )
    done = len(units[0])
    simulator = Simulator(models.loaded[0], prompts=done * batch)
    for made, of in zip(candidates, units, strict=True):
        simulator.put(made, length, of)
    search = Search(
        machine=Profiled(name="this machine", devices=1, stages=1, by_batch={}),
        simulator=simulator,
        chosen=chosen,
        requests=0.0,
        length=length,
        progress=progress,
    )
    ranked = search.ranked(candidates, done)
    early = f"{done} of {count} prompts, then the time was up or it was interrupted"
    notes = [] if done == count else [early]
    if unset := [f"model.{key}" for key in PRESETS_BY_KEY if key not in keys]:
        notes.append(f"drafters of {', '.join(unset)} were not tried: the keys have no value")
    plan = Plan(
        choices=choices_of(search, ranked),
        objective=chosen.objective,
        batch=batch,
        context=chosen.context[0],
        devices=1,
        acceptance=f"measured on {done * batch} prompts of {length} tokens"
        + (", too few for intervals: give more prompts and budget_s" if done < _FEW else ""),
        machine="this machine",
        measured=True,
        left_out=left_out,
        complete=done == count,
        notes=(*notes, *(f"{name} was not tried: {why}" for name, why in left_out.items())),
    )
    return plan, ranked[0]
