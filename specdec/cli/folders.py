"""Run folders: where they are, whom they belong to, and whether their work is done."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from traceback import format_exception
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specdec.config.options import flatten
from specdec.errors import UserError
from specdec.files import write_text

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

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
        kept = found if isinstance(found, dict) else {}
        there, here = kept.get("command", "run"), config.get("command", "run")
        if there != here:
            raise UserError(
                f"output_dir={folder} holds what `specdec {there}` has left, not `specdec {here}`:"
                " name another folder or delete that one"
            )
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
    make_folder(folder)
    write_text(stored, as_yaml(config))
    return False


def make_folder(folder: Path) -> None:
    """Makes a folder that can be written to, as needed.

    Raises:
        UserError: it cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"output_dir={folder} cannot be written ({error.strerror}): name another folder"
        ) from error


def as_yaml(config: Mapping[str, Any]) -> str:
    """A plain configuration as YAML, keys in their order."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Work whose end the folder's ``status.json`` tells: ok, interrupted or failed.

    Raises:
        UserError: another process is at work there.
    """
    with alone_in(folder):
        try:
            yield
        except BaseException as error:
            with suppress(OSError):  # a full disk is what failed, perhaps
                write_text(folder / STATUS_FILE, json.dumps(_failure(error), indent=1))
            raise
        write_text(folder / STATUS_FILE, json.dumps({"status": "ok", "error": ""}, indent=1))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other processes of ours out of a folder; a lock ends with its process.

    Where folders cannot be locked (Windows, some network file systems) nobody is kept out.

    Raises:
        UserError: another process is at work there.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"output_dir={folder}: another process is at work there; wait for it, end it, or"
                " name another folder"
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def _failure(error: BaseException) -> dict[str, str]:
    if isinstance(error, KeyboardInterrupt):
        return {"status": "interrupted", "error": ""}
    text = f"{type(error).__name__}: {error}"
    return {"status": "failed", "error": text, "traceback": "".join(format_exception(error))}


def _difference(there: object, here: dict[str, Any]) -> str:
    left, right = flatten(there), flatten(here)
    keys = [k for k in {**left, **right} if left.get(k, "absent") != right.get(k, "absent")]
    shown = [
        f"{k} is {left.get(k, 'absent')} there and {right.get(k, 'absent')} here"
        for k in keys[:_MAX_SHOWN]
    ]
    more = len(keys) - len(shown)
    return "; ".join(shown) + (f"; and {more} more keys" if more > 0 else "")
