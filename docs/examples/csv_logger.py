"""A logger outside the library: appends a line per strategy to one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specdec.interfaces import Logger

Names = Annotated[list[str], Field(min_length=1)]  # an alias of the author's own


class CsvLogger(Logger):
    """One line per strategy: its run folder, its name, and chosen metrics."""

    def __init__(self, *, path: str, metrics: Names) -> None:
        """Takes the keys of its YAML.

        Args:
            path: the file; created with a header where it does not exist.
            metrics: names of docs/metrics.md.
        """
        self._path, self._metrics = Path(path).expanduser(), list(metrics)

    def log(self, config: Mapping[str, Any], row: Mapping[str, Any], folder: Path) -> None:
        """Called once per strategy, when all results are on disk."""
        is_new = not self._path.is_file()
        with self._path.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            if is_new:
                writer.writerow(["folder", "strategy", *self._metrics])
            values = [row.get(name) for name in self._metrics]
            writer.writerow([folder, config["strategy"]["name"], *values])
