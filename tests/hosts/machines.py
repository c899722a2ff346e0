"""Several hosts on one machine: network namespaces, joined by veth pairs and a bridge.

Each host has an address, a host name (its own UTS namespace) and an interface ``eth0`` besides its
loopback. Files and process numbers are shared, as the numbers let tests stop and count processes.
Needs root and iproute2.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.distributed.processes import ROOT, environment

BRIDGE = "specdec-br"
LOCK = Path(tempfile.gettempdir()) / "specdec-hosts.lock"
PORT = 29500


def ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Why hosts cannot be built here; "" where they can."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "ip and unshare are missing: apt-get install iproute2 util-linux"
    try:
        with _exclusive():
            _build(0)
            _build(1)
    except RuntimeError as error:
        return f"network namespaces are not allowed (root is needed): {error}"
    return ""


class Host:
    """One namespace; ``index`` 0 is the master."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"specdec-{index}"
        self.host_name = f"host{index}"
        self.address = f"10.77.0.{index + 1}"
        self.cable = f"specdec-v{index}"  # the end of its veth pair at the bridge

    def command(self, words: Sequence[str]) -> list[str]:
        inside = ["unshare", "--uts", "sh", "-c", f'hostname {self.host_name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.name, *inside, *words]

    def start(
        self, words: Sequence[str], log: Path, environ: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command whose output goes to ``log``."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self.command(words),
                cwd=ROOT,
                env={**environment(), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def plug(self, plugged: bool) -> None:
        """Plugs the network cable in or out."""
        ip("link", "set", self.cable, "up" if plugged else "down")

    def limit(self, rate: str) -> None:
        """Limits both directions of the link, e.g. to ``100mbit``."""
        shape = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "200ms"]
        inside = ["ip", "netns", "exec", self.name, "tc", "qdisc", "replace", "dev", "eth0", *shape]
        for words in (inside, ["tc", "qdisc", "replace", "dev", self.cable, *shape]):
            subprocess.run(words, check=True, capture_output=True)

    def pids(self) -> list[int]:
        """Processes of this host that have not ended, oldest first."""
        found = [int(pid) for pid in ip("netns", "pids", self.name, check=False).split()]
        return sorted(pid for pid in found if _words(pid))

    def workers(self) -> list[int]:
        """Processes of ranks: those of ``specdec worker`` that torchrun or srun has started."""
        return [pid for pid in self.pids() if "worker" in _words(pid) and not _is_agent(pid)]

    def agents(self) -> list[int]:
        return [pid for pid in self.pids() if _is_agent(pid)]

    def signal(self, what: signal.Signals, pids: Sequence[int] | None = None) -> None:
        for pid in self.pids() if pids is None else pids:
            with suppress(OSError):
                os.kill(pid, what)


def _words(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def _is_agent(pid: int) -> bool:
    return "torch.distributed.run" in _words(pid)


@contextmanager
def hosts(num: int) -> Iterator[list[Host]]:
    """Builds hosts; kills their processes and removes them at the end, whatever happens."""
    with _exclusive():
        try:
            yield _build(num)
        finally:
            _build(0)


@contextmanager
def _exclusive() -> Iterator[None]:
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # names and addresses are fixed
        yield


def _build(num: int) -> list[Host]:
    """Removes what an earlier process has left, then builds ``num`` hosts."""
    for word in ip("netns", "list").split():
        if word.startswith("specdec-"):
            old = Host(int(word.rpartition("-")[2]))
            old.signal(signal.SIGKILL)
            ip("link", "del", old.cable, check=False)
            ip("netns", "del", old.name)
    ip("link", "del", BRIDGE, check=False)
    if not num:
        return []
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("link", "set", BRIDGE, "up")
    built = [Host(index) for index in range(num)]
    for host in built:
        inside = ("netns", "exec", host.name, "ip")
        ip("netns", "add", host.name)
        ip("link", "add", host.cable, "type", "veth", "peer", "eth0", "netns", host.name)
        ip("link", "set", host.cable, "master", BRIDGE, "up")
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        ip(*inside, "link", "set", "eth0", "up")
    return built


def torchrun(
    built: Sequence[Host], job: Path, folder: Path, *, ranks: Sequence[int]
) -> list[subprocess.Popen[bytes]]:
    """Starts ``torchrun`` on every host, with ``ranks`` processes each; logs are beside ``job``."""
    master = ("--master-addr", built[0].address, "--master-port", str(PORT), "--max-restarts=0")
    return [
        host.start(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(built)}"),
                *(f"--node-rank={host.index}", f"--nproc-per-node={num}", *master),
                *("-m", "specdec.cli.main", "worker", str(job), str(folder)),
            ],
            job.parent / f"{host.host_name}.log",
        )
        for host, num in zip(built, ranks, strict=True)
    ]


def wait_all(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Waits for processes to end; returns their exit statuses, None for those still running."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(0.05)
    return [process.poll() for process in processes]
