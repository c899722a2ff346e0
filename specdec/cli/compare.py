from typing import Any

from specdec.cli.arguments import Arguments
from specdec.cli.execute import execute, print_notices, show_config
from specdec.config.folders import output_folder
from specdec.config.hydra import key_of, parse
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
  'batch_size=[1,4,16]'
                    every row at each batch size: throughput and time between tokens as curves
  --cfg             print the resolved configuration of every row and stop
  --config-dir      a further configuration tree, with presets or options of your own

Examples
  specdec compare 'strategies=[ar,speculative,best_first,hf_assisted]' data=stdlib data.limit=8
  specdec compare 'strategies=[ar,specpipe]' executor.stages=8 clock=simulated
"""
FLAGS = ("--cfg",)


def main(arguments: Arguments) -> int:
    words = {str(o.input_line): o for o in parse(arguments.overrides)}
    sizes = [
        w for w, o in words.items() if key_of(o) == "batch_size" and isinstance(o.value(), list)
    ]
    if sizes:
        from specdec.cli.batch_sizes import curves

        rest = [word for word in words if word not in sizes]
        last: Any = words[sizes[-1]].value()
        return curves(last, rest, arguments.config_dirs, only_show=bool(arguments.cfg))
    if arguments.cfg:
        return show_config(
            arguments, lambda *words: compose_comparison(*words).config, name="compare"
        )
    comparison = compose_comparison(arguments.overrides, arguments.config_dirs)
    print_notices(comparison.notices)
    execute(comparison, output_folder(comparison.output_dir, "compare"))
    return 0
