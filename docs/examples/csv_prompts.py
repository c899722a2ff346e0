"""A data reader outside the library: prompts from a column of a CSV file."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specdec.data import DataReader, Prompt
from specdec.errors import UserError

Column = Annotated[str, Field(min_length=1)]  # an alias of the author's own


class CsvPrompts(DataReader):
    """One prompt per row of a CSV file with a header."""

    def __init__(self, *, path: str, column: Column) -> None:
        """Takes keys of its YAML.

        Args:
            path: the file; the section ``data`` has this key already.
            column: header of the column that holds the prompts.
        """
        self._path, self._column = Path(path).expanduser(), column

    def prompts(self) -> Iterator[Prompt]:
        """Prompts in the file's order; ids are row numbers from 0."""
        if not self._path.is_file():
            raise UserError(f"data.path={str(self._path)!r} is not a file; name an existing one")
        with self._path.open(newline="", encoding="utf-8") as stream:
            for index, row in enumerate(csv.DictReader(stream)):
                if self._column not in row:
                    raise UserError(
                        f"data.column={self._column} is not in {self._path.name}: choose one of"
                        f" {', '.join(row)}"
                    )
                yield Prompt(
                    id=index,
                    text=row[self._column],
                    name=f"csv/{index}",
                    source=f"{self._path.name} row {index + 2}",  # row 1 is the header
                )

    def provenance(self) -> dict[str, Any]:
        """What identifies the prompts in ``provenance.json``."""
        return {
            "file": self._path.name,
            "sha256": hashlib.sha256(self._path.read_bytes()).hexdigest(),
        }
