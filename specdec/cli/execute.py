from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from specdec.cli.folders import claim, leaving_nothing_if_refused, working_in
from specdec.cli.loggers import check_logger, log_results
from specdec.cli.progress import reporting
from specdec.config.job import Job
from specdec.files import parse_json

_T = TypeVar("_T")

RESULT_FILE = "summary.json"
"""This file is written last in a run folder: if it exists, the run is complete."""


def execute(job: Job, folder: Path) -> Mapping[str, Any] | None:
    """Runs a job in its folder; returns its summary, or None if the job was complete already."""
    from specdec.runs.jobs import run_job  # torch and transformers take seconds to import

    check_logger(job.config, folder)
    summary = run_in(folder, job.config, RESULT_FILE, partial(run_job, job.config, folder))
    stored = summary or parse_json((folder / RESULT_FILE).read_bytes())
    log_results([job.config], [stored], folder)
    if summary is not None:
        print(f"results in {folder}")
    return summary


def run_in(
    folder: Path,
    config: Mapping[str, Any],
    result: str,
    work: Callable[[Any], _T],
    *,
    table: str = "",
) -> _T | None:
    """Does the work of a configuration in its folder; returns None if it was complete already.

    Args:
        work: called with the ``specdec.runs.jobs.Progress`` to report to.
        result: file that the work writes last; "" for work that is always repeated.
        table: file that is printed if the work is complete already.

    Raises:
        UserError: the folder belongs to another configuration, or another process uses it.
    """
    with leaving_nothing_if_refused(folder):
        if claim(folder, config, result):
            if table and (folder / table).is_file():
                print((folder / table).read_text(encoding="utf-8"))
            print(f"{folder}: complete already, not run again (delete the folder to repeat it)")
            return None
        with working_in(folder), reporting() as progress:
            return work(progress)


def print_notices(notices: Iterable[str]) -> None:
    """Prints warnings to standard error, each once."""
    for notice in dict.fromkeys(notices):
        print(f"note: {notice}", file=sys.stderr)
