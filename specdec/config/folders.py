"""Folders of results: their names, stored configurations, locks and completeness."""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from traceback import format_exception
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf

from specdec.config.options import Node, read_yaml
from specdec.errors import UserError
from specdec.files import flatten, is_full, read_json, write_json, write_text

CONFIG_FILE = "config.yaml"
STATUS_FILE = "status.json"
_LONGEST_NAME = 120


def output_folder(chosen: object, command: str, name: str = "") -> Path:
    if chosen not in (None, ""):
        return Path(str(chosen))
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    parent = Path("outputs") / command
    return (parent / safe_name(name) if name else parent) / f"{stamp}-{uuid4().hex[:6]}"


def safe_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", text).strip(".-") or "run"
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{sha256(text.encode()).hexdigest()[:8]}"


def run_in(folder: Path, config: Node, result: str, work: Callable[[], Any]) -> tuple[Any, bool]:
    """Calls ``work`` for a configuration in its folder, unless the folder has the result already.
    Returns the result, new or stored, and whether ``work`` was called.

    ``result`` is the file that ``work`` writes last; "" always repeats the work. ``status.json``
    says how the work ended. If it raises ``UserError`` before it has written a file, nothing is
    left in the folder, so that the corrected command can use it.
    """
    existed, claimed = folder.is_dir(), (folder / CONFIG_FILE).exists()
    try:
        if (stored := _claim(folder, config, result)) is not None:
            return stored, False
        with alone_in(folder):
            try:
                done = work()
            except BaseException as error:
                status = {"status": "interrupted", "error": ""}
                if not isinstance(error, KeyboardInterrupt):
                    trace = "".join(format_exception(error))
                    text = f"{type(error).__name__}: {error}"
                    status = {"status": "failed", "error": text, "traceback": trace}
                with suppress(OSError):  # the failure may be a full disk
                    write_json(folder / STATUS_FILE, status)
                raise
            write_json(folder / STATUS_FILE, {"status": "ok", "error": ""})
            return done, True
    except UserError:
        own = {CONFIG_FILE, STATUS_FILE}
        if not claimed and folder.is_dir() and {p.name for p in folder.iterdir()} <= own:
            for name in own:
                (folder / name).unlink(missing_ok=True)
            if not existed:
                folder.rmdir()
        raise


def _claim(folder: Path, config: Node, result: str) -> dict[str, Any] | None:
    """Assigns a new or empty folder to a configuration by writing its ``config.yaml``. Returns the
    content of the file ``result`` if it exists; raises ``UserError`` for a folder of other work.
    """
    at, other = f"output_dir={folder}", "name another folder or delete that one"
    stored = folder / CONFIG_FILE
    if not stored.is_file():
        if folder.is_dir() and any(p.name != STATUS_FILE for p in folder.iterdir()):
            raise UserError(f"{at} is not empty and has no {CONFIG_FILE}: name a new folder")
        make_folder(folder)
        write_text(stored, as_yaml(config))
        return None
    loaded = read_yaml(stored, f"{at} has a {CONFIG_FILE} that cannot be read", other)
    there, here = _computed(loaded), _computed(config)
    if there["command"] != here["command"]:
        commands = f"`specdec {there['command']}`, and this is `specdec {here['command']}`"
        raise UserError(f"{at} has results of {commands}: {other}")
    if there != here:
        difference = _difference(there, here)
        raise UserError(f"{at} has a run of another configuration ({difference}): {other}")
    return read_json(folder / result)


def _computed(config: Any) -> dict[str, Any]:
    """Returns the settings that identify what a run computes: all but those of the logger."""
    own = {k: v for k, v in flatten(config).items() if "logger" not in k.split(".")}
    return {"command": "run", **own}


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    pairs = {k: (there.get(k, "absent"), here.get(k, "absent")) for k in {**there, **here}}
    shown = [f"{k} is {a} there and {b} here" for k, (a, b) in pairs.items() if a != b]
    more = [f"and {len(shown) - 3} more keys"] if len(shown) > 3 else []
    return "; ".join([*shown[:3], *more])


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full(error):
            raise
        raise UserError(
            f"output_dir={folder} cannot be written ({error.strerror}): name another folder"
        ) from error


def as_yaml(config: Node) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Locks a folder; raises ``UserError`` if another process has locked it. Folders that the
    system cannot lock (some network file systems) stay unlocked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                remedy = "wait for it, end it, or name another folder"
                text = f"output_dir={folder}: another process uses it; {remedy}"
                raise UserError(text) from error
        yield
    finally:
        os.close(descriptor)
