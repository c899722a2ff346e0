"""``specdec run -m`` is a Hydra multirun whose jobs can be resumed.

A Hydra launcher reports only the first failure and does not skip complete jobs. A job here
therefore never raises: it writes a record of its outcome, and the sweep lists all records at its
end: ``job`` (its folder's name), ``status`` (ok, skipped, refused, failed, interrupted, lost),
``error`` and ``seconds``. Records are files, because joblib and submitit run jobs in other
processes.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import format_exc, print_exc

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from specdec.cli.execute import SUMMARY_FILE, execute, print_notices
from specdec.config.folders import alone_in, make_folder, output_folder, safe_name
from specdec.config.hydra import (
    Words,
    combinations,
    compose_raw,
    key_of,
    parse,
    plain,
    search_path,
    without_hydra,
)
from specdec.config.job import checked_job, run_job_of
from specdec.config.options import CONFIG_DIR, Trees
from specdec.errors import UserError
from specdec.files import is_full, parse_json, write_text
from specdec.parts.build import locate

_MAX_CHECKED = 64
SWEEP_FILE = "sweep.json"
_NOTES = ".jobs-"

_UNRECORDED = {  # status of jobs without a record -> error
    "lost": "its process ended without a record (killed, or out of memory), or never started",
    "interrupted": "the sweep was interrupted before this job ended; the same command continues it",
}


def sweep(overrides: Words, extra: Trees = ()) -> int:
    """Runs one job per combination of the comma-separated values, each in a folder named by what
    varies.

    Complete jobs are skipped, so the same command with the same ``output_dir`` resumes a sweep. Bad
    overrides are reported before the first job. The exit status is 0 if every job is complete, 2 if
    only bad input failed, else 1.
    """
    parsed = parse(overrides)
    _check_hydra(parsed)
    axes = with_params(overrides, extra)
    jobs = combinations(axes, extra)
    varying = [key_of(o) for o in axes if o.is_sweep_override()]
    if not varying and not any(key_of(o).startswith("hydra") for o in parsed):
        raise UserError(
            "-m needs something to vary: give a key several values, as in policy.gamma=2,4,8, or"
            " leave -m out"
        )
    # All combinations are checked before the first one runs, which may take hours.
    checked = [run_job_of(without_hydra(job), extra) for job in jobs[:_MAX_CHECKED]]
    folder = output_folder(checked[0].output_dir, "sweep")
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if there and not any(n in (SWEEP_FILE, "multirun.yaml") or _NOTES in n for n in there):
        raise UserError(f"output_dir={folder} has files of other work: name a new folder")
    print_notices(text for job in checked for text in job.notices)
    launcher = next((o.value() for o in parsed if key_of(o) == "hydra/launcher"), None)
    wall = any(job.config["clock"].get("kind") != "simulated" for job in checked)
    if wall and launcher in ("joblib", "submitit_local"):
        text = "measured and paced times of this sweep do not count (tokens and simulated times do)"
        side_by_side = f"hydra/launcher={launcher} runs jobs side by side on this machine"
        print_notices([f"{side_by_side}, which slows them: {text}"])
    expected = [_job_name(job, varying) for job in jobs]
    make_folder(folder)
    with alone_in(folder):
        for old in folder.glob(f"{_NOTES}*"):  # left by a killed sweep
            shutil.rmtree(old, ignore_errors=True)
        with TemporaryDirectory(prefix=_NOTES, dir=folder, ignore_cleanup_errors=True) as name:
            notes, results, status = Path(name).resolve(), folder.resolve(), "lost"

            def task(config: DictConfig) -> None:
                run_one(config, results, notes, varying, len(jobs), extra)

            where = f"hydra.sweep.dir={json.dumps(results.as_posix(), ensure_ascii=False)}"
            try:
                run_hydra(task, ["--multirun", *overrides, where], extra)
            except KeyboardInterrupt:
                status = "interrupted"
                raise
            except Exception as error:  # a launcher's: a worker was killed, a queue refused
                print_exc()
                text = f"the launcher failed: {type(error).__name__}: {error}"
                print(f"specdec: {text}; start the same command again to continue", file=sys.stderr)
            finally:
                read = [parse_json(path.read_bytes()) for path in notes.glob("*.json")]
                written = {record["job"]: record for record in read}
                missing = {"status": status, "error": _UNRECORDED[status], "seconds": 0}
                names = dict.fromkeys([*expected, *written])
                records = [written.get(name, {"job": name, **missing}) for name in names]
                write_text(folder / SWEEP_FILE, json.dumps(records, indent=1))
    bad = [r for r in records if r["status"] not in ("ok", "skipped")]
    run, skipped = (sum(r["status"] == status for r in records) for status in ("ok", "skipped"))
    counts = f"{run} run, {skipped} complete before, {len(bad)} failed"
    print(f"sweep: {counts}; results in {folder}/*/{SUMMARY_FILE}")
    if run or skipped:
        from specdec.report.page import write_sweep

        with suppress(UserError):  # jobs of a launcher may have failed after their record
            write_sweep(folder)
    for record in bad:
        print(f"  {record['job']}: {record['error'].splitlines()[0]}", file=sys.stderr)
    return 0 if not bad else 2 if all(r["status"] == "refused" for r in bad) else 1


def with_params(overrides: Words, extra: Trees = ()) -> list[Override]:
    """Returns ``hydra.sweeper.params`` of an experiment, then the overrides. Also checks the class
    of each ``_target_`` in Hydra's node, so that a mistake is reported before the first job.
    """
    raw = _first_job(overrides, extra)
    for name, kind in (("launcher", Launcher), ("sweeper", Sweeper)):
        locate(raw.hydra[name]._target_, f"hydra.{name}", kind)
    for name, node in (raw.hydra.callbacks or {}).items():
        locate(node._target_, f"hydra.callbacks.{name}", Callback)
    params = [f"{key}={value}" for key, value in (raw.hydra.sweeper.get("params") or {}).items()]
    return parse([*params, *overrides])


def experiment_sweeps(overrides: Words, extra: Trees = ()) -> bool:
    named = any(o.startswith("+experiment=") for o in overrides)
    return named and _first_job(overrides, extra).hydra.mode is RunMode.MULTIRUN


def _first_job(overrides: Words, extra: Trees) -> DictConfig:
    return compose_raw(combinations(parse(overrides), extra)[0], extra=extra)


def _check_hydra(parsed: Sequence[Override]) -> None:
    for override in parsed:
        folders = ("hydra.sweep.", "hydra.run.", "hydra.output_subdir", "hydra.job.chdir")
        if key_of(override).startswith(folders):
            raise UserError(
                f"{override.input_line} does not apply here: output_dir=DIR names the folder of a"
                " sweep, and its jobs are named by the values that vary"
            )


def run_hydra(task: Callable[[DictConfig], None], words: Words, extra: Trees) -> None:
    before, sys.argv = sys.argv, ["specdec run", *words, *search_path(extra)]
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")(task)()
    finally:
        sys.argv = before


def run_one(
    config: DictConfig, folder: Path, notes: Path, varying: Words, total: int, trees: Trees
) -> None:
    """Runs one job of a sweep in its folder below ``folder``; writes its record into ``notes``."""
    merged = OmegaConf.create({"hydra": HydraConfig.get()})
    merged.merge_with(config)
    name = _job_name(list(HydraConfig.get().overrides.task), varying)
    number = int(HydraConfig.get().job.num) + 1
    print(f"[{number}/{total}] {name}", flush=True)
    status, reason, start = "ok", "", time.monotonic()
    try:
        if not execute(checked_job(plain(merged, trees)), folder / name):
            status = "skipped"
    except UserError as error:
        status, reason = "refused", str(error)
        print(f"specdec: {error}", file=sys.stderr)
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
        print(f"specdec: {error}" if is_full(error) else format_exc(), file=sys.stderr)
    seconds = round(time.monotonic() - start, 3)
    record = {"job": name, "status": status, "error": reason, "seconds": seconds}
    with suppress(OSError):  # of a full disk; sweep.json, written at the end, reports it
        write_text(notes / f"{number}.json", json.dumps(record))


def _job_name(task: Sequence[str], varying: Sequence[str]) -> str:
    named = [t for t in task if t.lstrip("+~").partition("=")[0] in varying]
    others = [t for t in without_hydra(task) if not t.startswith("output_dir=")]
    return safe_name(",".join(named or others))
