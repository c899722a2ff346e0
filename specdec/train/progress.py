from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[[float, str], None]
"""Called with progress in [0, 1] and a line of text, which is printed unless it is empty."""


def silent(_progress: float, _line: str) -> None: ...


@contextmanager
def progress_bar(label: str) -> Iterator[Report]:
    columns = *Progress.get_default_columns()[:3], TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=1.0)

        def report(progress: float, line: str) -> None:
            bar.update(task, completed=progress)
            if line:
                bar.console.print(line, markup=False, highlight=False)

        yield report
