from specdec.cli.arguments import Arguments
from specdec.cli.execute import execute, print_notices, show_config
from specdec.cli.sweep import experiment_sweeps, run_hydra, sweep, with_params
from specdec.config.folders import output_folder
from specdec.config.hydra import combinations
from specdec.config.job import run_job_of

HELP = """\
specdec run [-m] [--cfg [job|hydra|all]] [--config-dir DIR] [group=option] [key=value] ...

Decodes prompts with one strategy and writes a run folder: the resolved config.yaml, requests.jsonl
(one line per prompt, as it finishes), summary.json (every metric), provenance.json.

  group=option    strategy= (a preset), source= policy= verifier= executor= (its parts),
                  model= data= sampling= clock= logger=; `specdec list` shows the options
  key=value       max_new_tokens=128 seed=0 batch_size=1 data.limit=16 policy.width=32
                  executor.stages=8 clock.profile=uniform_30ms model.dtype=float32
                  trace=true records a timeline and the trees, for `specdec trace`
                  output_dir=DIR; `specdec run --cfg` prints every key with its value
  -m, --multirun  sweep: comma-separated values give one run each
  --cfg           print the resolved configuration (hydra: Hydra's own; all: both) and stop; with
                  -m that of every job
  --info          print Hydra's defaults, plugins and search path, and stop
  --config-dir    a further configuration tree, with presets or options of your own; one with
                  experiment/NAME.yaml is used by +experiment=NAME

Examples
  specdec run strategy=best_first policy.bs=16
  specdec run strategy=specpipe clock=simulated clock.profile=specpipe_8x3090
  specdec run -m strategy=speculative policy.gamma=2,4,8 output_dir=outputs/gammas
  specdec run -m strategy=specpipe,ar seed=0,1 clock=simulated hydra/launcher=joblib

A complete run folder is not run again; an interrupted run is resumed.
"""
FLAGS = ("--multirun", "--cfg", "--info")


def main(arguments: Arguments) -> int:
    overrides, extra = arguments.overrides, arguments.config_dirs
    if arguments.info:
        run_hydra(lambda _: None, ["--info", arguments.info, *overrides], extra)
        return 0
    is_sweep = "--multirun" in arguments.flags or experiment_sweeps(overrides, extra)
    if arguments.cfg:
        jobs = combinations(with_params(overrides, extra), extra) if is_sweep else None
        return show_config(arguments, run_job_of, jobs, name="config")
    if is_sweep:
        return sweep(overrides, extra)
    job = run_job_of(overrides, extra)
    print_notices(job.notices)
    execute(job, output_folder(job.output_dir, "run", job.name))
    return 0
