import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from pydantic import Field

from specdec.cli.arguments import Arguments, read_values
from specdec.cli.execute import SUMMARY_FILE
from specdec.config.folders import CONFIG_FILE
from specdec.config.options import read_yaml
from specdec.errors import UserError
from specdec.files import read_json, write_bytes, write_text
from specdec.parts.fields import expects

HELP = """\
specdec trace RUN [steps=FROM-TO]

Draws the trace of a run with trace=true, and prints the paths of the pictures:

  timeline.png    all ranks over time: compute, draft, prune, transmit, wait (SpecPipe Fig. 12)
  tree.html       the token trees step by step; one file, opens in any browser, no network
  rejections.png  how the draft ranked the target's tokens, and why tokens were not in the tree
  trace.json      (there already) the timeline for https://ui.perfetto.dev or chrome://tracing

  RUN             a run folder
  steps=FROM-TO   the steps that the timeline shows; the first ones where omitted

Examples
  specdec run strategy=specpipe executor.stages=8 clock=simulated trace=true output_dir=outputs/t
  specdec trace outputs/t steps=40-70
"""


@dataclass(frozen=True, kw_only=True)
class _Keys:
    steps: Annotated[str, Field(pattern=r"^\d+-\d+$"), expects("write FROM-TO, as in 40-70")] = ""


def main(arguments: Arguments) -> int:
    (name,), keys = read_values(arguments.overrides, _Keys, "one folder")
    folder = Path(name).expanduser()
    first, _, last = keys.steps.partition("-")
    steps = (int(first), int(last)) if last else None
    if steps and steps[0] > steps[1]:
        raise UserError(f"steps={keys.steps}: FROM is after TO: write FROM-TO, as in 40-70")
    print(*draw(folder, steps), sep="\n")
    return 0


def draw(folder: Path, steps: tuple[int, int] | None = None) -> list[Path]:
    from specdec.report.traces import rejections_png, timeline_png
    from specdec.trace.files import TIMELINE_FILE, TREES_FILE, commit_kinds, tree_page

    read = partial(read_json, remedy="run again with trace=true")
    trace, trees = read(folder / TIMELINE_FILE), read(folder / TREES_FILE)
    if trace is None or trees is None:
        raise UserError(_without_trace(folder))
    title = _title(folder)
    wrapped = fill(title, 150)
    try:
        picture = timeline_png(trace, steps=steps, commits=commit_kinds(trees), title=wrapped)
        page = tree_page(trees, title=title)
        rejected = rejections_png(trees, title=wrapped)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{folder} cannot be drawn ({why}): choose other steps, or run again with trace=true"
        ) from error
    paths = [write_bytes(folder / "timeline.png", picture), write_text(folder / "tree.html", page)]
    if rejected is not None:
        paths.append(write_bytes(folder / "rejections.png", rejected))
    return [*paths, folder / TIMELINE_FILE]


def _without_trace(folder: Path) -> str:
    config = _config(folder)
    if "strategy" not in config or config.get("trace"):  # not the folder of a run, or incomplete
        return f"{folder} has no trace: name the output_dir of a complete run with trace=true"
    command = (read_json(folder / "provenance.json") or {"command": []})["command"]
    words = [w for w in command[1:] if not w.startswith(("output_dir=", "trace="))]
    again = f"specdec {shlex.join(words)}" if words[:1] == ["run"] else "specdec run ..."
    return (
        f"{folder} was run without trace=true; run it with it, into another folder: {again}"
        f" trace=true output_dir={shlex.quote(f'{folder}-trace')}"
    )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    config = read_yaml(path, f"{path} is damaged", "run it again") if path.is_file() else None
    return config if isinstance(config, dict) else {}


def _title(folder: Path) -> str:
    from specdec.report.tables import title_of

    config = _config(folder)
    name = str((config.get("strategy") or {}).get("name", folder.name))
    stages = (config.get("executor") or {}).get("stages")
    name += f", {stages} stages" if stages else ""
    conditions = (read_json(folder / SUMMARY_FILE) or {}).get("conditions")
    return f"{name}: {title_of(conditions)}" if conditions else name
