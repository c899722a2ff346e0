from dataclasses import replace
from typing import Any

from specdec.cli.arguments import Arguments
from specdec.cli.execute import run_in, show_config
from specdec.config.folders import output_folder
from specdec.config.hydra import Words, compose_config
from specdec.config.job import check_section, checked_job
from specdec.config.options import Trees
from specdec.config.profiles import load_profile, with_draft
from specdec.errors import UserError

RESULT_FILE = "profile.json"  # this file is written last: a folder that has it is complete
HELP = """\
specdec profile [--cfg] [--config-dir DIR] [group=option] [key=value] ...

Measures on this hardware what a stage, the draft, the output head, pruning and a transfer between
two processes cost against the number of tokens, and writes it as a latency profile. Then it
simulates SpecPipe with several trees on that profile, sets the papers' equations beside the
simulator and proposes a width, children and a grouping.

  profiling.name=NAME       the profile is written to OUTPUT/NAME.yaml; use it as
                            clock.profile=OUTPUT/NAME.yaml, or copy it to DIR/profile/ and use
                            --config-dir DIR clock.profile=NAME
  profiling.use=PROFILE     measures nothing: proposes trees for an existing profile
  profiling.tokens=[1,8,64] numbers of tokens to measure; profiling.repeats=, profiling.context=
  profiling.widths=[8,32] profiling.children=[4,16] profiling.groups=[1,2]
                            what is simulated
  executor.stages=8         devices of the pipeline

  profiling.devices=8       instead: splits so many devices between SwiftSpec's target and draft and
                            tries trees on each; on real ranks, or with profiling.use=PROFILE (one
                            with `degrees`) simulated. The best is written as a preset:
                            specdec run --config-dir OUTPUT strategy=swiftspec_best
  profiling.targets=[2,4,6] profiling.bs=[8] profiling.w=[4,8]
                            devices of the target, nodes per target pass, leaves per draft pass
  model= data= threads= ... as for `specdec run`

Examples
  specdec profile executor.stages=4 threads=1
  specdec profile profiling.use=pipedec_14 executor.stages=14 model=synthetic data.limit=8
  specdec profile profiling.use=swiftspec_table1 profiling.devices=8
"""
FLAGS = ("--cfg",)


def main(arguments: Arguments) -> int:
    if arguments.cfg:
        return show_config(arguments, lambda *words: profile_config(*words)[0], name="profiling")
    config, output_dir = profile_config(arguments.overrides, arguments.config_dirs)
    folder, splits = (
        output_folder(output_dir, "profile"),
        config["profiling"]["devices"] is not None,
    )
    from specdec.profiling.job import allocation_job, profile_job, profile_text, splits_text

    job, text = (allocation_job, splits_text) if splits else (profile_job, profile_text)
    result = run_in(folder, config, RESULT_FILE, lambda progress: job(config, folder, progress))
    if result is None:
        return 0
    print(text(result))
    if splits:
        print(f"best: specdec run --config-dir {folder} strategy=swiftspec_best")
    elif config["profiling"]["use"] is None:
        print(f"profile: clock.profile={folder / config['profiling']['name']}.yaml")
    print(f"results in {folder}")
    return 0


def profile_config(overrides: Words, extra: Trees = ()) -> tuple[dict[str, Any], str | None]:
    composed = compose_config(overrides, name="profiling", extra=extra)
    values = dict(composed.values)
    section = values.pop("profiling")
    check_section("profiling", section, {})
    job = checked_job(replace(composed, values=values))
    if "stages" not in job.config.get("executor", {}) or job.config["clock"]["kind"] != "measured":
        raise UserError(
            "specdec profile measures, and simulates SpecPipe on a pipeline: leave out executor="
            " (set executor.stages) and clock="
        )
    config = {**job.config, "profiling": section}
    if section["use"] is not None:
        use = load_profile(section["use"], extra, key="profiling.use")
        use = with_draft({**use, "profile": section["use"]}, config["model"].get("draft_name"))
        config["use"] = {key: value for key, value in use.items() if key != "profile"}
    return config, job.output_dir
