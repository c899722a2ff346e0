from dataclasses import replace
from functools import partial

from specdec.cli.arguments import Arguments
from specdec.cli.execute import run_in, show_config
from specdec.config.folders import output_folder
from specdec.config.hydra import Words, compose_config
from specdec.config.job import Job, check_section, checked_job
from specdec.config.options import Trees
from specdec.errors import UserError

RESULT_FILE = "profile.json"  # this file is written last: a folder that has it is complete
HELP = """\
specdec profile [--cfg] [--config-dir DIR] [group=option] [key=value] ...

Measures on this hardware what a stage, the draft, the output head, pruning and a transfer between
two processes cost against the number of tokens, and writes it as a latency profile. `specdec plan`
finds sizes, layouts and splits of devices on one.

  profiling.name=NAME       the profile is written to OUTPUT/NAME.yaml; use it as
                            clock.profile=OUTPUT/NAME.yaml, or copy it to DIR/profile/ and use
                            --config-dir DIR clock.profile=NAME
  profiling.tokens=[1,8,64] numbers of tokens to measure; profiling.repeats=, profiling.context=
  executor.stages=8         devices of the pipeline
  model= threads= ...       as for `specdec run`

Examples
  specdec profile executor.stages=4 threads=1
"""
FLAGS = ("--cfg",)


def main(arguments: Arguments) -> int:
    if arguments.cfg:
        return show_config(arguments, profiled_job, name="profiling")
    job = profiled_job(arguments.overrides, arguments.config_dirs)
    config, folder = job.config, output_folder(job.output_dir, "profile")
    from specdec.profiling.job import profile_job, profile_text

    result, is_new = run_in(folder, config, RESULT_FILE, partial(profile_job, config, folder))
    if is_new:
        print(profile_text(result))
        print(f"profile: clock.profile={folder / config['profiling']['name']}.yaml")
        print(f"results in {folder}")
    return 0


def profiled_job(overrides: Words, extra: Trees) -> Job:
    composed = compose_config(overrides, name="profiling", extra=extra)
    section = composed.values.pop("profiling")
    check_section("profiling", section, {})
    job = checked_job(composed)
    if "stages" not in job.config.get("executor", {}) or job.config["clock"]["kind"] != "measured":
        raise UserError(
            "specdec profile measures the stages of a pipeline: leave out executor="
            " (set executor.stages) and clock="
        )
    return replace(job, config={**job.config, "profiling": section})
