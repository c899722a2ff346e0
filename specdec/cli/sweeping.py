"""``specdec run -m``: a Hydra multirun whose jobs resume.

Hydra's launcher reports only the first failure and knows nothing of finished jobs, so a job here
never raises: it records how it ended, and the sweep's end lists all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exc
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from specdec.cli.composing import parse, plain
from specdec.cli.folders import default_folder, safe_name
from specdec.cli.jobs import checked_job, run_job_of
from specdec.cli.running import RESULT_FILE, execute
from specdec.cli.tree import config_dir
from specdec.errors import UserError
from specdec.report.files import write_text

_MAX_CHECKED = 64
SWEEP_FILE = "sweep.json"


def sweep(overrides: Sequence[str], extra: Sequence[Path] = ()) -> int:
    """Runs one job per combination of the comma-separated values.

    Each job has a folder under the sweep's, named by the values that vary; one that is complete is
    skipped, so the same command with the same ``output_dir`` goes on where it stopped.

    Returns:
        0 if every job is complete, 2 if only bad input failed, else 1.

    Raises:
        UserError: bad overrides, found before the first job starts.
    """
    parsed = parse(overrides)
    folder = _sweep_folder(overrides)
    kept = [o for o in overrides if not o.lstrip("+").startswith("output_dir=")]
    varying = [str(o.key_or_group) for o in parsed if o.is_sweep_override()]
    if not varying and not any(str(o.key_or_group).startswith("hydra") for o in parsed):
        raise UserError(
            "-m needs something to vary: give a key several values, as in policy.gamma=2,4,8, or"
            " leave -m out"
        )
    # Whatever is wrong with a combination is said now, not after the hours of those before it.
    combinations = BasicSweeper.split_arguments(parse(kept), max_batch_size=None)[0]
    for combination in combinations[:_MAX_CHECKED]:
        run_job_of(combination, extra)
    records: list[dict[str, Any]] = []
    search = ",".join(f"file://{Path(p).resolve().as_posix()}" for p in extra)
    with _command_line(
        "specdec run",
        "--multirun",
        *kept,
        f"hydra.sweep.dir={_quoted(folder)}",
        *([f"hydra.searchpath=[{search}]"] if search else []),
    ):
        _hydra_main(folder, varying, records)
    write_text(folder / SWEEP_FILE, json.dumps(records, indent=1))
    return _report(folder, records)


def _hydra_main(folder: Path, varying: Sequence[str], records: list[dict[str, Any]]) -> None:
    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def job(config: DictConfig) -> None:
        merged = OmegaConf.create({"hydra": HydraConfig.get()})
        merged.merge_with(config)
        task = list(HydraConfig.get().overrides.task)
        name = _job_name(task, varying)
        print(f"[{len(records) + 1}] {name}", flush=True)
        record = {"job": name, "status": "ok", "error": ""}
        records.append(record)
        try:
            done = execute(checked_job(plain(merged)), folder / name)
            record["status"] = "skipped" if done is None else "ok"
        except UserError as error:
            record.update(status="refused", error=str(error))
            print(f"specdec: {error}", file=sys.stderr)
        except Exception as error:
            record.update(status="failed", error=f"{type(error).__name__}: {error}")
            print(format_exc(), file=sys.stderr)

    job()


def _sweep_folder(overrides: Sequence[str]) -> Path:
    for override in reversed(parse(overrides)):
        if override.key_or_group == "output_dir":
            return Path(str(override.value()))
    return default_folder("sweep")


def _job_name(task: Sequence[str], varying: Sequence[str]) -> str:
    named = [t for t in task if t.lstrip("+~").partition("=")[0] in varying]
    return safe_name(",".join(named or task))


def _quoted(path: Path) -> str:
    text = path.as_posix()
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextmanager
def _command_line(*words: str) -> Iterator[None]:
    """Hydra's main reads ``sys.argv``; it is put back afterwards."""
    before = sys.argv
    sys.argv = list(words)
    try:
        yield
    finally:
        sys.argv = before


def _report(folder: Path, records: Sequence[dict[str, Any]]) -> int:
    bad = [r for r in records if r["status"] in ("refused", "failed")]
    counts = {s: sum(r["status"] == s for r in records) for s in ("ok", "skipped")}
    print(
        f"sweep: {counts['ok']} run, {counts['skipped']} complete before, {len(bad)} failed;"
        f" results in {folder}/*/{RESULT_FILE}"
    )
    for record in bad:
        print(f"  {record['job']}: {record['error'].splitlines()[0]}", file=sys.stderr)
    if not bad:
        return 0
    return 2 if all(r["status"] == "refused" for r in bad) else 1
