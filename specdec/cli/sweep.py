"""``specdec run -m``: a Hydra multirun whose jobs resume, in turn or side by side.

Hydra's launchers report only the first failure and know nothing of finished jobs, so a job here
never raises: it writes down how it ended, and the sweep's end lists all of them. What jobs tell
goes through files, because joblib's and submitit's run in processes of their own.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import format_exc, print_exc
from typing import Any
from uuid import uuid4

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from specdec.cli.execute import RESULT_FILE, execute
from specdec.cli.folders import alone_in, default_folder, make_folder, safe_name
from specdec.cli.launchers import SIDE_BY_SIDE, check_launcher
from specdec.cli.progress import duration
from specdec.config.hydra import parse, plain
from specdec.config.job import Job, checked_job, run_job_of
from specdec.config.options import config_dir
from specdec.errors import UserError
from specdec.files import write_text

_MAX_CHECKED = 64
SWEEP_FILE = "sweep.json"
_NOTES = ".jobs-"

Record = dict[str, Any]
"""How a job ended: ``job`` (its folder's name), ``status`` (ok, skipped, refused, failed,
interrupted, lost), ``error`` and ``seconds``."""

_LOST: Record = {
    "status": "lost",
    "error": "its process ended without a word (killed, or out of memory), or it was never started",
}
_INTERRUPTED: Record = {
    "status": "interrupted",
    "error": "the sweep was interrupted before this job was over; the same command goes on",
}


def sweep(overrides: Sequence[str], extra: Sequence[Path] = ()) -> int:
    """Runs one job per combination of the comma-separated values.

    Each job has a folder under the sweep's, named by the values that vary; one that is complete is
    skipped, so the same command with the same ``output_dir`` goes on where it stopped.

    Returns:
        0 if every job is complete, 2 if only bad input failed, else 1.

    Raises:
        UserError: bad overrides, found before the first job starts.
    """
    parsed = parse(overrides)
    check_launcher(parsed)
    folder = _sweep_folder(overrides)
    kept = [o for o in overrides if not o.lstrip("+").startswith("output_dir=")]
    varying = [str(o.key_or_group) for o in parsed if o.is_sweep_override()]
    if not varying and not any(str(o.key_or_group).startswith("hydra") for o in parsed):
        raise UserError(
            "-m needs something to vary: give a key several values, as in policy.gamma=2,4,8, or"
            " leave -m out"
        )
    # Whatever is wrong with a combination is said now, not after the hours of those before it.
    combinations = BasicSweeper.split_arguments(parse(kept), max_batch_size=None)[0]
    jobs = [run_job_of(_without_hydra(c), extra) for c in combinations[:_MAX_CHECKED]]
    for notice in dict.fromkeys(text for job in jobs for text in job.notices):
        print(f"note: {notice}", file=sys.stderr)
    _tell_about_clocks(parsed, jobs)
    own_sweeper = not any(str(o.key_or_group) == "hydra/sweeper" for o in parsed)
    expected = [_job_name(c, varying) for c in combinations] if own_sweeper else []
    make_folder(folder)
    with alone_in(folder):
        notes, untold = _notes_folder(folder), _LOST
        try:
            _launch(kept, extra, _Place(folder, notes, tuple(varying), len(expected), time.time()))
        except KeyboardInterrupt:
            untold = _INTERRUPTED
            raise
        finally:
            records = _collect(notes, expected, untold)
            write_text(folder / SWEEP_FILE, json.dumps(records, indent=1))
            shutil.rmtree(notes, ignore_errors=True)
    return _report(folder, records)


def _without_hydra(combination: Sequence[str]) -> list[str]:
    """What a job itself is told; the rest is for the launcher."""
    return [o for o in combination if not str(parse([o])[0].key_or_group).startswith("hydra")]


class _Place:
    """What a job must know of its sweep; crosses to other processes.

    Attributes:
        folder: the sweep's; ``notes`` is where jobs say how they ended.
        varying: keys that name a job's folder.
        total: jobs of the sweep, 0 where unknown; ``began_s``: when it began (seconds since 1970).
    """

    def __init__(
        self, folder: Path, notes: Path, varying: tuple[str, ...], total: int, began_s: float
    ) -> None:
        self.folder, self.notes, self.varying = folder.resolve(), notes.resolve(), varying
        self.total, self.began_s = total, began_s


def _launch(kept: Sequence[str], extra: Sequence[Path], place: _Place) -> None:
    search = ",".join(f"file://{Path(p).resolve().as_posix()}" for p in extra)

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def job(config: DictConfig) -> None:
        run_one(config, place)

    with _command_line(
        "specdec run",
        "--multirun",
        *kept,
        f"hydra.sweep.dir={_quoted(place.folder)}",
        *([f"hydra.searchpath=[{search}]"] if search else []),
    ):
        try:
            job()
        except Exception as error:  # a launcher's own: a worker was killed, a queue refused
            print_exc()
            text = f"the launcher gave up: {type(error).__name__}: {error}"
            print(f"specdec: {text}; start the same command again to go on", file=sys.stderr)


def run_one(config: DictConfig, place: _Place) -> None:
    """Runs one job of a sweep where Hydra has put it; says how it ended, and never raises."""
    merged = OmegaConf.create({"hydra": HydraConfig.get()})
    merged.merge_with(config)
    name = _job_name(list(HydraConfig.get().overrides.task), place.varying)
    number = int(HydraConfig.get().job.num) + 1
    of = f"/{place.total}" if place.total else ""
    print(f"[{number}{of}] {name}", flush=True)
    record: Record = {"job": name, "status": "ok", "error": ""}
    start = time.monotonic()
    try:
        done = execute(checked_job(plain(merged)), place.folder / name)
        record["status"] = "skipped" if done is None else "ok"
    except UserError as error:
        record.update(status="refused", error=str(error))
        print(f"specdec: {error}", file=sys.stderr)
    except Exception as error:
        record.update(status="failed", error=f"{type(error).__name__}: {error}")
        print(format_exc(), file=sys.stderr)
    record["seconds"] = round(time.monotonic() - start, 3)
    write_text(place.notes / f"{number}.json", json.dumps(record))
    left = _time_left(place)
    if left:
        print(f"[{left}] {name}: {record['status']}", file=sys.stderr, flush=True)


def _time_left(place: _Place) -> str:
    """How many jobs are over and how long the rest may take; launchers' parallelism is in it."""
    ended = [r for r in _notes(place.notes) if r["status"] != "skipped"]
    over = sum(1 for _ in place.notes.glob("*.json"))
    if not ended or not place.total or over >= place.total:
        return ""
    seconds = (time.time() - place.began_s) / len(ended) * (place.total - over)
    return f"{over} of {place.total} jobs over, about {duration(seconds)} left"


def _notes(folder: Path) -> list[Record]:
    found = []
    for path in sorted(folder.glob("*.json"), key=lambda p: int(p.stem)):
        with suppress(OSError, ValueError):  # one that is just being renamed
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def _collect(notes: Path, expected: Sequence[str], untold: Record) -> list[Record]:
    """How every job ended; ``untold``: those that ended without a word, or never began."""
    told = {record["job"]: record for record in _notes(notes)}
    names = [*expected, *(name for name in told if name not in expected)]
    return [told.get(n, {"job": n, **untold, "seconds": 0}) for n in names]


def _notes_folder(folder: Path) -> Path:
    """A new folder for what this sweep's jobs tell; what a killed sweep has left is removed."""
    for old in folder.glob(f"{_NOTES}*"):
        shutil.rmtree(old, ignore_errors=True)
    notes = folder / f"{_NOTES}{uuid4().hex[:8]}"
    make_folder(notes)
    return notes


def _tell_about_clocks(parsed: Sequence[Any], jobs: Sequence[Job]) -> None:
    """Jobs side by side on one machine share its cores: wall-clock times are of no use then."""
    launcher = [str(o.value()) for o in parsed if str(o.key_or_group) == "hydra/launcher"]
    wall = [job.name for job in jobs if job.config["clock"]["kind"] != "simulated"]
    if launcher and launcher[-1] in SIDE_BY_SIDE and wall:
        print(
            f"note: hydra/launcher={launcher[-1]} runs jobs side by side on this machine, which"
            " slows them: measured and paced times of this sweep do not count (tokens and"
            " simulated times do)",
            file=sys.stderr,
        )


def _sweep_folder(overrides: Sequence[str]) -> Path:
    for override in reversed(parse(overrides)):
        if override.key_or_group == "output_dir":
            return Path(str(override.value()))
    return default_folder("sweep")


def _job_name(task: Sequence[str], varying: Sequence[str]) -> str:
    named = [t for t in task if t.lstrip("+~").partition("=")[0] in varying]
    return safe_name(",".join(named or task))


def _quoted(path: Path) -> str:
    text = path.as_posix()
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextmanager
def _command_line(*words: str) -> Iterator[None]:
    """Hydra's main reads ``sys.argv``; it is put back afterwards."""
    before = sys.argv
    sys.argv = list(words)
    try:
        yield
    finally:
        sys.argv = before


def _report(folder: Path, records: Sequence[Record]) -> int:
    bad = [r for r in records if r["status"] not in ("ok", "skipped")]
    counts = {s: sum(r["status"] == s for r in records) for s in ("ok", "skipped")}
    print(
        f"sweep: {counts['ok']} run, {counts['skipped']} complete before, {len(bad)} failed;"
        f" results in {folder}/*/{RESULT_FILE}"
    )
    for record in bad:
        print(f"  {record['job']}: {record['error'].splitlines()[0]}", file=sys.stderr)
    if not bad:
        return 0
    return 2 if all(r["status"] == "refused" for r in bad) else 1
