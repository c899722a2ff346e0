"""The batch script of docs/distributed.md, run by Slurm on two hosts."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specdec.cli.main import main
from tests.distributed.processes import ROOT, environment, wait_until
from tests.hosts.machines import Host
from tests.hosts.test_runs import MODEL, TREE, logs, outputs, write_job

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

WORDS = ("strategy=specpipe", *TREE, "executor.stages=3", "sampling=t08")
MANY = [word for word in MODEL if not word.startswith("data.limit")]
CONFIG = """\
ClusterName=specdec
SlurmctldHost=host0({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""
# As in docs/distributed.md; two nodes with two tasks each.
BATCH = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks=4 --ntasks-per-node=2 --output={folder}/job-%j.log
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
srun --ntasks=4 --kill-on-bad-exit=1 {python} -m specdec.cli.main worker {job} {out}
"""


class Cluster:
    """A controller on the first host and a daemon on every host."""

    def __init__(self, built: list[Host], folder: Path) -> None:
        self.hosts, self.folder = built, folder
        self.config = folder / "slurm.conf"

    def run(self, *words: str, seconds: float = 60) -> str:
        """Runs one of Slurm's commands on the first host."""
        done = subprocess.run(
            self.hosts[0].command(words),
            cwd=ROOT,
            env={**environment(), "SLURM_CONF": str(self.config)},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{words}: {done.stdout} {done.stderr} {logs(self.folder)}"
        return done.stdout

    def submit(self, job: Path, out: Path) -> str:
        script = self.folder / "job.sh"
        script.write_text(BATCH.format(folder=self.folder, python=sys.executable, job=job, out=out))
        found = re.search(r"\d+", self.run("sbatch", str(script)))
        assert found is not None
        return found[0]

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
        return found[1] if found else ""


@contextmanager
def names(built: list[Host]) -> Iterator[None]:
    """Makes the hosts know one another's names (``ip netns exec`` mounts these files)."""
    folders = [Path("/etc/netns", host.name) for host in built]
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.host_name}" for host in built)]
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(build: Callable[[int], list[Host]], tmp_path: Path) -> Iterator[Cluster]:
    for needed in ("munged", "slurmctld", "slurmd", "srun"):
        if not shutil.which(needed):
            pytest.skip(f"{needed} is missing: apt-get install slurm-wlm munge")
    built = build(2)
    # Not below tmp_path, whose name is too long for a socket.
    folder = Path("/tmp", f"specdec-slurm-{os.getpid()}")
    folder.mkdir(mode=0o755)
    made = Cluster(built, folder)
    nodes = "\n".join(
        f"NodeName={h.host_name} NodeAddr={h.address} CPUs=4 State=UNKNOWN" for h in built
    )
    made.config.write_text(CONFIG.format(address=built[0].address, folder=folder, nodes=nodes))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    munged = [
        *("munged", "--foreground", "--force", f"--socket={folder}/munge.socket"),
        *(f"--key-file={folder}/munge.key", f"--pid-file={folder}/munge.pid"),
        *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
    ]
    environ = {"SLURM_CONF": str(made.config)}
    with names(built):
        try:
            built[0].start(munged, folder / "munge-out.log")
            wait_until((folder / "munge.socket").exists, "munged", 20.0)
            built[0].start(["slurmctld", "-D", "-i"], folder / "slurmctld.log", environ)
            for host in built:
                (folder / f"spool-{host.host_name}").mkdir()
                # ``ip netns exec`` mounts /sys anew, without the groups that slurmd asks for.
                mount = "mount -t tmpfs none /sys/fs/cgroup && exec"
                words = ["sh", "-c", f"{mount} slurmd -D -N {host.host_name}"]
                host.start(words, folder / f"slurmd-{host.host_name}.log", environ)
            try:
                wait_until(lambda: "idle" in made.run("sinfo", "-h", "-o", "%T %D"), "idle", 40.0)
            except AssertionError:
                print(logs(folder))
                raise
            yield made
        finally:
            for host in built:
                host.signal(9)
            shutil.rmtree(folder, ignore_errors=True)


def test_a_cancelled_job_keeps_its_prompts_and_resumes(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``srun`` starts four ranks on two hosts; the job after ``scancel`` goes on from there."""
    job, out = tmp_path / "job.yaml", tmp_path / "out"
    write_job(job, capsys, *MANY, "data.limit=400", *WORDS)
    first = cluster.submit(job, out)
    wait_until(
        lambda: len(outputs(out)) >= 2 or cluster.state(first) not in ("PENDING", "RUNNING"),
        "two prompts",
    )
    assert cluster.state(first) == "RUNNING", logs(cluster.folder)
    assert [len(host.workers()) >= 2 for host in cluster.hosts] == [True, True]
    cluster.run("scancel", first)
    wait_until(lambda: not any(host.workers() for host in cluster.hosts), "all ranks ended", 60.0)
    kept = outputs(out)
    assert len(kept) >= 2
    second = cluster.submit(job, out)
    wait_until(lambda: len(outputs(out)) >= len(kept) + 2, "two more prompts")
    assert outputs(out).items() >= kept.items()
    cluster.run("scancel", second)
    wait_until(lambda: not any(host.workers() for host in cluster.hosts), "all ranks ended", 60.0)
    found = outputs(out)
    one = tmp_path / "one"
    assert main(["run", *MANY, f"data.limit={len(found)}", *WORDS, f"output_dir={one}"]) == 0
    assert found == outputs(one)


def test_submitit_runs_the_jobs_of_a_sweep(cluster: Cluster, tmp_path: Path) -> None:
    """Hydra's launcher for Slurm: each job of ``-m`` is a batch job, with one process's tokens."""
    words = [*MODEL, "strategy=suffix"]
    out = tmp_path / "sweep"
    sweep = [
        *("specdec", "run", "-m", *words, "seed=0,1", f"output_dir={out}"),
        *("hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5"),
        *("hydra.launcher.cpus_per_task=1", f"hydra.launcher.submitit_folder={tmp_path / 'jobs'}"),
    ]
    done = cluster.run(sys.executable, "-m", "specdec.cli.main", *sweep[1:], seconds=180)
    assert " 0 failed" in done
    for seed in (0, 1):
        one = tmp_path / f"one{seed}"
        assert main(["run", *words, f"seed={seed}", f"output_dir={one}"]) == 0
        assert outputs(out / f"seed={seed}") == outputs(one)
    assert cluster.run("squeue", "-h") == ""
