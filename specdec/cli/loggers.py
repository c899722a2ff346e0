"""Loggers (``logger=``) send results elsewhere besides the run folder."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from specdec.config.options import Node
from specdec.errors import UserError
from specdec.files import read_json, write_json
from specdec.interfaces import Logger
from specdec.parts.build import build_part
from specdec.parts.fields import Text, validated

LOGGED_FILE = "logged.json"  # the ``logger`` nodes that have received the results of a folder


def check_logger(config: Node, folder: Path) -> None:
    if logger := _logger(config["logger"], _served(folder)):
        logger.check()


def log_results(configs: Sequence[Node], rows: Sequence[Node], folder: Path) -> None:
    """Sends one row of metrics per configuration to the logger of the first configuration, unless
    this logger has received the results of the folder already.
    """
    node, served = configs[0]["logger"], _served(folder)
    if logger := _logger(node, served):
        for config, row in zip(configs, rows, strict=True):
            logger.log(config, row, folder)
        write_json(folder / LOGGED_FILE, {"loggers": [*served, node]})


def _served(folder: Path) -> list[Any]:
    return list((read_json(folder / LOGGED_FILE) or {"loggers": []})["loggers"])


def _logger(node: Node, served: Sequence[Any]) -> Logger | None:
    if node in served or node.get("kind") == "none":
        return None
    if "_target_" in node:
        return build_part(node, {}, "logger", Logger)  # type: ignore[no-any-return]
    return WandbLogger(project=node["project"], mode=node["mode"])


class WandbLogger(Logger):
    """Logs to Weights & Biases, one wandb run per strategy.

    A run has the configuration, every numeric metric in its summary, and the folder's picture. A
    traced run also has the reasons why draft tokens were rejected. Runs of one folder form a group;
    those of a sweep share the sweep's group.
    """

    @validated
    def __init__(self, *, project: Text, mode: Literal["offline", "online", "disabled"]) -> None:
        self._project = project
        self._mode = mode

    def check(self) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                "logger=wandb needs the package wandb, which is not installed: run"
                " pip install 'specdec-lab[wandb]', or leave logger=wandb out"
            )
        if self._mode != "online":
            return
        wandb = importlib.import_module("wandb")
        try:
            reason = "" if wandb.login(prompt=False) else "no login is stored"
        except wandb.Error as error:
            reason = str(error)
        if reason:
            raise UserError(
                f"logger=wandb sends results to a server ({reason}): run `wandb login`, set"
                " WANDB_API_KEY, or use logger.mode=offline"
            )

    def log(self, config: Node, row: Node, folder: Path) -> None:
        from specdec.report.traces import rejection_metrics

        wandb = importlib.import_module("wandb")
        in_sweep = any(folder.parent.glob(".jobs-*"))
        strategy = str(config["strategy"]["name"])
        run = wandb.init(
            project=self._project,
            mode=self._mode,
            name=folder.name if in_sweep else strategy,
            group=folder.parent.name if in_sweep else folder.name,
            tags=[strategy, str(config["clock"]["kind"])],
            config=dict(config),
            dir=str(folder),
            reinit="finish_previous",
        )
        if (trees := read_json(folder / "trees.json")) is not None:
            metrics = rejection_metrics(trees)
            run.summary.update({f"rejections/{name}": value for name, value in metrics.items()})
        for name in ("run.png", "comparison.png"):
            if (folder / name).is_file():
                run.log({name.removesuffix(".png"): wandb.Image(str(folder / name))})
        run.summary.update({k: v for k, v in row.items() if isinstance(v, int | float)})
        run.finish()
