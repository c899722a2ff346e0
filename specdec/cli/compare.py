from specdec.cli.arguments import Arguments
from specdec.cli.execute import execute, print_notices, show_config
from specdec.config.folders import output_folder
from specdec.config.job import compose_comparison

HELP = """\
specdec compare [--cfg] [--config-dir DIR] ['strategies=[NAME,...]'] [group=option] [key=value] ...

Runs several strategies on the same prompts with the same models, interleaved, and writes one table
and one plot: comparison.json, comparison.md, comparison.png, and requests.jsonl with every token.
Each row's tokens are compared with those of `ar`.

  strategies=[...]  presets, in the order of the rows; `specdec list strategies` shows them
                    (default [ar,speculative,specinfer,fixed_width,best_first,staged,
                    prompt_lookup,mixture])
  repeats=N         interleaved repeats (default 1); the table shows medians and ranges
  group=option, key=value
                    as for `specdec run`; they apply to every row. Overrides of source, policy and
                    verifier do not apply to `ar` and to transformers' own rows, and a key such as
                    policy.width applies to the rows whose policy has it
                    (defaults: model=tiny, the bundled pair; data=stdlib; sampling=greedy;
                    max_new_tokens=128)
  executor.stages=8 puts every row on a pipeline of so many stages
  --cfg             print the resolved configuration of every row and stop
  --config-dir      a further configuration tree, with presets or options of your own

Examples
  specdec compare 'strategies=[ar,speculative,best_first,hf_assisted]' data=stdlib data.limit=8
  specdec compare 'strategies=[ar,specpipe]' executor.stages=8 clock=simulated
"""
FLAGS = ("--cfg",)


def main(arguments: Arguments) -> int:
    if arguments.cfg:
        return show_config(arguments, compose_comparison, name="compare")
    comparison = compose_comparison(arguments.overrides, arguments.config_dirs)
    print_notices(comparison.notices)
    execute(comparison, output_folder(comparison.output_dir, "compare"))
    return 0
