from __future__ import annotations

from collections.abc import Sequence

from specdec.cli.arguments import Arguments
from specdec.cli.execute import execute, print_notices, show_config
from specdec.config.folders import output_folder
from specdec.config.hydra import parse
from specdec.config.job import compose_comparison, text_of
from specdec.errors import UserError

HELP = """\
specdec compare [--cfg] [--config-dir DIR] ['strategies=[NAME,...]'] [group=option] [key=value] ...

Runs several strategies on the same prompts with the same models, interleaved, and writes one table
and one plot: comparison.json, comparison.md, comparison.png, and requests.jsonl with every token.
Each row's tokens are compared with those of `ar`.

  strategies=[...]  presets, in the order of the rows; `specdec list strategies` shows them
  repeats=5         interleaved repeats; the table shows medians
  group=option, key=value
                    as for `specdec run`; they apply to every row. Overrides of source, policy and
                    verifier do not apply to `ar` and to transformers' own rows, and a key such as
                    policy.width applies to the rows whose policy has it
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
    sizes, rest = batch_sizes(arguments.overrides)
    if sizes is not None:
        from specdec.cli.batch_sizes import curves

        return curves(sizes, rest, arguments.config_dirs, only_show=bool(arguments.cfg))
    if arguments.cfg:
        return show_config(
            arguments, lambda *words: compose_comparison(*words).config, name="compare"
        )
    comparison = compose_comparison(arguments.overrides, arguments.config_dirs)
    print_notices(comparison.notices)
    execute(comparison, output_folder(comparison.output_dir, "compare"))
    return 0


def batch_sizes(overrides: Sequence[str]) -> tuple[list[int] | None, list[str]]:
    """Splits off a list of batch sizes: (sizes, other overrides); sizes are None without a list."""
    sizes, rest = None, []
    for override in parse(overrides):
        value = override.value()
        if override.key_or_group == "batch_size" and isinstance(value, list):
            sizes = value
        else:
            rest.append(text_of(override))
    if sizes is not None and (
        not sizes
        or len(set(sizes)) < len(sizes)
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes)
    ):
        raise UserError(
            f"batch_size={sizes} must be different whole numbers of at least 1, as in"
            " 'batch_size=[1,4,16]'"
        )
    return sizes, rest
