"""Faults of hosts and links: the run goes on, or ends with one line that names host and rank.

Three hosts: rank 0 with the draft, and a stage on each of the others.
"""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from tests.distributed.processes import wait_until
from tests.hosts.machines import Host, torchrun, wait_all
from tests.hosts.test_runs import MODEL, TREE, logs, nothing_runs, outputs, write_job

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

START_S = 200.0
TIMEOUT_S = 8
LIMIT_S = 60.0  # for a run to end; the promise is the timeout and a few seconds, on an idle machine
WORDS = ("strategy=specpipe", *TREE, "executor.stages=2")
LONG = [word for word in MODEL if not word.startswith("data.limit")] + ["data.limit=2000"]
Built = list[Host]
Agents = list[subprocess.Popen[bytes]]


@pytest.fixture
def running(
    build: Callable[[int], Built],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> tuple[Built, Agents, Path]:
    """Three hosts with a run that has finished two prompts; its parameter is the timeout."""
    timeout_s = getattr(request, "param", TIMEOUT_S)
    job, folder = tmp_path / "job.yaml", tmp_path / "hosts"
    write_job(job, capsys, *LONG, *WORDS, f"executor.timeout_s={timeout_s}")
    built = build(3)
    agents = torchrun(built, job, folder, ranks=(1, 1, 1))
    go_on(agents, folder, START_S)
    return built, agents, folder


def go_on(agents: Agents, folder: Path, seconds: float = LIMIT_S) -> None:
    """Waits until two more prompts have been finished."""
    more = len(outputs(folder)) + 2
    wait_until(
        lambda: len(outputs(folder)) >= more or any(a.poll() is not None for a in agents),
        "two more prompts",
        seconds,
    )
    assert [a.poll() for a in agents] == [None] * 3, logs(folder.parent)


def slow(host: Host) -> None:
    """Stops and continues the host's ranks in turns: a tenth of its speed for four seconds."""
    for _ in range(10):
        host.signal(signal.SIGSTOP, host.workers())
        time.sleep(0.36)
        host.signal(signal.SIGCONT, host.workers())
        time.sleep(0.04)


def flap(*cables: Host) -> None:
    for host in cables:
        host.plug(False)
    time.sleep(3.0)
    for host in cables:
        host.plug(True)


def stop_and_continue(host: Host) -> None:
    host.signal(signal.SIGSTOP, host.workers())
    time.sleep(3.0)
    host.signal(signal.SIGCONT, host.workers())


@pytest.mark.parametrize("running", [20], indirect=True)
def test_a_run_survives_what_loses_nothing(
    running: tuple[Built, Agents, Path], tmp_path: Path
) -> None:
    """Six faults in one run, whose tokens are those of one process."""
    built, agents, folder = running
    survived: list[tuple[str, Callable[[], Any]]] = [
        ("link of the first stage's host down for 3 s", lambda: flap(built[1])),
        ("link of the last stage's host down for 3 s", lambda: flap(built[2])),
        ("link of the master down for 3 s", lambda: flap(built[0])),
        ("all links down for 3 s", lambda: flap(*built)),
        ("slow host", lambda: slow(built[2])),
        ("host stopped for 3 s", lambda: stop_and_continue(built[1])),
    ]
    for _, fault in survived:
        fault()
        go_on(agents, folder)
    agents[0].terminate()
    built[0].signal(signal.SIGTERM, built[0].agents())
    wait_all(agents, LIMIT_S)
    nothing_runs(built)
    found = outputs(folder)
    one = tmp_path / "one"
    words = [word for word in MODEL if not word.startswith("data.limit")]
    assert main(["run", *words, *WORDS, f"data.limit={len(found)}", f"output_dir={one}"]) == 0
    assert found == outputs(one)


def kill_rank(built: Built, index: int) -> None:
    built[index].signal(signal.SIGKILL, built[index].workers())


def stop(built: Built, index: int) -> None:
    built[index].signal(signal.SIGSTOP, built[index].workers())


def unplug(built: Built, index: int) -> None:
    built[index].plug(False)


def lose(built: Built, index: int) -> None:
    """The host is gone: nobody closes its connections."""
    built[index].plug(False)
    built[index].signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("fault", "index", "said"),
    [
        (kill_rank, 1, "rank 1 on host1 "),
        (kill_rank, 2, "rank 2 on host2 "),
        (stop, 1, "rank 1 on host1 "),
        (unplug, 1, "rank 1 on host1 "),
        (lose, 2, "rank 2 on host2 "),
        (unplug, 0, "rank 1 on host1 "),
        (kill_rank, 0, "host0"),  # what torchrun says
        (lose, 0, "rank 1 on host1 "),
    ],
)
def test_a_run_that_cannot_go_on_ends_everywhere(
    fault: Callable[[Built, int], None],
    index: int,
    said: str,
    running: tuple[Built, Agents, Path],
    tmp_path: Path,
) -> None:
    """Within the timeout, with one line that names host and rank, and with its finished prompts."""
    built, agents, folder = running
    before = outputs(folder)
    fault(built, index)
    start = time.monotonic()
    if fault is stop:  # its torchrun waits for it
        wait_all([agents[0]], TIMEOUT_S + LIMIT_S)
        built[index].signal(signal.SIGCONT)
    assert None not in wait_all(agents, TIMEOUT_S + LIMIT_S), logs(tmp_path)
    print(f"{fault.__name__} host{index}: all ended after {time.monotonic() - start:.1f} s")
    nothing_runs(built)
    after = outputs(folder)
    assert before.items() <= after.items()
    # A master that is gone says nothing: then each other host's rank does.
    speaker = "host1" if fault is lose and index == 0 else "host0"
    text = (tmp_path / f"{speaker}.log").read_text()
    assert any(said in line for line in text.splitlines()), logs(tmp_path)
