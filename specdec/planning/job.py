from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.files import parse_json, write_json
from specdec.pairs import build_pair
from specdec.planning.acceptance import OfRecord, chain_table
from specdec.planning.answer import Plan
from specdec.planning.asked import Planning, planning_of
from specdec.planning.candidates import OTHER_PROGRAM, PLAIN, decoded_families, families
from specdec.planning.chains import chain_cell
from specdec.planning.checking import PlanVerdict, check_run, units_of_run
from specdec.planning.conclusion import conclude
from specdec.planning.controller import with_controller
from specdec.planning.measuring import Measured, ModelsHere, measured_costs, memory_here
from specdec.planning.options import MEASURED
from specdec.planning.search import Search
from specdec.planning.simulate import Candidate, Simulator
from specdec.planning.trials import TRIALS_FILE, calibrated
from specdec.planning.writing import PRESET, RESULT_FILE, write_plan
from specdec.report.provenance import provenance
from specdec.runs.jobs import Progress, run_job

SEARCH_FILE = "search.json"
"""Its presence in a folder says that the search was complete."""

_MEASURED = "measured.json"
_LENGTH = 64  # tokens per simulated prompt
_DECODED = 24  # prompts that models decode: as many as candidates are ranked on
_SAMPLE = 0  # seed of the random sample of prompts
_UNITS, _FEW_UNITS = 8, 4  # least number of batches, of the ranked size and of the others


@dataclass(frozen=True, slots=True)
class Searched:
    """A finished search; ``path`` is the file of simulation results.

    ``finalists`` are the candidates of the last round, and plain decoding.
    """

    asked: Planning
    search: Search
    finalists: tuple[Candidate, ...]
    path: Path


def searched(asked: Planning, folder: Path, progress: Progress) -> Searched:
    """Measures what has to be measured, then searches; resumes from results in ``folder``."""
    models = ModelsHere(_decoding_words(asked.words), asked.extra, progress)
    has_models = asked.acceptance is None
    asked = _with_measured(asked, folder, models)
    chosen, machine, acceptance = asked.chosen, asked.machine, asked.acceptance
    assert machine is not None
    assert acceptance is not None
    words = [w for w in asked.words if not w.startswith(("model", "output_dir=", "threads="))]
    path = folder / "evaluations.jsonl"
    pair = acceptance.pair()
    prompts = max(chosen.prompts, _UNITS * chosen.batch[0], _FEW_UNITS * max(chosen.batch))
    simulator = Simulator(pair, path, of="plan", prompts=prompts, models=models)
    found, left_out = families([*words, *acceptance.words], asked.extra, chosen.strategies, pair)
    here = isinstance(machine, Measured) and machine.devices == 1
    unknown = [name for name, why in left_out.items() if why != OTHER_PROGRAM]
    if has_models:
        decoded, reasons = decoded_families(models.words, asked.extra, unknown, measured=here)
        found, unknown = [*found, *decoded], list(reasons)
        left_out = {**{k: v for k, v in left_out.items() if v == OTHER_PROGRAM}, **reasons}

    def report(label: str, total: int | None) -> None:
        if total is None:
            progress.advance(detail=label)
        else:
            progress.phase(label, total)

    best_chain = chain_cell(machine, chain_table(acceptance), chosen.batch[0], chosen.context[0])
    search = Search(
        machine=machine,
        simulator=simulator,
        chosen=chosen,
        requests=acceptance.requests / chosen.batch[0],
        drawn=acceptance.drawn,
        length=_LENGTH,
        chain_length=0 if best_chain is None else best_chain.draft_tokens,
        report=report,
        left_out=left_out,
        unknown=unknown,
    )
    finalists = search.run(found)
    if here:
        started = monotonic()
        finalists = calibrated(finalists, search=search, models=models, path=folder / TRIALS_FILE)
        search.extend(monotonic() - started)
    return Searched(asked, search, tuple(finalists), path)


def plan_job(asked: Planning, folder: Path, progress: Progress) -> Plan:
    """Searches and writes the plan into ``folder``; resumes an interrupted search."""
    began = monotonic()
    done = searched(asked, folder, progress)
    plan, winner = conclude(done.asked, done.search, done.finalists, done.path)
    plan = replace(
        plan,
        simulated_tokens=done.search.simulator.simulated_tokens,
        search_s=monotonic() - began,
        folder=str(folder),
        overrides=asked.words,
    )
    write_plan(folder, plan, winner, provenance(command=sys.argv, config=asked.claimed))
    if plan.complete:
        write_json(folder / SEARCH_FILE, {"tokens": plan.simulated_tokens, "s": plan.search_s})
    return plan


def _with_measured(asked: Planning, folder: Path, models: ModelsHere) -> Planning:
    """Decodes prompts and measures this machine if acceptance or machine are missing."""
    if asked.acceptance is not None and asked.machine is not None:
        return asked
    job = run_job_of([*models.words, f"strategy={PLAIN}", "record=true"], asked.extra)
    run = folder / "record"
    if not (run / "summary.json").is_file():
        run.mkdir(parents=True, exist_ok=True)
        run_job(job.config, run, models.progress)
    acceptance = OfRecord.of(str(run / "record.npz"))
    acceptance = replace(acceptance, num_layers=_layers(asked))
    machine = asked.machine
    if machine is None:
        devices = asked.chosen.devices or 1
        stages = max(devices - 1, 1)
        stored = folder / _MEASURED
        if not stored.is_file():
            write_json(stored, _measured(models, acceptance, asked.chosen.batch, stages, devices))
        machine = Measured.of(parse_json(stored.read_bytes()), stages=stages, devices=devices)
    return replace(asked, acceptance=acceptance, machine=machine)


def _measured(
    models: ModelsHere, acceptance: OfRecord, batches: Sequence[int], stages: int, devices: int
) -> list[dict[str, Any]]:
    """Returns the input of ``Measured.of``; for one stage it includes the controller's time."""
    context = acceptance.mean_context()
    found = []
    memory = memory_here(models.pair, devices)
    for batch in batches:
        costs = measured_costs(models, stages=stages, requests=batch, context=context)
        note = "measured here"
        if stages == 1:
            costs, note = with_controller(
                costs, models=models, acceptance=acceptance, batch=batch, length=_LENGTH
            )
        found.append({"batch": batch, "costs": costs, "note": note, "memory": memory})
    return found


def _decoding_words(words: Sequence[str]) -> list[str]:
    """Returns the words of a real run; by default it decodes a small random sample of the prompts.

    Data sets are ordered, by difficulty or by source, so their first prompts are not typical.
    """
    kept = [word for word in words if not word.startswith("output_dir=")]
    defaults = {"data.limit=": _DECODED, "data.sample_seed=": _SAMPLE}
    asked = tuple(key for key in defaults if any(word.startswith(key) for word in kept))
    return kept + [f"{key}{value}" for key, value in defaults.items() if key not in asked]


def _layers(asked: Planning) -> int:
    return int(build_pair(asked.config["model"]).num_layers)


def check_job(asked: Planning, folder: Path, progress: Progress) -> PlanVerdict:
    """Compares the plan in a folder with a run, which it starts if ``check=true``.

    The run uses the wall clock if the profile was measured and one device suffices, otherwise the
    paced clock with the plan's own profile.
    """
    loaded = parse_json((folder / RESULT_FILE).read_bytes())
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
        overrides: words as on the command line: model=, data=, sampling=, and options of the plan.
        config_dirs: further configuration trees (``--config-dir``).
        output_dir: folder for the files of the plan; a search in it is resumed. None keeps no
            files.
        keys: options of the plan (``PlanOptions``) as values.

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
