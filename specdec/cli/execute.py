from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from specdec.cli.loggers import check_logger, log_results
from specdec.cli.progress import reporting
from specdec.config import comparison, folders
from specdec.config.job import Job
from specdec.files import parse_json

_T = TypeVar("_T")

RESULT_FILE = "summary.json"
"""This file is written last in a run folder: if it exists, the run is complete."""


def execute(work: Job | comparison.Comparison, folder: Path) -> Mapping[str, Any] | None:
    """Runs a job or a comparison in its folder, and sends its rows to the logger.

    Returns its results; None if it was complete already.
    """
    from specdec.runs.jobs import compare_jobs, run_job  # torch takes seconds to import

    if isinstance(work, Job):
        configs, result, table = [work.config], RESULT_FILE, ""
        do: Callable[[Any], Mapping[str, Any]] = partial(run_job, work.config, folder)
    else:
        configs = [job.config for job in work.jobs]
        result, table = comparison.RESULT_FILE, "comparison.md"
        do = partial(compare_jobs, configs, folder, work.repeats)
    check_logger(configs[0], folder)
    done = run_in(folder, work.config, result, do, table=table)
    stored = parse_json((folder / result).read_bytes()) if done is None else done
    log_results(configs, [stored] if isinstance(work, Job) else stored["rows"], folder)
    if done is not None:
        print(f"results in {folder}")
    return done


def run_in(
    folder: Path,
    config: Mapping[str, Any],
    result: str,
    work: Callable[[Any], _T],
    *,
    table: str = "",
) -> _T | None:
    """Does work in its folder as ``specdec.config.folders.run_in`` does, and shows its progress.

    Args:
        work: called with the ``specdec.runs.jobs.Progress`` to report to.
        table: file that is printed if the work is complete already.
    """

    def shown() -> _T:
        with reporting() as progress:
            return work(progress)

    done = folders.run_in(folder, config, result, shown)
    if done is None:
        if table and (folder / table).is_file():
            print((folder / table).read_text(encoding="utf-8"))
        print(f"{folder}: complete already, not run again (delete the folder to repeat it)")
    return done


def print_notices(notices: Iterable[str]) -> None:
    """Prints warnings to standard error, each once."""
    for notice in dict.fromkeys(notices):
        print(f"note: {notice}", file=sys.stderr)
