"""``specdec plan``: from the words of the command line to a plan in a folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from specdec.config.hydra import parse
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.files import parse_json
from specdec.planning.acceptance import Acceptance, OfRecord, chain_table, of_log, of_model
from specdec.planning.answer import Plan, Ranked, choices_of, compared
from specdec.planning.candidates import PLAIN, Candidate, families, with_batch
from specdec.planning.chains import chain_cell, chain_cells, crossover
from specdec.planning.checking import Verdict, check_run, expectation, units_of_run
from specdec.planning.machines import DoesNotFit, Machine, machine_of
from specdec.planning.measuring import measured_costs, measured_machine, with_controller
from specdec.planning.options import MEASURED, PlanOptions, split_words
from specdec.planning.search import Search, Times
from specdec.planning.sensitivity import (
    changes,
    sentence_of_shares,
    sentences_of_changes,
    shares,
)
from specdec.planning.simulate import Simulator
from specdec.planning.writing import PRESET, engine_flags, write_plan
from specdec.report.provenance import provenance
from specdec.runs.jobs import Progress, run_job

_BATCHES = (1, 4, 16, 64)
_LENGTH = 64  # tokens per simulated prompt
_DECODED = 8  # prompts that are decoded where models have to
_REFUSED = {
    "strategy": "a plan chooses the strategy (strategies=[...] limits the choice)",
    "clock": "a plan is simulated on profile=",
    "executor": "a plan chooses the layout (devices= limits it)",
    "policy": "a plan chooses the sizes",
    "source": "a plan chooses the source",
    "batch_size": "use batch=",
    "record": "a plan records where it has to",
    "trace": "trace the planned strategy instead",
}


@dataclass(frozen=True, slots=True)
class Planning:
    """A checked request for a plan.

    Attributes:
        chosen: the plan's own keys.
        words: the others, for the configuration.
        extra: further configuration trees.
        config: composed from ``words``.
        machine: None for a profile that has to be measured.
        acceptance: None where models have to decode first.
        output_dir: folder that the words name.
    """

    chosen: PlanOptions
    words: tuple[str, ...]
    extra: tuple[Path, ...]
    config: Mapping[str, Any]
    machine: Machine | None
    acceptance: Acceptance | None
    output_dir: str | None = None

    @property
    def claimed(self) -> dict[str, Any]:
        """Content of the folder's config.yaml: all but the check, which may follow later."""
        kept = {name: getattr(self.chosen, name) for name in self.chosen.__dataclass_fields__}
        del kept["check"]
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}
        words = [word for word in self.words if not word.startswith("output_dir=")]
        return {"command": "plan", **lists, "overrides": words}


def planning_of(
    words: Sequence[str], extra: Sequence[Path] = (), keys: Mapping[str, Any] | None = None
) -> Planning:
    """Checks the words of the command line, before anything is decoded.

    Args:
        words: of the command line.
        extra: further configuration trees.
        keys: the plan's own keys as values, in place of words.

    Raises:
        UserError: the first thing that cannot be used.
    """
    chosen, rest = split_words(words, keys or {})
    for override in parse(rest):
        section = str(override.key_or_group).lstrip("+~").partition(".")[0]
        if section in _REFUSED:
            raise UserError(f"{override.input_line}: {_REFUSED[section]}; leave it out")
    job = run_job_of(rest, extra)
    config = job.config
    acceptance = of_log(chosen) if chosen.acceptance else of_model(config["model"])
    if acceptance is None and config["model"]["kind"] not in ("pretrained", "random"):
        raise UserError(
            f"model.kind={config['model']['kind']} has no hits of a draft to plan with: use"
            " model=hf, tiny, replay or a law, or acceptance=FILE"
        )
    machine: Machine | None = None
    if chosen.profile == MEASURED:
        if acceptance is not None:
            raise UserError(
                "profile=measured measures models, and a law or record has none: use model=hf or"
                " tiny, or the profile that `specdec profile` has written"
            )
    else:
        name = None if acceptance is None else acceptance.draft_name
        machine = machine_of(chosen, extra, draft_name=name)
    if chosen.check == "true" and acceptance is not None:
        raise UserError(
            "check=true runs models, and a law or record has none: give check=DIR, the folder of a"
            " run of the planned strategy"
        )
    if chosen.check not in ("", "true", "false"):
        units_of_run(Path(chosen.check).expanduser())
    return Planning(chosen, tuple(rest), tuple(extra), config, machine, acceptance, job.output_dir)


def plan_job(asked: Planning, folder: Path, progress: Progress) -> Plan:
    """Searches, and writes the plan into a folder; continues an interrupted search.

    Raises:
        UserError: nothing fits the devices.
    """
    began = monotonic()
    asked = _with_measured(asked, folder, progress)
    chosen, machine, acceptance = asked.chosen, asked.machine, asked.acceptance
    assert machine is not None
    assert acceptance is not None
    words = [w for w in asked.words if not w.startswith(("model", "output_dir=", "threads="))]
    path = folder / "evaluations.jsonl"
    pair = acceptance.pair()
    prompts = max(chosen.prompts, 4 * max(chosen.batch))
    simulator = Simulator(pair, path, of="plan", prompts=prompts)
    found, left_out = families([*words, *acceptance.words], asked.extra, chosen.strategies, pair)

    def report(label: str, total: int | None) -> None:
        if total is None:
            progress.advance(detail=label)
        else:
            progress.phase(label, total)

    search = Search(
        machine=machine,
        simulator=simulator,
        chosen=chosen,
        requests=acceptance.requests,
        drawn=acceptance.drawn,
        length=_LENGTH,
        report=report,
        left_out=left_out,
    )
    finalists = search.run(found)
    plan, winner = _answer(asked, search, finalists, path)
    plan = replace(
        plan,
        simulated_tokens=simulator.simulated_tokens,
        search_s=monotonic() - began,
        folder=str(folder),
        overrides=asked.words,
    )
    write_plan(folder, plan, winner, provenance(command=sys.argv, config=asked.claimed))
    return plan


def _answer(
    asked: Planning, search: Search, finalists: Sequence[Candidate], path: Path
) -> tuple[Plan, Candidate]:
    """The plan of a finished search, and its first choice."""
    chosen, machine, acceptance = asked.chosen, search.machine, asked.acceptance
    assert acceptance is not None
    count, batch, context = chosen.prompts, chosen.batch[0], chosen.context[0]
    units = {id(c): search.simulator.units(c, count, _LENGTH) for c in finalists}
    memory = {id(c): machine.memory_gb(c.layout, batch, context) for c in finalists}
    choices = choices_of(
        [Ranked(c, units[id(c)], memory[id(c)]) for c in finalists],
        objective=chosen.objective,
        requests=acceptance.requests,
        drawn=acceptance.drawn,
        plain=PLAIN,
    )
    by_time = sorted(finalists, key=lambda c: search.times(c, count).mean)
    winner = by_time[0]

    def times(candidate: Candidate, prompts: int) -> Times:
        return search.times(candidate, prompts)

    plain = next(c for c in finalists if c.name == PLAIN)
    of_presets = list({c.name: c for c in reversed(by_time) if c.name != PLAIN}.values())[::-1]
    search.report("sensitivity", 11)
    found = (
        []
        if search.out_of_time
        else changes(
            acceptance,
            [*of_presets, plain],
            times=times,
            objective=chosen.objective,
            length=_LENGTH,
            path=path,
            report=search.report,
        )
    )
    drafting = sum(unit.draft_s for unit in units[id(winner)])
    hidden = sum(unit.hidden_s for unit in units[id(winner)]) / drafting if drafting else None
    decides = [sentence_of_shares(shares(times, winner), hidden)]
    other = next((c for c in choices if c.strategy not in (winner.name, PLAIN)), None)
    if other is not None:
        decides.append(compared(choices[0], other))
    table = chain_table(acceptance)
    batches = chosen.batch if len(chosen.batch) > 1 else _BATCHES
    contexts = chosen.context if machine.prices_context else chosen.context[:1]
    best_chain = chain_cell(machine, table, batch, context)
    draft = str(asked.config["model"].get("draft") or "DRAFT")
    plan = Plan(
        choices=choices,
        objective=chosen.objective,
        batch=batch,
        context=context,
        devices=machine.devices,
        acceptance=f"{acceptance.told}; hit rate {acceptance.hit_rate():.3f}",
        machine=f"{machine.name}",
        decides=tuple(decides),
        changes=tuple(found),
        changes_told=tuple(sentences_of_changes(found, winner.name, acceptance.hit_rate())),
        chains=tuple(chain_cells(machine, table, batches, contexts)),
        crossover={c: crossover(machine, table, c) for c in contexts},
        by_batch=tuple(_by_batch(search, of_presets, plain)),
        engines=engine_flags(best_chain, draft),
        memory_limit_gb=machine.limit_gb,
        left_out=search.left_out,
        complete=search.complete,
        notes=tuple(_notes(asked, search)),
        expected=expectation(
            units[id(winner)],
            requests=acceptance.requests,
            drawn=acceptance.drawn,
            error=machine.error,
        ),
    )
    return plan, winner


def _by_batch(
    search: Search, of_presets: Sequence[Candidate], plain: Candidate
) -> list[dict[str, Any]]:
    """The fastest ranked candidate at the other batch sizes, in its own layout."""
    rows = []
    context = search.chosen.context[0]
    for batch in search.chosen.batch[1:]:
        made: list[tuple[float, Candidate]] = []
        base = None
        for candidate in [*of_presets[:4], plain]:
            try:
                other = with_batch(candidate, search.machine, batch, context)
            except DoesNotFit:
                continue
            seconds = search.times(other, 4).mean
            made.append((seconds, other))
            base = seconds if candidate is plain else base
        if made and base is not None:
            seconds, best = min(made, key=lambda pair: pair[0])
            units = search.simulator.units(best, 4, _LENGTH)
            speed = 1.0 / Times.of(units, "throughput", 1).mean
            told = {"batch": batch, "told": best.told(), "tokens_per_s": speed}
            rows.append({**told, "gain": base / seconds})
    return rows


def _notes(asked: Planning, search: Search) -> list[str]:
    acceptance, machine, chosen = asked.acceptance, search.machine, asked.chosen
    assert acceptance is not None
    notes = []
    if not search.complete:
        notes.append(
            f"budget_s={chosen.budget_s:g} was spent before the search ended: give more, and start"
            " the same command again to continue"
        )
    if acceptance.drawn and not acceptance.requests:
        notes.append("the law states no requests: intervals are of the simulated prompts alone")
    if not machine.prices_context:
        notes.append(f"times of {machine.name} do not depend on the context")
    others = [name for name, why in search.left_out.items() if "another program" not in why]
    if others:
        notes.append(f"{len(others)} presets were not simulated: plan.json says why, each")
    return notes


def _with_measured(asked: Planning, folder: Path, progress: Progress) -> Planning:
    """Decodes prompts and measures the machine where the plan has to."""
    if asked.acceptance is not None and asked.machine is not None:
        return asked
    limit = (
        [] if any(w.startswith("data.limit=") for w in asked.words) else [f"data.limit={_DECODED}"]
    )
    kept = [w for w in asked.words if not w.startswith("output_dir=")]
    words = [*kept, *limit]
    job = run_job_of([*words, f"strategy={PLAIN}", "record=true"], asked.extra)
    run = folder / "record"
    if not (run / "summary.json").is_file():
        run.mkdir(parents=True, exist_ok=True)
        run_job(job.config, run, progress)
    acceptance = OfRecord.of(str(run / "record.npz"))
    acceptance = replace(acceptance, num_layers=_layers(asked))
    machine = asked.machine
    if machine is None:
        devices = asked.chosen.devices or 1
        stages = max(devices - 1, 1)
        costs, work = measured_costs(words, asked.extra, stages=stages, progress=progress)
        note = "measured here"
        if stages == 1:
            costs, note = with_controller(
                costs,
                work=work,
                words=words,
                extra=asked.extra,
                acceptance=acceptance,
                progress=progress,
            )
        machine = measured_machine(costs, note, stages=stages, devices=devices)
    return replace(asked, acceptance=acceptance, machine=machine)


def _decoding_words(words: Sequence[str]) -> list[str]:
    """The words of a real run, which has few prompts unless they say otherwise."""
    kept = [word for word in words if not word.startswith("output_dir=")]
    limited = any(word.startswith("data.limit=") for word in kept)
    return kept if limited else [*kept, f"data.limit={_DECODED}"]


def _layers(asked: Planning) -> int:
    """Layers of the target that was decoded."""
    from specdec.pairs import build_pair

    return int(build_pair(asked.config["model"]).num_layers)


def check_job(asked: Planning, folder: Path, progress: Progress) -> Verdict:
    """Compares the plan in a folder with a run, which it starts where ``check=true``.

    On the wall clock where the profile was measured and one device suffices, else on the paced
    clock with the plan's own profile.

    Raises:
        UserError: a run that cannot be compared.
    """
    loaded = parse_json((folder / "plan.json").read_bytes())
    expected = loaded["expected"]
    if asked.chosen.check != "true":
        return check_run(expected, units_of_run(Path(asked.chosen.check).expanduser()))
    trees = [*asked.extra, folder]
    words = [*_decoding_words(asked.words), f"strategy={PRESET}"]
    staged = loaded["choices"][0]["devices"] > 1
    if asked.chosen.profile == MEASURED and not staged:
        words.append("clock=measured")
    else:
        words += ["clock=paced", f"clock.profile={PRESET}"]
        words += ["executor.transport=distributed"] if staged else []
    run = folder / "check"
    if not (run / "summary.json").is_file():
        run.mkdir(parents=True, exist_ok=True)
        run_job(run_job_of(words, trees).config, run, progress)
    return check_run(expected, units_of_run(run))


class _Silent:
    """Progress that nobody sees."""

    def phase(self, label: str, total: int | None) -> None: ...

    def advance(self, count: int = 1, detail: str = "") -> None: ...

    def note(self, text: str) -> None: ...


def plan(
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[str | Path] = (),
    output_dir: str | Path | None = None,
    **keys: Any,
) -> Plan:
    """Plans a method, its sizes and its layout, as ``specdec plan`` does.

        specdec.plan(["model=law_pipespec_1b_70b"], profile="specpipe_8x3090", devices=9).frame

    Args:
        overrides: as on the command line: model=, data=, sampling=, and the plan's own keys.
        config_dirs: further configuration trees (``--config-dir``).
        output_dir: folder for the files of the plan, which continues a search; None: none remain.
        keys: the plan's own keys (``PlanOptions``) as values.

    Raises:
        UserError: anything that the command line refuses.
    """
    for name, value in (("overrides", overrides), ("config_dirs", config_dirs)):
        if isinstance(value, str):
            raise UserError(f"{name}={value!r} must be a list, as in {name}=[{value!r}]")
    asked = planning_of(list(overrides), [Path(folder) for folder in config_dirs], keys)
    if output_dir is not None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        return plan_job(asked, Path(output_dir), _Silent())
    with TemporaryDirectory() as folder:
        return replace(plan_job(asked, Path(folder), _Silent()), folder="")
