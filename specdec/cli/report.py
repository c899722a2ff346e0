from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

from specdec.cli.arguments import Arguments, help_of, read_values
from specdec.errors import UserError
from specdec.parts.fields import Index, Text


@dataclass(frozen=True, kw_only=True)
class _Keys:
    texts: Annotated[Index, "prompts per strategy whose text is on the page"] = 4
    text: Annotated[Index | None, "prints that prompt's outputs here, in colours, too"] = None
    leaderboard: Annotated[
        Text | None, "FILE.html: ranks the runs of several folders, a table per model and machine"
    ] = None


HELP = f"""\
specdec report FOLDER [texts=N] [text=ID]
specdec report FOLDER ... leaderboard=FILE.html

Reads the folder of a run, a comparison or a sweep and writes into it

  report.html     one page that needs nothing else, no network either: the table, the pictures, the
                  outputs with every token in the colour of the source that proposed it, and for a
                  run with trace=true the timeline and the token trees
  pictures/       its pictures: speed-up per prompt, throughput, acceptance by depth and position

Rows of a sweep are compared with the job with strategy=ar of the same data, models, devices, clock
and seed, if it exists. Interrupted runs are named and left out of the table.

{help_of(_Keys)}

Examples
  specdec compare 'strategies=[ar,mixture]' data.limit=4 output_dir=outputs/c
  specdec report outputs/c text=0
  specdec report results/* leaderboard=leaderboard.html
"""


def main(arguments: Arguments) -> int:
    folders, keys = read_values(arguments.overrides, _Keys, "folders", most=inf)
    if keys.leaderboard is not None:
        from specdec.report.page import write_leaderboard

        print(write_leaderboard(folders, Path(keys.leaderboard).expanduser()))
        return 0
    if len(folders) > 1:
        raise UserError("give one folder, or leaderboard=FILE.html to rank the runs of several")
    from specdec.report.page import load_report, text_of, write_page

    (folder,) = folders
    report = load_report(Path(folder).expanduser())
    if keys.text is not None:
        from rich.console import Console

        from specdec.report.origins import origin_names, terminal_style, terminal_text

        console = Console(highlight=False, soft_wrap=True)
        for result, output, ends in text_of(report, keys.text):
            console.print(f"{result.name}, prompt {output.id}: ", end="", style="bold")
            for origin, name in origin_names(result.config).items():
                console.print(f" {name} ", style=terminal_style(origin), end=" ")
            console.print()
            console.print(terminal_text(output, ends))
            console.print()
    for path in write_page(report, num_texts=keys.texts):
        print(path)
    return 0
