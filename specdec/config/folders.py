"""Folders of results: their names, stored configurations, locks and completeness."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from traceback import format_exception
from typing import Any, TypeVar
from uuid import uuid4

from omegaconf import OmegaConf

from specdec.config.options import flatten, read_yaml
from specdec.errors import UserError
from specdec.files import is_full, parse_json, write_text

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_T = TypeVar("_T")

CONFIG_FILE = "config.yaml"
STATUS_FILE = "status.json"
_LONGEST_NAME = 120


def output_folder(chosen: str | None, command: str, name: str = "") -> Path:
    if chosen:
        return Path(chosen)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    parent = Path("outputs") / command
    return (parent / safe_name(name) if name else parent) / f"{stamp}-{uuid4().hex[:6]}"


def safe_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", text).strip(".-") or "run"
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{sha256(text.encode()).hexdigest()[:8]}"


def run_in(
    folder: Path, config: Mapping[str, Any], result: str, work: Callable[[], _T]
) -> _T | None:
    """Does the work of a configuration in its folder; returns None if it was complete already.

    Of work that is refused before its first result nothing is left, so that the corrected command
    can use the same folder; any other end is written to ``status.json``. ``result`` is the file
    that the work writes last, "" for work that is always repeated.
    """
    existed, claimed = folder.is_dir(), (folder / CONFIG_FILE).exists()
    try:
        if claim(folder, config, result):
            return None
        with alone_in(folder):
            try:
                done = work()
            except BaseException as error:
                with suppress(OSError):  # the failure may be a full disk
                    failure = {"status": "interrupted", "error": ""}
                    if not isinstance(error, KeyboardInterrupt):
                        text = f"{type(error).__name__}: {error}"
                        trace = "".join(format_exception(error))
                        failure = {"status": "failed", "error": text, "traceback": trace}
                    write_text(folder / STATUS_FILE, json.dumps(failure, indent=1))
                raise
            write_text(folder / STATUS_FILE, json.dumps({"status": "ok", "error": ""}, indent=1))
            return done
    except UserError:
        own = {CONFIG_FILE, STATUS_FILE}
        if not claimed and folder.is_dir() and {p.name for p in folder.iterdir()} <= own:
            for name in own:
                (folder / name).unlink(missing_ok=True)
            if not existed:
                folder.rmdir()
        raise


def claim(folder: Path, config: Mapping[str, Any], result: str) -> bool:
    """Assigns a new or empty folder to a configuration by writing its ``config.yaml``; returns
    whether ``result`` exists in it already, and refuses other folders.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir={folder} is a file: name a folder")
    stored = folder / CONFIG_FILE
    if stored.is_file():
        refusal = f"output_dir={folder} has a {CONFIG_FILE} that cannot be read"
        loaded = read_yaml(stored, refusal, "name another folder or delete that one")
        previous = loaded if isinstance(loaded, dict) else {}
        there, here = previous.get("command", "run"), config.get("command", "run")
        if there != here:
            raise UserError(
                f"output_dir={folder} has results of `specdec {there}`, not of `specdec {here}`:"
                " name another folder or delete that one"
            )
        if _computed(previous) != _computed(config):
            raise UserError(
                f"output_dir={folder} has a run of another configuration"
                f" ({_difference(_computed(previous), _computed(config))}): name another folder or"
                " delete that one"
            )
        if not result or not (folder / result).is_file():
            return False
        try:
            if not isinstance(parse_json((folder / result).read_bytes()), dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            raise UserError(
                f"{folder / result} is damaged ({error}): delete it, and start the same command"
                " again"
            ) from error
        return True
    if folder.is_dir() and any(p.name != STATUS_FILE for p in folder.iterdir()):
        raise UserError(
            f"output_dir={folder} is not empty and not a run folder (it has no {CONFIG_FILE}):"
            " name a new folder"
        )
    make_folder(folder)
    write_text(stored, as_yaml(config))
    return False


def _computed(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run computes, which is its identity: everything but where results are sent."""
    return {
        key: _computed(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "logger"
    }


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if is_full(error):
            raise
        raise UserError(
            f"output_dir={folder} cannot be written ({error.strerror}): name another folder"
        ) from error


def as_yaml(config: Mapping[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Locks a folder; refuses one that another process of this library has locked. Folders that the
    system cannot lock (Windows, some network file systems) are not locked.
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
                f"output_dir={folder}: another process uses it; wait for it, end it, or"
                " name another folder"
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def _difference(there: object, here: dict[str, Any]) -> str:
    left, right = flatten(there), flatten(here)
    keys = [k for k in {**left, **right} if left.get(k, "absent") != right.get(k, "absent")]
    shown = [
        f"{k} is {left.get(k, 'absent')} there and {right.get(k, 'absent')} here" for k in keys[:3]
    ]
    return "; ".join([*shown, *([f"and {len(keys) - 3} more keys"] if len(keys) > 3 else [])])
