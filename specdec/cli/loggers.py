"""Where results go besides the run folder (``logger=``)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import UserError


def check_logger(logger: Mapping[str, Any]) -> None:
    """Finds out before a long run whether its results can be logged after it.

    Raises:
        UserError: wandb is not installed.
    """
    if logger["kind"] == "wandb" and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "logger=wandb needs the package wandb, which is not installed: run"
            " pip install 'specdec-lab[wandb]', or leave logger=wandb out"
        )


def log_results(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Sends finished results to the logger that the configuration names.

    Args:
        config: of the job, or of a comparison's first row.
        rows: metrics by name, one mapping per strategy; what is no number is left out.
        folder: the run folder, where offline logs are kept.
    """
    logger = config["logger"]
    if logger["kind"] != "wandb":
        return
    wandb = importlib.import_module("wandb")
    for row in rows:
        run = wandb.init(
            project=logger["project"],
            mode=logger["mode"],
            name=str(row.get("strategy", config["strategy"]["name"])),
            group=folder.name,
            config=dict(config),
            dir=str(folder),
            reinit="finish_previous",
        )
        run.log({key: value for key, value in row.items() if isinstance(value, int | float)})
        run.finish()
