"""``specdec trace``: pictures of a traced run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.cli.arguments import read_folder
from specdec.cli.folders import CONFIG_FILE
from specdec.config.options import read_yaml
from specdec.errors import UserError
from specdec.files import parse_json

HELP = """\
specdec trace RUN [steps=FROM-TO]

Draws the trace of a run with trace=true, and prints the paths of the pictures:

  timeline.png    all ranks over time: compute, draft, prune, transmit, wait (SpecPipe Fig. 12)
  tree.html       the token trees step by step; one file, opens in any browser, no network
  trace.json      (there already) the timeline for https://ui.perfetto.dev or chrome://tracing

  RUN             a run folder
  steps=FROM-TO   the steps that the picture shows; the first ones where omitted

Example
  specdec run strategy=specpipe executor.stages=8 clock=simulated trace=true output_dir=outputs/t
  specdec trace outputs/t steps=40-70
"""

_STEPS = (r"(\d+)-(\d+)", "write steps=FROM-TO, as in steps=40-70")


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    folder, options = read_folder(words, "trace", {"steps": _STEPS})
    steps = options.get("steps")
    if steps and int(steps[1]) > int(steps[2]):
        raise UserError(f"steps={steps[0]} cannot be read: {_STEPS[1]}")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name a run folder (output_dir of a run)")
    for path in draw(folder, (int(steps[1]), int(steps[2])) if steps else None):
        print(path)
    return 0


def draw(folder: Path, steps: tuple[int, int] | None = None) -> list[Path]:
    """Draws the pictures of a traced run; returns their paths.

    Raises:
        UserError: the folder has no trace, or the steps have no events.
    """
    from specdec.files import write_bytes, write_text
    from specdec.trace.files import TIMELINE_FILE, TREES_FILE
    from specdec.trace.page import commit_kinds, tree_page
    from specdec.trace.timeline import timeline_png

    trace, trees = _load(folder / TIMELINE_FILE), _load(folder / TREES_FILE)
    title = _title(folder)
    try:
        picture = timeline_png(trace, steps=steps, commits=commit_kinds(trees), title=title)
        page = tree_page(trees, title=title)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from error
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            f"{folder} has a trace of another version ({type(error).__name__}: {error}): run it"
            " again with trace=true"
        ) from error
    return [
        write_bytes(folder / "timeline.png", picture),
        write_text(folder / "tree.html", page),
        folder / TIMELINE_FILE,
    ]


def _load(path: Path) -> dict[str, Any]:
    try:
        trace = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(
            f"{path.parent} has no {path.name}: run with trace=true, which writes it at the end"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): run again with trace=true") from error
    if not isinstance(trace, dict):
        raise UserError(f"{path} is not a trace: run again with trace=true")
    return trace


def _title(folder: Path) -> str:
    """Title of the pictures, from the run's configuration."""
    path = folder / CONFIG_FILE
    config = read_yaml(path, f"{path} is damaged", "run it again") if path.is_file() else None
    if not isinstance(config, dict):
        return folder.name
    choices, clock = config.get("choices") or {}, config.get("clock") or {}
    words = [str((config.get("strategy") or {}).get("name", folder.name))]
    words += [f"{key}={choices[key]}" for key in ("model", "sampling") if key in choices]
    stages = (config.get("executor") or {}).get("stages")
    if stages:
        words.append(f"{stages} stages")
    if clock.get("profile") and "_target_" not in clock:
        words.append(f"{clock['kind']} clock, profile {clock['profile']} x {clock['scale']:g}")
    return ", ".join(words)
