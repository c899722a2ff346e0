from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

from pydantic import Field

from specdec.cli.arguments import Arguments, help_of, read_values
from specdec.errors import UserError
from specdec.parts.fields import Index, expects

_Page = Annotated[Annotated[str, Field(pattern=r"\.html$")] | None, expects("it must end in .html")]


@dataclass(frozen=True, kw_only=True)
class _Keys:
    texts: Annotated[Index, "prompts per strategy whose text is on the page"] = 4
    leaderboard: Annotated[_Page, "FILE.html: ranks runs, by model and machine"] = None


HELP = f"""\
specdec report FOLDER [texts=N]
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
  specdec report outputs/c
  specdec report results/* leaderboard=leaderboard.html
"""


def main(arguments: Arguments) -> int:
    folders, keys = read_values(arguments.overrides, _Keys, "folders", most=inf)
    if keys.leaderboard is None and len(folders) > 1:
        raise UserError("give one folder, or leaderboard=FILE.html to rank the runs of several")
    from specdec.report.page import load_report, write_leaderboard, write_page

    if keys.leaderboard is not None:
        print(write_leaderboard(folders, Path(keys.leaderboard).expanduser()))
    else:
        report = load_report(Path(folders[0]).expanduser())
        print(*write_page(report, num_texts=keys.texts), sep="\n")
    return 0
