"""Runs a job in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.cli.folders import claim, working_in
from specdec.cli.loggers import log_results
from specdec.cli.progress import reporting
from specdec.config.job import Job

RESULT_FILE = "summary.json"
"""Written last in a run folder; where it exists the run is complete."""


def execute(job: Job, folder: Path) -> Mapping[str, Any] | None:
    """Runs a job in its folder unless it is complete.

    Returns:
        The summary; None if the job was complete.

    Raises:
        UserError: the folder belongs to another configuration, or the engine refuses the job.
    """
    if claim(folder, job.config, RESULT_FILE):
        print(f"{folder}: complete already, not run again (delete the folder to repeat it)")
        return None
    with working_in(folder):
        # Imported here: torch and transformers take seconds to import.
        from specdec.runs.jobs import run_job

        with reporting() as progress:
            summary = run_job(job.config, folder, progress)
        assert (folder / RESULT_FILE).is_file(), "a run ends with its summary"
    log_results([job.config], [summary], folder)
    print(f"results in {folder}")
    return summary
