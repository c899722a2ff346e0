"""Run folders: where they are, whom they belong to, and whether their work is done."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from traceback import format_exception
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specdec.cli.tree import flatten
from specdec.errors import UserError
from specdec.report.files import write_text

CONFIG_FILE = "config.yaml"
STATUS_FILE = "status.json"
_LONGEST_NAME = 120
_MAX_SHOWN = 3


def default_folder(command: str, name: str = "") -> Path:
    """``outputs/<command>/<name>/<time>-<unique>``: two runs never share it."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    parent = Path("outputs") / command
    return (parent / safe_name(name) if name else parent) / f"{stamp}-{uuid4().hex[:6]}"


def safe_name(text: str) -> str:
    """``text`` as one folder name; where characters had to go, a digest keeps it unique."""
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", text).strip(".-") or "run"
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{sha256(text.encode()).hexdigest()[:8]}"


def claim(folder: Path, config: Mapping[str, Any], result: str) -> bool:
    """Makes ``folder`` the place of this configuration.

    A folder belongs to the configuration whose ``config.yaml`` lies in it. One without is made, or
    taken if it is empty.

    Args:
        folder: the run folder.
        config: plain values.
        result: the file that is written last; where it exists the work is done.

    Returns:
        Whether the work is done already.

    Raises:
        UserError: the folder belongs to another configuration or to something else.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir={folder} is a file: name a folder")
    stored = folder / CONFIG_FILE
    if stored.is_file():
        try:
            found = OmegaConf.to_container(OmegaConf.load(stored), resolve=False)
        except (OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
            raise UserError(
                f"output_dir={folder} has a {CONFIG_FILE} that cannot be read"
                f" ({str(error).splitlines()[0]}): name another folder or delete that one"
            ) from error
        if found != dict(config):
            raise UserError(
                f"output_dir={folder} holds a run of another configuration"
                f" ({_difference(found, dict(config))}): name another folder or delete that one"
            )
        return (folder / result).is_file()
    if folder.is_dir() and any(p.name != STATUS_FILE for p in folder.iterdir()):
        raise UserError(
            f"output_dir={folder} is not empty and is no run folder (it has no {CONFIG_FILE}):"
            " name a new folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(stored, as_yaml(config))
    except OSError as error:
        raise UserError(
            f"output_dir={folder} cannot be written ({error.strerror}): name another folder"
        ) from error
    return False


def as_yaml(config: Mapping[str, Any]) -> str:
    """A plain configuration as YAML, keys in their order."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


def write_status(folder: Path, status: str, error: str = "") -> None:
    """Records how a job ended: running, ok or failed."""
    write_text(folder / STATUS_FILE, json.dumps({"status": status, "error": error}, indent=1))


def write_failure(folder: Path, error: BaseException) -> None:
    """Records that a job failed, of what and where."""
    text = f"{type(error).__name__}: {error}"
    found = {"status": "failed", "error": text, "traceback": "".join(format_exception(error))}
    write_text(folder / STATUS_FILE, json.dumps(found, indent=1))


def _difference(there: object, here: dict[str, Any]) -> str:
    left, right = flatten(there), flatten(here)
    keys = [k for k in {**left, **right} if left.get(k, "absent") != right.get(k, "absent")]
    shown = [
        f"{k} is {left.get(k, 'absent')} there and {right.get(k, 'absent')} here"
        for k in keys[:_MAX_SHOWN]
    ]
    more = len(keys) - len(shown)
    return "; ".join(shown) + (f"; and {more} more keys" if more > 0 else "")
