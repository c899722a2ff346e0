"""``specdec reproduce`` calls the package of experiments, if it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from specdec.errors import UserError

_COMMAND = "experiments.reproduce.command"


def main(words: Sequence[str]) -> int:
    try:
        command = importlib.import_module(_COMMAND)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] != "experiments":
            raise
        raise UserError(
            "the papers' tables are in the package experiments, which is not installed: install"
            " specdec again from its repository"
        ) from error
    status: int = command.main(words)
    return status
