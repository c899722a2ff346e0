"""Plans for a target without a draft model, by timing presets that draft from text or heads.

Acceptance is unknown before the target decodes, so nothing is simulated: all presets decode the
same prompts, switching every fraction of a second, until prompts or time (``budget_s``) run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from specdec.errors import UserError
from specdec.planning.answer import Plan, choices_of
from specdec.planning.candidates import PLAIN, Candidate, Simulator, presets
from specdec.planning.machines import Profiled
from specdec.planning.measuring import ModelsHere
from specdec.planning.options import PlanOptions
from specdec.planning.search import Search

PRESETS_BY_KEY = {
    "target": ("suffix", "prompt_lookup"),
    "eagle_head": ("eagle", "eagle2", "eagle3"),
    "exit_heads": ("eesd", "ppsd"),
    "translated": ("translated",),
}
"""Key of the configuration section ``model`` -> presets that are tried if the key is set."""

_LENGTH = 64  # tokens per prompt


def measure_alone(
    models: ModelsHere, chosen: PlanOptions, keys: Sequence[str]
) -> tuple[Plan, Candidate]:
    """Returns the plan and its best candidate; ``keys``: those with a value in section ``model``.

    Ctrl+C ends the measurement; the plan then uses the prompts decoded so far.
    """
    began, progress, batch = monotonic(), models.progress, chosen.batch[0]
    names = chosen.strategies or [name for key in keys for name in PRESETS_BY_KEY.get(key, ())]
    found, left_out = presets(models.words, models.extra, [PLAIN, *names], measured=True)
    tried = {}
    for made in found:
        for size in (made, *made.smaller()[:1]):
            parts = {part: size.config[part] for part in ("policy", "executor")}
            config = {**models.config(size.name), **parts}
            try:
                start = monotonic()
                models.decode([config], batch=batch, count=1, length=8)
                tried[size.key] = (size, config, (monotonic() - start) / 16)
            except UserError as error:  # such as a head of another method
                left_out[size.name] = str(error)
    candidates = [size for size, _, _ in tried.values()]
    count = max(1, min(chosen.prompts, len(models.loaded[1]) // batch))
    turn_s = _LENGTH * sum(token_s for _, _, token_s in tried.values())
    progress.note(
        f"{len(tried)} candidates decode {count} x {batch} prompts of {_LENGTH} tokens: about"
        f" {min((count + 1) * turn_s, chosen.budget_s):.0f} s, at most"
        f" budget_s={chosen.budget_s:g}; Ctrl+C ends it with the results so far"
    )
    progress.phase("runs", len(tried) * count)
    shape = {"batch": batch, "count": count, "length": _LENGTH}
    units = models.decode(
        [config for _, config, _ in tried.values()],
        **shape,
        on_turn=progress.advance,
        until=began + chosen.budget_s,
    )
    done = len(units[0])
    simulator = Simulator(models.loaded[0], prompts=done * batch)
    for made, of in zip(candidates, units, strict=True):
        simulator.put(made, _LENGTH, of)
    search = Search(
        machine=Profiled(name="this machine", devices=1, stages=1, by_batch={}),
        simulator=simulator,
        chosen=chosen,
        requests=0.0,
        length=_LENGTH,
        progress=progress,
    )
    ranked = search.ranked(candidates, done)
    notes = (
        []
        if done == count
        else [f"{done} of {count} prompts, then the time was up or it was interrupted"]
    )
    plan = Plan(
        choices=choices_of(search, ranked),
        objective=chosen.objective,
        batch=batch,
        context=chosen.context[0],
        devices=1,
        acceptance=f"measured on {done * batch} prompts",
        machine="this machine",
        measured=True,
        left_out=left_out,
        complete=done == count,
        notes=(*notes, *(f"{name} was not tried: {why}" for name, why in left_out.items())),
    )
    return plan, ranked[0]
