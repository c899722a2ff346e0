"""Where results go besides the run folder (``logger=``)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_PICTURES = ("run.png", "comparison.png")
_HISTOGRAMS = {
    "acceptance_by_depth": "depth",
    "drafted_share_by_position": "position",
    "path_lengths": "tokens_per_answer",
}
"""Metric -> what its keys count: each becomes a curve over that."""


def log_results(
    configs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """Sends finished results to the logger that the configurations name.

    One wandb run per row: its configuration; every numeric metric in the summary; curves over
    prompts, depths and positions; the folder's picture. Runs of one folder are a group, those of a
    sweep share the sweep's.

    Args:
        configs: one per row.
        rows: metrics by name, one mapping per strategy.
        folder: the run folder, where offline logs are kept.
    """
    logger = configs[0]["logger"]
    if logger["kind"] != "wandb":
        return
    wandb = importlib.import_module("wandb")
    in_sweep = any(folder.parent.glob(".jobs-*"))
    for config, row in zip(configs, rows, strict=True):
        run = wandb.init(
            project=logger["project"],
            mode=logger["mode"],
            name=folder.name if in_sweep else str(config["strategy"]["name"]),
            group=folder.parent.name if in_sweep else folder.name,
            tags=[str(config["strategy"]["name"]), str(config["clock"]["kind"])],
            config=dict(config),
            dir=str(folder),
            reinit="finish_previous",
        )
        for axis in ("prompts_done", *_HISTOGRAMS.values()):
            run.define_metric(axis, hidden=True)
        run.define_metric("prompt/*", step_metric="prompts_done")
        for name, axis in _HISTOGRAMS.items():
            run.define_metric(f"curve/{name}", step_metric=axis)
        for point in _curves(row, folder, str(config["strategy"]["name"])):
            run.log(point)
        for name in _PICTURES:
            if (folder / name).is_file():
                run.log({name.removesuffix(".png"): wandb.Image(str(folder / name))})
        run.summary.update(numbers(row))
        run.finish()


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """A row's numeric metrics, and whether it is lossless as 0 or 1; the rest is left out."""
    return {k: v for k, v in row.items() if isinstance(v, int | float)}


def _curves(row: Mapping[str, Any], folder: Path, strategy: str) -> Iterator[dict[str, Any]]:
    """Points to log, in order: prompt by prompt, then the histograms."""
    from specdec.report.requests import read_requests
    from specdec.report.results import prompt_metrics

    done = 0
    for record in read_requests(folder / "requests.jsonl"):
        if record.strategy != strategy:
            continue
        done += 1
        found = numbers(prompt_metrics(record.result))
        yield {"prompts_done": done, **{f"prompt/{k}": v for k, v in found.items()}}
    for name, axis in _HISTOGRAMS.items():
        for key, value in (row.get(name) or {}).items():
            if value is not None:
                yield {axis: int(key), f"curve/{name}": value}
