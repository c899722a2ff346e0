from pathlib import Path
from pkgutil import resolve_name

from specdec.cli.arguments import Arguments
from specdec.cli.execute import execute
from specdec.config.job import Job
from specdec.config.options import BASES, read_yaml
from specdec.errors import UserError
from specdec.parts.build import locate

HELP = """\
specdec worker CONFIG OUTPUT_DIR

One rank of a distributed job. torchrun or srun starts this command with the same arguments once per
rank: rank 0 decodes, with the draft model, and writes the run folder; ranks 1, 2, ... are the
stages. There must be one rank more than stages. CONFIG is a resolved configuration:

  specdec run --cfg strategy=specpipe executor.stages=3 executor.transport=distributed > job.yaml

  torchrun --nproc-per-node 4 -m specdec.cli.main worker job.yaml outputs/job

On one machine `specdec run executor.transport=distributed` starts its ranks itself;
docs/distributed.md shows several machines and Slurm.
"""


def main(arguments: Arguments) -> int:
    if len(arguments.overrides) != 2:
        raise UserError("specdec worker takes two arguments, CONFIG and OUTPUT_DIR: see --help")
    path, folder = map(Path, arguments.overrides)
    remedy = "give what `specdec run --cfg` prints, or the config.yaml of a run folder"
    config = read_yaml(path, f"{path} cannot be read", remedy)
    if not isinstance(config, dict) or not {"strategy", "choices"} <= config.keys():
        raise UserError(f"{path} is not a resolved configuration: {remedy}")
    for section, base in BASES.items():  # a class of another kind must not be called
        node = config.get(section)
        if base and isinstance(node, dict) and "_target_" in node:
            locate(node["_target_"], section, resolve_name(base))
    transport = config.get("executor", {}).get("transport")
    if transport != "distributed":
        raise UserError(f"{path} has executor.transport={transport}: ranks need distributed")
    job = Job(str(config["strategy"]["name"]), config, str(folder))
    from specdec.distributed.torchrun import run_under_launcher

    return run_under_launcher(
        lambda: execute(job, folder),
        threads=config.get("threads"),
        timeout_s=config["executor"].get("timeout_s"),
    )
