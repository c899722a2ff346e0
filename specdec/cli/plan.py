from dataclasses import asdict
from shlex import quote

from specdec.cli.arguments import Arguments, help_of
from specdec.cli.execute import reporting, run_in
from specdec.config.folders import output_folder
from specdec.files import write_json
from specdec.planning.options import PlanOptions

HELP = f"""\
specdec plan [--config-dir DIR] [key=value] ...

Simulates the presets that fit the devices, over their layouts and sizes, with the measured hits of
a draft and the times of a machine. Prints a ranking with 95 % intervals, what decides it, and the
fastest at further batches and contexts. Writes plan.json, a preset and its profile. For a model
without a draft it measures presets that draft from text or heads (model.eagle_head=DIR). An
interrupted plan continues with the same command and output_dir.

  model=law_NAME         a fitted law (specdec list models, specdec fit); model=replay with
                         model.record=F plays a record; model=hf decodes a few prompts
  output_dir=DIR         of the plan
{help_of(PlanOptions)}

Examples
  specdec plan model=law_pipespec_1b_70b profile=specpipe_8x3090 devices=9
  specdec plan model=tiny profile=measured data=stdlib check=true
  specdec plan model=hf model.target=PATH data=stdlib
  specdec plan acceptance=responses.jsonl profile=cluster.yaml batch=1,4,16 context=512,8k
"""


def main(arguments: Arguments) -> int:
    from specdec.planning.answer import PRESET, TABLE_FILE
    from specdec.planning.job import SEARCH_FILE, check_job, plan_job, plan_request

    request = plan_request(arguments.overrides, arguments.config_dirs)
    folder = output_folder(request.output_dir, "plan")

    def work(progress: object) -> None:
        plan = plan_job(request, folder, progress)  # type: ignore[arg-type]
        print((folder / TABLE_FILE).read_text(encoding="utf-8"), end="")
        what = "measured" if plan.measured else f"{plan.simulated_tokens} tokens simulated"
        print(f"{what} in {plan.search_s:.0f} s")

    _, is_new = run_in(folder, request.config, SEARCH_FILE, work, table=TABLE_FILE)
    if is_new:
        words = " ".join(map(quote, (f"strategy={PRESET}", *request.words)))
        print(f"use it: specdec run --config-dir {quote(str(folder))} {words}")
        print(f"results in {folder}")
    if request.chosen.check not in ("", "false"):
        with reporting() as progress:
            verdict = check_job(request, folder, progress)
        write_json(folder / "check.json", asdict(verdict))
        print(*(f"check: {figure}" for figure in verdict.figures), *verdict.warnings, sep="\n")
    return 0
