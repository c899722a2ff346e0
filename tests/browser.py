"""Opens pages in a headless Chromium: SPECDEC_BROWSER, or Chromium or Chrome on the PATH."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

_SECONDS = 60


def browser() -> str | None:
    """The program; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
    found = (shutil.which(name) for name in names)
    return os.environ.get("SPECDEC_BROWSER") or next(filter(None, found), None)


def opened(page: Path, *, width: int = 1280, height: int = 800) -> str:
    """The elements of a page after its scripts have run.

    Raises:
        subprocess.TimeoutExpired: after a minute; the browser and its helpers are ended.
    """
    program = browser()
    assert program is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000"]
    # Otherwise it looks for updates and the like, which takes minutes where there is no network.
    names = ("quic", "background-networking", "component-update", "sync", "default-apps")
    names += ("extensions", "dev-shm-usage")
    flags += ["--no-first-run", "--no-default-browser-check", *(f"--disable-{n}" for n in names)]
    flags += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{height}"]
    shown = page.with_suffix(".dom")
    # A file and a session of its own: helpers that outlive the browser hold a pipe open, which
    # would be read for ever.
    with shown.open("wb") as stream:
        process = subprocess.Popen(
            [program, *flags, "--dump-dom", page.as_uri()],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert status == 0, f"{program} ended with status {status}"
    return shown.read_bytes().decode("utf-8", "replace")
