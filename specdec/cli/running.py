"""``specdec run``: one strategy on one workload, or a sweep of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.cli.arguments import read_arguments
from specdec.cli.folders import as_yaml, claim, default_folder, working_in
from specdec.cli.jobs import Job, run_job_of
from specdec.cli.loggers import log_results
from specdec.cli.progress import reporting

RESULT_FILE = "summary.json"
"""Written last in a run folder; where it exists the run is complete."""

HELP = """\
specdec run [-m] [--cfg] [--config-dir DIR] [group=option] [key=value] ...

Decodes prompts with one strategy and writes a run folder: the resolved config.yaml, requests.jsonl
(one line per prompt, as it finishes), summary.json (every metric), provenance.json.

  group=option    strategy= (a preset), source= policy= verifier= executor= (its parts),
                  model= data= sampling= clock= logger=; `specdec list` shows the options
  key=value       max_new_tokens=128 seed=0 batch_size=1 data.limit=16 policy.width=32
                  executor.stages=8 clock.profile=uniform_30ms model.dtype=float32
                  trace=true records a timeline and the trees, for `specdec trace`
                  output_dir=DIR; `specdec run --cfg` prints every key with its value
  -m, --multirun  sweep: comma-separated values give one run each
  --cfg           print the resolved configuration and stop
  --config-dir    a further configuration tree, with presets or options of your own

Examples
  specdec run strategy=best_first policy.bs=16
  specdec run strategy=specpipe clock=simulated clock.profile=specpipe_8x3090
  specdec run -m strategy=speculative policy.gamma=2,4,8 output_dir=outputs/gammas
  specdec run -m strategy=specpipe,ar seed=0,1 clock=simulated hydra/launcher=joblib

A run folder that is complete is not run again; one that was interrupted is gone on with.
"""


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    arguments = read_arguments(words, flags=("--multirun", "--cfg"))
    if "--help" in arguments.flags:
        print(HELP, end="")
        return 0
    if "--multirun" in arguments.flags:
        from specdec.cli.sweeping import sweep

        return sweep(arguments.overrides, arguments.config_dirs)
    job = run_job_of(arguments.overrides, arguments.config_dirs)
    if "--cfg" in arguments.flags:
        print(as_yaml(job.config), end="")
        return 0
    for notice in job.notices:
        print(f"note: {notice}", file=sys.stderr)
    execute(job, Path(job.output_dir) if job.output_dir else default_folder("run", job.name))
    return 0


def execute(job: Job, folder: Path) -> Mapping[str, Any] | None:
    """Runs a job in its folder, unless it is complete there.

    Returns:
        The engine's summary; None where nothing was left to do.

    Raises:
        UserError: the folder is another configuration's, or what the engine refuses.
    """
    if claim(folder, job.config, RESULT_FILE):
        print(f"{folder}: complete already, not run again (delete the folder to repeat it)")
        return None
    with working_in(folder):
        # Here, not at the top: torch and transformers, seconds to import, come with it.
        from specdec.engine import run_job

        with reporting() as progress:
            summary = run_job(job.config, folder, progress)
        assert (folder / RESULT_FILE).is_file(), "a run ends with its summary"
    log_results([job.config], [summary], folder)
    print(f"results in {folder}")
    return summary
