from __future__ import annotations

from collections.abc import Sequence

from specdec.cli.arguments import read_folder

HELP = """\
specdec report FOLDER [texts=N] [text=ID]

Reads the folder of a run, a comparison or a sweep and writes into it

  report.html     one page that needs nothing else, no network either: the table, the pictures, the
                  outputs with every token in the colour of the source that proposed it, and for a
                  run with trace=true the timeline and the token trees
  pictures/       its pictures: speed-up per prompt, throughput, acceptance by depth and position

Rows of a sweep are compared with the job with strategy=ar of the same data, models, devices, clock
and seed, if it exists. Interrupted runs are named and left out of the table.

  texts=N         prompts per strategy whose text is on the page (4)
  text=ID         prints that prompt's outputs here, in colours, too

Examples
  specdec compare 'strategies=[ar,mixture]' data.limit=4 output_dir=outputs/c
  specdec report outputs/c text=0
"""

_NUMBER = (r"\d+", "texts=N is a number, text=ID a prompt's id")


def main(words: Sequence[str]) -> int:
    folder, options = read_folder(words, "report", {"texts": _NUMBER, "text": _NUMBER})
    # Imported here: matplotlib takes a second to import.
    from specdec.report.page import load_report, text_of, write_page

    report = load_report(folder)
    if "text" in options:
        from rich.console import Console

        from specdec.report.origins import origin_names, terminal_style, terminal_text

        console = Console(highlight=False, soft_wrap=True)
        for result, output, ends in text_of(report, int(options["text"][0])):
            console.print(f"{result.name}, prompt {output.id}: ", end="", style="bold")
            for origin, name in origin_names(result.config).items():
                console.print(f" {name} ", style=terminal_style(origin), end=" ")
            console.print()
            console.print(terminal_text(output, ends))
            console.print()
    num_texts = int(options["texts"][0]) if "texts" in options else 4
    for path in write_page(report, num_texts=num_texts):
        print(path)
    return 0
