"""Builds and writes the plan from a finished search, and compares a plan with a real run."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specdec.errors import UserError
from specdec.files import write_json, write_text
from specdec.planning.acceptance import Acceptance
from specdec.planning.candidates import (
    OTHER_PROGRAM,
    PLAIN,
    Candidate,
    Times,
    Unit,
    effective,
    interval,
    label,
)
from specdec.planning.machines import DoesNotFit
from specdec.planning.search import Search
from specdec.profiling.job import as_yaml
from specdec.report.results import read_requests

PRESET = "planned"
RESULT_FILE = "plan.json"  # this file is written last, so a folder that has it has a whole plan
TABLE_FILE = "plan.txt"
_SHOWN = 8  # rows of the ranking
_WIDTH = 110
_EXECUTOR_KEYS = ("stages", "target_degree", "draft_degree", "shared", "replicas")
_FEW_UNITS = 4  # units (batches of prompts) at batch sizes that are not ranked
_SHORT = 32  # tokens per prompt when sizes are screened
_SCREENED = 3  # candidates that are left after screening
_CUT = 0.9  # factor of the cost of one kind of work, whose share is sought
_PROMPTS = 6  # of simulations at 90 % of a cost
_HIDDEN = 0.02  # work is called hidden if the time depends on it by less than this share
_WORK = {
    **{"stage": "the target's passes", "draft": "drafting", "transfer": "transfers"},
    **{"prune": "pruning", "head": "the output head", "middle": "the middle model"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    strategy: str
    sizes: Mapping[str, Any]  # keys of its policy that differ from the preset
    layout: str
    devices: int
    tokens_per_s: float  # over all requests of a batch
    tokens_per_s_interval: tuple[float, float]
    ms_per_token: float  # of one request
    ms_per_token_interval: tuple[float, float]
    gain: float  # over plain decoding by the plan's objective
    gain_interval: tuple[float, float]  # paired
    first: float  # share of the resamples in which it is the best
    tokens_per_answer: float  # emitted per answer of the target
    hit_rate: float  # share of answers whose next token was in the tree
    memory_gb: float | None  # on the fullest device; None if unknown
    is_plain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    choices: tuple[Recommendation, ...]  # fastest first, with plain decoding among them
    objective: str
    batch: int
    context: int
    devices: int
    acceptance: str  # a description of the acceptance model or record
    machine: str  # a description
    decides: tuple[str, ...] = ()  # sentences on what the first choice depends on
    # The fastest at each further batch size and context.
    by_batch: tuple[Mapping[str, Any], ...] = ()
    memory_limit_gb: float | None = None
    left_out: Mapping[str, str]  # preset -> why it was not simulated
    complete: bool  # whether the budget sufficed
    notes: tuple[str, ...]
    # What a real run is compared with (``check_run``).
    expected: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    measured: bool = False  # whether models decoded here, and nothing was simulated
    simulated_tokens: int = 0
    search_s: float = 0.0
    folder: str = ""  # where it is written

    @property
    def best(self) -> Recommendation:
        return self.choices[0]

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame([asdict(choice) for choice in self.choices])


def conclude(
    search: Search, acceptance: Acceptance, finalists: Sequence[Candidate]
) -> tuple[Plan, Candidate]:
    """Returns the plan and its first choice (the best candidate) of a finished search.
    ``finalists`` are the search's last candidates, plain decoding among them.
    """
    chosen, machine = search.chosen, search.machine
    ranked = search.ranked(finalists, chosen.prompts)
    choices = choices_of(search, ranked)
    winner, units = ranked[0], search.units(ranked[0], chosen.prompts)
    of_presets: dict[str, Candidate] = {}
    for candidate in ranked:
        of_presets.setdefault(candidate.name, candidate)
    plain = of_presets.pop(PLAIN)
    others = list(of_presets.values())
    requests = acceptance.requests if acceptance.drawn else 0
    unit_dicts = [asdict(unit) for unit in units]
    plan = Plan(
        choices=choices,
        objective=chosen.objective,
        batch=chosen.batch[0],
        context=chosen.context[0],
        devices=machine.devices,
        acceptance=f"{acceptance.label}; hit rate {acceptance.hit_rate:.3f}",
        machine=machine.name,
        decides=tuple(_decides(search, winner, units, choices)),
        by_batch=tuple(_by_batch(search, others, plain)),
        memory_limit_gb=machine.memory_gb,
        left_out=search.left_out,
        complete=search.complete,
        notes=tuple(_notes(search, acceptance)),
        expected={"units": unit_dicts, "requests": requests, "error": machine.error},
        simulated_tokens=search.simulator.simulated_tokens,
    )
    return plan, winner


def choices_of(search: Search, ranked: Sequence[Candidate]) -> tuple[Recommendation, ...]:
    """Returns the candidates as recommendations. A candidate is left out if its time on every
    prompt equals that of a better-ranked one; plain decoding always stays.
    """
    chosen = search.chosen
    batch, context = chosen.batch[0], chosen.context[0]
    kept: dict[tuple[Any, ...], tuple[Candidate, Times]] = {}
    for candidate in ranked:
        times = search.times(candidate, chosen.prompts)
        same = (*times.above, *times.below, candidate.name == PLAIN)
        kept.setdefault(same, (candidate, times))
    candidates, all_times = zip(*kept.values(), strict=True)
    num = effective(len(all_times[0].above), search.requests)
    drawn = np.stack([times.resampled(num) for times in all_times])
    first = np.bincount(drawn.argmin(axis=0), minlength=len(drawn)) / drawn.shape[1]
    base = next(at for at, candidate in enumerate(candidates) if candidate.name == PLAIN)
    choices = []
    for at, candidate in enumerate(candidates):
        units, layout = search.units(candidate, chosen.prompts), candidate.layout
        # With one request at a time, decode phases alone count, as in ``tokens_per_s`` of a run.
        alone = Times.of(units, "latency")
        speed = alone if batch == 1 else Times.of(units, "throughput")
        choice = Recommendation(
            strategy=candidate.name,
            sizes=candidate.sizes,
            layout=str(layout),
            devices=layout.devices,
            tokens_per_s=1.0 / speed.mean,
            tokens_per_s_interval=interval(1.0 / speed.resampled(num)),
            ms_per_token=1e3 * alone.mean,
            ms_per_token_interval=interval(1e3 * alone.resampled(num)),
            gain=all_times[base].mean / all_times[at].mean,
            gain_interval=interval(drawn[base] / drawn[at]),
            first=float(first[at]),
            tokens_per_answer=Times.ratio(units, "emitted", "answers").mean,
            hit_rate=Times.ratio(units, "hits", "answers").mean,
            memory_gb=search.machine.used_gb(layout, batch, context),
            is_plain=at == base,
        )
        choices.append(choice)
    return tuple(choices)


def _decides(
    search: Search, winner: Candidate, units: Sequence[Unit], choices: Sequence[Recommendation]
) -> Iterator[str]:
    """Yields sentences on the work that limits the first choice, and on the next best preset.

    A kind of work (drafting, transfers, ...) has the share (t - t') / (0.1 t): t is the time per
    token, t' that with this kind's cost cut to 90 %. Work hidden behind other work has share 0.
    """
    whole = search.times(winner, _PROMPTS).mean
    shares = {}
    for kind in winner.config["clock"]["costs"]:
        less = search.times(winner.rescaled({kind: _CUT}), _PROMPTS).mean
        shares[kind] = (whole - less) / (whole * (1.0 - _CUT))
    parts = [
        f"{100 * share:.0f} % {_WORK.get(kind, kind)}"
        for kind, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= _HIDDEN
    ]
    text = f"its time per token follows {', '.join(parts)}"
    drafting = sum(unit.draft_s for unit in units)
    hidden = sum(unit.hidden_s for unit in units) / drafting if drafting else 0.0
    if shares.get("draft", 1.0) < _HIDDEN and hidden > 0.5:
        text += f"; {100 * hidden:.0f} % of the drafting is hidden behind the target"
    yield text
    other = next((c for c in choices if c.strategy not in (winner.name, PLAIN)), None)
    if other is not None:
        compared = (
            f"{c.strategy} {c.tokens_per_answer:.2f} every"
            f" {c.ms_per_token * c.tokens_per_answer:.1f} ms"
            for c in (choices[0], other)
        )
        yield f"tokens per answer of the target: {', '.join(compared)}"


def _by_batch(
    search: Search, of_presets: Sequence[Candidate], plain: Candidate
) -> Iterator[dict[str, Any]]:
    """Yields a row on the fastest candidate for each (context, batch size) but the first, which the
    plan ranks. Tries each preset's best, and variants with one policy size divided by 2 or 4.
    """
    machine, chosen = search.machine, search.chosen
    contexts = chosen.context if machine.prices_context else chosen.context[:1]
    for context, batch in [*product(contexts, chosen.batch)][1:]:
        screened: list[tuple[float, Candidate]] = []
        for candidate in (size for best in of_presets for size in (best, *best.smaller())):
            if screened and not search.has_time():
                break
            with suppress(DoesNotFit, UserError, ValueError):
                made = candidate.on(machine, candidate.layout, batch=batch, context=context)
                screened.append((search.times(made, 1, _SHORT).mean, made))
        try:
            base = plain.on(machine, plain.layout, batch=batch, context=context)
        except DoesNotFit:
            continue
        kept = [made for _, made in sorted(screened, key=itemgetter(0))[:_SCREENED]]
        best = search.ranked([*kept, base], _FEW_UNITS)[0]
        speed = 1.0 / Times.of(search.units(best, _FEW_UNITS), "throughput").mean
        plain_s, best_s = (search.times(c, _FEW_UNITS).mean for c in (base, best))
        gain = plain_s / best_s
        found = {"label": str(best), "tokens_per_s": speed, "gain": gain}
        yield {"batch": batch, "context": context, **found}


def _notes(search: Search, acceptance: Acceptance) -> Iterator[str]:
    yield from search.notes
    if not search.complete:
        yield (
            f"budget_s={search.chosen.budget_s:g} was spent before the search ended: give more, and"
            " start the same command again to continue"
        )
    if acceptance.drawn and not acceptance.requests:
        yield "the law states no requests: intervals are of the simulated prompts alone"
    if not search.machine.prices_context:
        yield f"times of {search.machine.name} do not depend on the context"
    if search.unknown:
        names = ", ".join(search.unknown)
        yield f"not considered, since their acceptance is unknown here: {names}"
    others = {k for k, why in search.left_out.items() if why != OTHER_PROGRAM}
    if others := others - {*search.unknown}:
        yield f"{len(others)} presets were not simulated: plan.json says why, each"


# The files of a plan.


def write_plan(folder: Path, plan: Plan, winner: Candidate, provenance: Mapping[str, Any]) -> None:
    write_parts(folder, winner, plan.best.tokens_per_s, profile=not plan.measured)
    write_text(folder / TABLE_FILE, table(plan))
    write_json(folder / RESULT_FILE, {**asdict(plan), "provenance": provenance})


def write_parts(
    folder: Path, winner: Candidate, tokens_per_s: float, *, profile: bool = True
) -> None:
    choices, layout, node = winner.config["choices"], winner.layout, winner.config["executor"]
    groups = {part: choices[part] for part in ("source", "policy", "verifier", "executor")}
    if len(node) > 1 and choices["executor"] == "local":
        groups["executor"] = "pipeline"
    groups |= {"serving": choices["serving"]} if "serving" in choices else {}
    title = f"{winner} on {layout}, by specdec plan"
    preset: dict[str, Any] = {
        "defaults": [{f"override /{group}": choice} for group, choice in groups.items()],
        "strategy": {"name": PRESET, "title": title, "kind": "parts", "baseline": False},
    }
    if winner.sizes:
        preset["policy"] = dict(winner.sizes)
    if len(node) > 1:
        preset["executor"] = {key: node[key] for key in _EXECUTOR_KEYS if key in node}
    text = f"{winner.name} on {layout}, {tokens_per_s:.1f} tokens/s expected."
    head = f"# @package _global_\n# By `specdec plan`: {text}\n"
    write_text(folder / "strategy" / f"{PRESET}.yaml", head + as_yaml(preset))
    if profile:
        clock = winner.config["clock"]
        times = {"note": clock["note"], "stages": layout.stages, "costs": clock["costs"]}
        head = f"# Times of the first choice of a plan, on {layout}.\n"
        write_text(folder / "profile" / f"{PRESET}.yaml", head + as_yaml(times))


def table(plan: Plan) -> str:
    lines = [
        f"plan for {plan.objective}: batch {plan.batch}, context {plan.context},"
        f" {plan.devices} device{'s' * (plan.devices > 1)};"
        f" {'measured' if plan.measured else 'simulated'} time on {plan.machine}",
        f"acceptance: {plan.acceptance}",
        *_ranking(plan),
    ]
    texts = [f"decides: {text}" for text in plan.decides]
    row = "at batch {batch}, context {context}: {label}, {tokens_per_s:.1f} tokens/s ({gain:.2f}x)"
    texts += [row.format(**of_batch) for of_batch in plan.by_batch]
    texts += [f"note: {text}" for text in plan.notes]
    wrapper = textwrap.TextWrapper(
        _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    lines += [line for text in texts for line in wrapper.wrap(text)]
    return "\n".join(lines) + "\n"


def _ranking(plan: Plan) -> list[str]:
    shares: dict[str, float] = {}
    shown = []
    for choice in plan.choices:
        if choice.strategy not in shares:
            shown.append(choice)
        shares[choice.strategy] = shares.get(choice.strategy, 0.0) + choice.first
    plain = [choice for choice in shown[_SHOWN - 1 :] if choice.is_plain]
    shown = [*shown[: _SHOWN - len(plain)], *plain]  # plain decoding in any case
    rows = [("strategy", "layout", "tokens/s (95 %)", "gain (95 %)", "first", "GB/device")]
    for c in shown:
        speed, gain = c.tokens_per_s_interval, c.gain_interval
        size = "?"
        if c.memory_gb is not None:
            size = f"{c.memory_gb:{'.1f' if c.memory_gb >= 1 else '.2g'}}"
            size += f" of {plan.memory_limit_gb:g}"
        row = (
            *(label(c.strategy, c.sizes), c.layout),
            f"{c.tokens_per_s:.1f} ({speed[0]:.1f}-{speed[1]:.1f})",
            f"{c.gain:.2f} ({gain[0]:.2f}-{gain[1]:.2f})",
            *(f"{100 * shares[c.strategy]:.0f} %", size),
        )
        rows.append(row)
    return _aligned(rows, left=2)


def _aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:{'<' if at < left else '>'}{width}}}" for at, width in enumerate(widths)]
    return [" " + "  ".join(forms).format(*row) for row in rows]


# The check of a plan with a real run of its first choice.


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    planned: float
    low: float
    high: float
    measured: float

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high

    def __str__(self) -> str:
        where = "inside" if self.is_inside else "OUTSIDE"
        return (
            f"{self.name}: planned {self.planned:.3f} ({self.low:.3f} to {self.high:.3f}), run"
            f" {self.measured:.3f}, {where}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]


def check_run(expected: Mapping[str, Any], run: Sequence[Unit]) -> PlanVerdict:
    """Compares a real run of the plan's first choice with the predictions, ``Plan.expected``.

    A predicted interval is bootstrapped with as many prompts as the run has, or fewer (thus wider)
    if the acceptance model comes from few requests; intervals of times are widened by the relative
    error of the machine's times. A warning names the acceptance model if tokens per answer or hit
    rate are outside their intervals, and the latency profile if the time per answer is outside.
    """
    units = [Unit(**values) for values in expected["units"]]
    num = effective(effective(len(units), expected["requests"]), len(run))

    def figure(name: str, above: str, below: str, scale: float = 1.0, error: float = 0.0) -> Figure:
        planned, measured = (Times.ratio(of, above, below, scale) for of in (units, run))
        low, high = interval(planned.resampled(num))
        bounds = {"low": low * (1.0 - error), "high": high * (1.0 + error)}
        return Figure(name=name, planned=planned.mean, measured=measured.mean, **bounds)

    error = float(expected["error"])
    time = figure("ms per token", "seconds", "tokens", 1e3, error)
    emitted = figure("tokens per answer", "emitted", "answers")
    hits = figure("hit rate", "hits", "answers")
    answer = figure("ms per answer", "seconds", "later_answers", 1e3, error)
    warnings = []
    outside = [f for f in (emitted, hits) if not f.is_inside]
    if outside:
        warnings.append(
            f"WARNING: acceptance disagrees with the law ({outside[0]}): plan again with a"
            " record or log of this workload"
        )
    # A time per answer depends on the profile alone if answers are of whole trees, which have no
    # hits. Otherwise it includes refills after misses, so it tells nothing if the hits disagree.
    if not answer.is_inside and (not outside or not any(unit.hits for unit in units)):
        warnings.append(
            f"WARNING: times disagree with the profile by {answer.measured / answer.planned:.2f}"
            f" ({answer}): measure the profile again, or correct the described machine"
        )
    if not time.is_inside and not warnings:
        warnings.append(f"WARNING: {time}: the plan does not hold for this run")
    return PlanVerdict(figures=(time, emitted, hits, answer), warnings=tuple(warnings))


def units_of_run(folder: Path) -> list[Unit]:
    if not (folder / "summary.json").is_file():
        raise UserError(
            f"check={folder} has no summary.json: give the folder of a complete `specdec run`, or"
            " check=true to run the first choice here"
        )
    records = read_requests(folder / "requests.jsonl")
    units = [Unit.of([r.result], r.totals) for r in records if r.totals is not None]
    if not units or len(units) < len(records):
        raise UserError(
            f"check={folder} has requests that shared steps: check with a run of batch_size=1"
        )
    return units
