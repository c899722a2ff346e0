import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from specdec.cli.arguments import Arguments
from specdec.cli.loggers import check_logger, log_results
from specdec.config import folders
from specdec.config.hydra import compose_raw, without_hydra
from specdec.config.job import COMPARISON_FILE, Comparison, Job
from specdec.config.options import Node, Trees
from specdec.errors import UserError
from specdec.runs.progress import Progress

SUMMARY_FILE = "summary.json"  # written last in a run folder: if it exists, the run is complete


def execute(work: Job | Comparison, folder: Path) -> bool:
    """Runs a job or a comparison in its folder, and sends its rows to the logger; returns False
    if the folder was complete already.
    """
    from specdec.runs.jobs import compare_jobs, run_job

    if isinstance(work, Job):
        configs, result, table = [work.config], SUMMARY_FILE, ""
        do: Callable[[Any], Node] = partial(run_job, work.config, folder)
    else:
        configs = [job.config for job in work.jobs]
        result, table = COMPARISON_FILE, "comparison.md"
        do = partial(compare_jobs, configs, folder, work.repeats)
    check_logger(configs[0], folder)
    done, is_new = run_in(folder, work.config, result, do, table=table)
    log_results(configs, [done] if isinstance(work, Job) else done["rows"], folder)
    if is_new:
        print(f"results in {folder}")
    return is_new


def run_in(
    folder: Path, config: Node, result: str, work: Callable[[Any], Any], *, table: str = ""
) -> tuple[Any, bool]:
    """Like ``folders.run_in``, but calls ``work`` with the ``Progress`` to which it reports, and
    prints the folder's file ``table`` if the result is not new.
    """

    def shown() -> Any:
        with reporting() as progress:
            return work(progress)

    done, is_new = folders.run_in(folder, config, result, shown)
    if not is_new:
        if table and (folder / table).is_file():
            print((folder / table).read_text(encoding="utf-8"))
        print(f"{folder}: complete already, not run again (delete the folder to repeat it)")
    return done, is_new


def print_notices(notices: Iterable[str]) -> None:
    for notice in dict.fromkeys(notices):
        print(f"note: {notice}", file=sys.stderr)


def show_config(
    arguments: Arguments,
    make: Callable[[Sequence[str], Trees], Job | Comparison],
    jobs: Sequence[Sequence[str]] | None = None,
    *,
    name: str,
) -> int:
    """Prints the configuration of every job as a YAML document; returns exit status 0.

    ``--cfg job`` prints the configuration that ``make`` has checked (or the composed one, if it is
    refused, and the error on standard error), ``--cfg hydra`` Hydra's own node, ``--cfg all`` both.
    ``jobs`` has the overrides of each job of a sweep.
    """
    for overrides in [arguments.overrides] if jobs is None else jobs:
        if jobs is not None:
            print(f"---\n# {' '.join(overrides)}")
        refused = list[str]()
        if arguments.cfg == "job":
            try:
                work = make(without_hydra(overrides), arguments.config_dirs)
                print(folders.as_yaml(work.config), end="")
                continue
            except UserError as error:
                refused = [f"this configuration cannot be run: {error}"]
        raw = compose_raw(overrides, name=name, extra=arguments.config_dirs)
        print_notices(refused)
        wanted = {"job": [False], "hydra": [True], "all": [False, True]}[arguments.cfg]
        keys = [str(key) for key in raw if (key == "hydra") in wanted]
        print(OmegaConf.to_yaml(OmegaConf.masked_copy(raw, keys)), end="")
    return 0


class _Reports(Progress):
    """Shows bars on a terminal, elsewhere a line at the start and end of a phase and every 10 s."""

    def __init__(self, progress: Bars) -> None:
        self._progress = progress
        self._last_line = 0.0

    def phase(self, label: str, total: int | None = None) -> None:
        for task in self._progress.task_ids:
            self._progress.stop_task(task)
        self._progress.add_task(label, total=total, detail="")
        self._write_line()

    def advance(self, count: int = 1, detail: str = "") -> None:
        if not self._progress.task_ids:
            return
        self._progress.update(self._progress.task_ids[-1], advance=count, detail=detail)
        if self._progress.tasks[-1].finished or monotonic() - self._last_line >= 10.0:
            self._write_line()

    def note(self, text: str) -> None:
        if not self._progress.disable:  # the bars are on standard error, the text is not
            self._progress.stop()
        print(text, flush=True)
        self._progress.start()

    def _write_line(self) -> None:
        if not self._progress.disable:
            return
        self._last_line, task = monotonic(), self._progress.tasks[-1]
        of = "" if task.total is None else f" {task.completed:.0f}/{task.total:.0f}"
        left = f", about {task.time_remaining:.0f} s left" if task.time_remaining else ""
        line = f"{task.description}{of} {task.fields['detail']}".rstrip()
        print(f"{line}{left}", file=sys.stderr, flush=True)


@contextmanager
def reporting() -> Iterator[Progress]:
    counts = MofNCompleteColumn(), TextColumn("{task.fields[detail]}")
    columns = (*Bars.get_default_columns(), *counts)  # text, bar, share, time left
    console, plain = Console(stderr=True), not sys.stderr.isatty()
    progress = Bars(*columns, console=console, redirect_stdout=False, disable=plain)
    with nullcontext() if plain else progress:  # rich would write an empty line at its end
        yield _Reports(progress)
