from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.errors import UserError
from specdec.planning.acceptance import chain_table
from specdec.planning.answer import Plan, Ranked, Recommendation, choices_of, compared
from specdec.planning.asked import Planning
from specdec.planning.candidates import (
    OTHER_PROGRAM,
    PLAIN,
    Candidate,
    smaller,
    with_batch,
)
from specdec.planning.chains import chain_cell, chain_cells, crossover
from specdec.planning.checking import expectation
from specdec.planning.machines import DoesNotFit
from specdec.planning.search import Search, Times
from specdec.planning.sensitivity import (
    Change,
    changes,
    sentence_of_shares,
    sentences_of_changes,
    shares,
)
from specdec.planning.simulate import Unit
from specdec.planning.writing import engine_flags

_BATCHES = (1, 4, 16, 64)
_FEW_UNITS = 4  # units (batches of prompts) at batch sizes that are not ranked
_SHORT = 32  # tokens per prompt when sizes are screened
_SCREENED = 3  # candidates that are left after screening
_CHANGES = 11  # most simulated changes


def conclude(
    asked: Planning, search: Search, finalists: Sequence[Candidate], path: Path
) -> tuple[Plan, Candidate]:
    """Returns the plan of a finished search, and its first choice.

    ``finalists`` must contain plain decoding; ``path`` is the file of simulation results.
    """
    chosen, machine, acceptance = asked.chosen, search.machine, asked.acceptance
    assert acceptance is not None
    batch, context = chosen.batch[0], chosen.context[0]
    ranked = _ranked(search, finalists)
    choices = choices_of(
        ranked,
        objective=chosen.objective,
        requests=search.requests,
        drawn=acceptance.drawn,
        plain=PLAIN,
    )
    winner, units = ranked[0].candidate, ranked[0].units
    plain = next(r.candidate for r in ranked if r.candidate.name == PLAIN)
    of_presets: dict[str, Candidate] = {}
    for entry in ranked:
        of_presets.setdefault(entry.candidate.name, entry.candidate)
    others = [c for name, c in of_presets.items() if name != PLAIN]
    found = _changed(asked, search, winner, [*others, plain], path)
    table = chain_table(acceptance)
    contexts = chosen.context if machine.prices_context else chosen.context[:1]
    batches = machine.batches or (chosen.batch if len(chosen.batch) > 1 else _BATCHES)
    cell = chain_cell(machine, table, batch, context)
    draft = str(asked.config["model"].get("draft") or "DRAFT")
    plan = Plan(
        choices=choices,
        objective=chosen.objective,
        batch=batch,
        context=context,
        devices=machine.devices,
        acceptance=f"{acceptance.told}; hit rate {acceptance.hit_rate():.3f}",
        machine=machine.name,
        decides=tuple(_decides(search, winner, units, choices)),
        changes=tuple(found),
        changes_told=tuple(sentences_of_changes(found, winner.name, acceptance.hit_rate())),
        chains=tuple(chain_cells(machine, table, batches, contexts)),
        crossover={} if machine.batches else {c: crossover(machine, table, c) for c in contexts},
        by_batch=tuple(_by_batch(search, others, plain)),
        engines=engine_flags(cell, draft, chosen.drafter, winner),
        memory_limit_gb=machine.limit_gb,
        left_out=search.left_out,
        complete=search.complete,
        notes=tuple(_notes(asked, search)),
        expected=expectation(
            units, requests=acceptance.requests, drawn=acceptance.drawn, error=machine.error
        ),
    )
    return plan, winner


def _ranked(search: Search, finalists: Sequence[Candidate]) -> list[Ranked]:
    chosen = search.chosen
    memory, count = search.machine.memory_gb, chosen.prompts
    return [
        Ranked(
            candidate,
            search.simulator.units(candidate, count, search.length),
            memory(candidate.layout, chosen.batch[0], chosen.context[0]),
        )
        for candidate in search.ranked(finalists, count)
    ]


def _changed(
    asked: Planning,
    search: Search,
    winner: Candidate,
    finalists: Sequence[Candidate],
    path: Path,
) -> list[Change]:
    """Calls ``changes``, unless the budget is spent or the first choice needs real models."""
    if winner.decoded:
        return []
    if search.out_of_time:
        search.complete = False
        return []
    assert asked.acceptance is not None
    search.report("sensitivity", _CHANGES)
    return changes(
        asked.acceptance,
        [candidate for candidate in finalists if not candidate.decoded],
        times=search.times,
        objective=search.chosen.objective,
        length=search.length,
        path=path,
        report=search.report,
    )


def _decides(
    search: Search, winner: Candidate, units: Sequence[Unit], choices: Sequence[Recommendation]
) -> list[str]:
    drafting = sum(unit.draft_s for unit in units)
    hidden = sum(unit.hidden_s for unit in units) / drafting if drafting else None
    told = [sentence_of_shares(shares(search.times, winner), hidden)]
    other = next((c for c in choices if c.strategy not in (winner.name, PLAIN)), None)
    return told if other is None else [*told, compared(choices[0], other)]


def _by_batch(
    search: Search, of_presets: Sequence[Candidate], plain: Candidate
) -> list[dict[str, Any]]:
    """Returns the fastest of the ranked presets at the other batch sizes, in its layout.

    Larger batches favour smaller trees, so halved sizes are tried too, first on one batch.
    """
    rows = []
    context = search.chosen.context[0]
    for batch in search.chosen.batch[1:]:
        screened: list[tuple[float, Candidate]] = []
        for candidate in (size for best in of_presets for size in (best, *smaller(best))):
            if search.out_of_time and screened:
                search.complete = False
                break
            with suppress(DoesNotFit, UserError, ValueError):
                made = with_batch(candidate, search.machine, batch, context)
                screened.append((search.times(made, 1, _SHORT).mean, made))
        try:
            base = with_batch(plain, search.machine, batch, context)
        except DoesNotFit:
            continue
        kept = [made for _, made in sorted(screened, key=lambda pair: pair[0])[:_SCREENED]]
        best = search.ranked([*kept, base], _FEW_UNITS)[0]
        units = search.simulator.units(best, _FEW_UNITS, search.length)
        plain_s, best_s = (search.times(c, _FEW_UNITS).mean for c in (base, best))
        speed = 1.0 / Times.of(units, "throughput", 1).mean
        told = {"batch": batch, "told": best.told(), "tokens_per_s": speed}
        rows.append({**told, "gain": plain_s / best_s})
    return rows


def _notes(asked: Planning, search: Search) -> list[str]:
    acceptance, machine, chosen = asked.acceptance, search.machine, asked.chosen
    assert acceptance is not None
    notes = [*search.notes]
    if not search.complete:
        notes.append(
            f"budget_s={chosen.budget_s:g} was spent before the search ended: give more, and start"
            " the same command again to continue"
        )
    if acceptance.drawn and not acceptance.requests:
        notes.append("the law states no requests: intervals are of the simulated prompts alone")
    if not machine.prices_context:
        notes.append(f"times of {machine.name} do not depend on the context")
    if search.unknown:
        notes.append(
            f"not considered, since their acceptance is unknown here: {', '.join(search.unknown)}"
        )
    others = [
        name
        for name, why in search.left_out.items()
        if why != OTHER_PROGRAM and name not in search.unknown
    ]
    if others:
        notes.append(f"{len(others)} presets were not simulated: plan.json says why, each")
    return notes
