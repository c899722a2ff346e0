"""``specdec plan``: checks the request, measures models if necessary, searches, writes the plan."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from specdec.config.hydra import check_lists, parse
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.files import parse_json, write_json
from specdec.planning.acceptance import Acceptance, acceptance_of, of_record
from specdec.planning.alone import measure_alone
from specdec.planning.answer import (
    PRESET,
    RESULT_FILE,
    Plan,
    PlanVerdict,
    check_run,
    conclude,
    units_of_run,
    write_plan,
)
from specdec.planning.candidates import OTHER_PROGRAM, PLAIN, Candidate, Simulator, presets
from specdec.planning.machines import Machine, Profiled, machine_of
from specdec.planning.measuring import ModelsHere, calibrated, measured_here
from specdec.planning.options import MEASURED, PlanOptions, split_words
from specdec.planning.search import Search
from specdec.report.provenance import provenance
from specdec.runs.jobs import run_job
from specdec.runs.progress import Progress

SEARCH_FILE = "search.json"  # its presence in a folder says that the search was complete
_EVALUATIONS = "evaluations.jsonl"
_LENGTH = 64  # tokens per simulated prompt
_UNITS, _FEW_UNITS = 8, 4  # least number of batches, of the ranked size and of the others
# Prompts that models decode: as many as candidates are ranked on. Data sets are ordered, by
# difficulty or by source, so their first prompts are not typical.
_SAMPLE = {"data.limit": 24, "data.sample_seed": 0}
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
class PlanRequest:
    chosen: PlanOptions
    words: tuple[str, ...]  # overrides of the configuration
    extra: tuple[Path, ...]  # further configuration trees
    model: Mapping[str, Any]  # section of the configuration
    machine: Machine | None  # None if it has to be measured first
    acceptance: Acceptance | None  # None if it has to be recorded first
    output_dir: str | None
    alone: bool = False  # whether the target has no draft, so presets that need none are measured

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.yaml: all options but ``check``, which a later command may add."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.chosen).items()}
        del values["check"]
        return {"command": "plan", **values, "overrides": list(self.words)}

    @property
    def decoding_words(self) -> list[str]:
        """Overrides for runs of the models, by default on a small random sample of the data."""
        missing = (k for k in _SAMPLE if not any(word.startswith(f"{k}=") for word in self.words))
        return [*self.words, *(f"{key}={_SAMPLE[key]}" for key in missing)]


def plan_request(
    words: Sequence[str], extra: Sequence[Path] = (), keys: Mapping[str, Any] | None = None
) -> PlanRequest:
    """Parses and checks command-line ``words`` and the plan options ``keys`` (Python values)."""
    chosen, rest = split_words(words, keys or {})
    for override in parse(rest):
        section = str(override.key_or_group).lstrip("+~").partition(".")[0]
        if section in _REFUSED:
            raise UserError(f"{override.input_line}: {_REFUSED[section]}; leave it out")
    job = run_job_of([*rest, f"strategy={PLAIN}"], extra)
    model, check, machine = job.config["model"], chosen.check, None
    kept = tuple(word for word in rest if not word.startswith("output_dir="))
    if model["kind"] == "pretrained" and model["draft"] is None and chosen.acceptance is None:
        wrong = {"profile": chosen.profile not in (None, MEASURED), "check": check == "true"}
        for key in (key for key, is_wrong in wrong.items() if is_wrong):
            raise UserError(
                f"{key}={getattr(chosen, key)}: a model without a draft is measured on this"
                f" machine: leave {key} out, or add model.draft=PATH"
            )
        return PlanRequest(
            chosen, kept, tuple(extra), model, None, None, job.output_dir, alone=True
        )
    run_job_of(rest, extra)  # checks the draft too
    acceptance = acceptance_of(chosen, model)
    if acceptance is None and model["kind"] not in ("pretrained", "random"):
        raise UserError(
            f"model.kind={model['kind']} has no hits of a draft to plan with: use"
            " model=hf, tiny, replay or a law, or acceptance=FILE"
        )
    if chosen.profile != MEASURED:
        draft_name = acceptance.draft_name if acceptance else None
        machine = machine_of(chosen, extra, draft_name=draft_name)
    elif acceptance is not None:
        raise UserError(
            "profile=measured measures models, and a law or record has none: use model=hf or"
            " tiny, or the profile that `specdec profile` has written"
        )
    if check == "true" and acceptance is not None:
        raise UserError(
            "check=true runs models, and a law or record has none: give check=DIR, the folder of a"
            " run of the planned strategy"
        )
    if check not in ("", "false") and chosen.batch[0] > 1:
        raise UserError(
            f"check={check} compares one request at a time, and batch={chosen.batch[0]} was"
            " planned: plan with batch=1"
        )
    if check not in ("", "true", "false"):
        units_of_run(Path(check).expanduser())
    return PlanRequest(chosen, kept, tuple(extra), model, machine, acceptance, job.output_dir)


def searched(
    request: PlanRequest, folder: Path, progress: Progress
) -> tuple[Search, Acceptance, list[Candidate]]:
    """Measures the models if necessary, then searches, resuming from files in ``folder``. Returns
    the search, the acceptance, and the last round's candidates with plain decoding.
    """
    chosen, extra, began = request.chosen, request.extra, monotonic()
    batch = chosen.batch[0]
    progress.note(
        f"at most about {chosen.budget_s:g} s (budget_s)"
        + ("" if request.acceptance else ", and what one decoding of the prompts takes")
    )
    models = ModelsHere(request.decoding_words, extra, progress)
    acceptance = request.acceptance or _recorded(models, folder)
    machine = request.machine or _measured(models, acceptance, chosen, folder)
    pair = acceptance.pair
    prompts = max(chosen.prompts, _UNITS * batch, _FEW_UNITS * max(chosen.batch))
    simulator = Simulator(
        pair, folder / _EVALUATIONS, prompts=prompts, models=lambda: models.loaded
    )
    words = [word for word in request.words if not word.startswith(("model", "threads="))]
    tried, left_out = presets(
        [*words, *acceptance.overrides], extra, chosen.strategies, acceptance.pair
    )
    calibrates = request.machine is None and machine.devices == 1
    unknown = [name for name, why in left_out.items() if why != OTHER_PROGRAM]
    if request.acceptance is None:
        decoded, reasons = presets(models.words, extra, unknown, measured=calibrates)
        left_out = {k: v for k, v in left_out.items() if k not in unknown} | reasons
        tried, unknown = [*tried, *decoded], list(reasons)
    search = Search(
        machine=machine,
        simulator=simulator,
        chosen=chosen,
        requests=acceptance.requests / batch if acceptance.drawn else 0.0,
        length=_LENGTH,
        progress=progress,
        left_out=left_out,
        unknown=unknown,
        measured_s=monotonic() - began,
        until=inf if request.acceptance else began + chosen.budget_s,
    )
    try:
        finalists = search.run(tried)
    except KeyboardInterrupt:
        progress.note(search.so_far())
        raise
    if calibrates:
        finalists = calibrated(finalists, search=search, models=models, path=folder / "trials.json")
    return search, acceptance, finalists


def _recorded(models: ModelsHere, folder: Path) -> Acceptance:
    config = run_job_of([*models.words, f"strategy={PLAIN}", "record=true"], models.extra).config
    run = _once(config, folder / "record", models.progress)
    layers = models.loaded[0].num_layers
    return of_record({"record": str(run / "record.npz"), "num_layers": layers})


def _once(config: dict[str, Any], run: Path, progress: Progress) -> Path:
    if not (run / "summary.json").is_file():
        run.mkdir(parents=True, exist_ok=True)
        run_job(config, run, progress)
    return run


def _measured(
    models: ModelsHere, acceptance: Acceptance, chosen: PlanOptions, folder: Path
) -> Profiled:
    devices, stored = chosen.devices or 1, folder / "measured.json"
    stages = max(devices - 1, 1)
    if not stored.is_file():
        shape = {"stages": stages, "devices": devices}
        write_json(stored, measured_here(models, acceptance, batches=chosen.batch, **shape))
    values = parse_json(stored.read_bytes())
    values["by_batch"] = {int(batch): costs for batch, costs in values["by_batch"].items()}
    return Profiled(name=MEASURED, devices=devices, stages=stages, **values)


def plan_job(request: PlanRequest, folder: Path, progress: Progress) -> Plan:
    began = monotonic()
    if request.alone:
        models = ModelsHere(request.decoding_words, request.extra, progress)
        keys = [key for key, value in request.model.items() if value is not None]
        plan, winner = measure_alone(models, request.chosen, keys)
    else:
        plan, winner = conclude(*searched(request, folder, progress))
    seconds = monotonic() - began
    plan = replace(plan, overrides=request.words, search_s=seconds, folder=str(folder))
    write_plan(folder, plan, winner, provenance(command=sys.argv, config=request.config))
    if plan.complete:
        write_json(folder / SEARCH_FILE, {"tokens": plan.simulated_tokens, "s": seconds})
    return plan


def check_job(request: PlanRequest, folder: Path, progress: Progress) -> PlanVerdict:
    """Compares the plan in ``folder`` with the run in the folder that ``check=`` names. "true"
    starts a run: on the wall clock if profile=measured and one device suffices, else a paced clock.
    """
    plan = parse_json((folder / RESULT_FILE).read_bytes())
    run = Path(request.chosen.check).expanduser()
    if request.chosen.check == "true":
        staged = plan["choices"][0]["devices"] > 1
        if request.chosen.profile == MEASURED and not staged:
            clock = ["clock=measured"]
        else:
            clock = ["clock=paced", f"clock.profile={PRESET}"]
            clock += ["executor.transport=distributed"] if staged else []
        words = [*request.decoding_words, f"strategy={PRESET}", *clock]
        config = run_job_of(words, [*request.extra, folder]).config
        run = _once(config, folder / "check", progress)
    return check_run(plan["expected"], units_of_run(run))


def plan(
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[str | Path] = (),
    output_dir: str | Path | None = None,
    **keys: Any,
) -> Plan:
    """Chooses a strategy, its policy's sizes and its device layout, as ``specdec plan`` does.

        specdec.plan(["model=law_pipespec_1b_70b"], profile="specpipe_8x3090", devices=9).frame

    Args:
        overrides: words as on the command line: model=, data=, sampling=, and options of the plan.
        config_dirs: further configuration trees (``--config-dir``).
        output_dir: folder for the plan's files, from which a search resumes; None keeps none.
        keys: options of the plan (``PlanOptions``) as values.
    """
    check_lists(overrides=overrides, config_dirs=config_dirs)
    request = plan_request(list(overrides), [Path(folder) for folder in config_dirs], keys)
    if output_dir is not None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        return plan_job(request, Path(output_dir), Progress())
    with TemporaryDirectory() as folder:
        return replace(plan_job(request, Path(folder), Progress()), folder="")
