"""``--cfg`` and ``--info`` print a configuration, or what Hydra knows about it, and run nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from specdec.cli.arguments import Arguments
from specdec.config.folders import as_yaml
from specdec.config.hydra import compose_raw, search_path
from specdec.config.options import config_dir
from specdec.errors import UserError

Make = Callable[[Sequence[str], Sequence[Path]], Mapping[str, Any]]


def show_config(
    arguments: Arguments, make: Make, jobs: Sequence[Sequence[str]] | None = None, *, name: str
) -> int:
    """Prints the configuration of every job as a YAML document; returns exit status 0.

    ``--cfg job`` prints the checked configuration. If that is invalid, it prints the composed one,
    and the error on standard error. ``--cfg hydra`` prints Hydra's own node, ``--cfg all`` both.

    Args:
        make: (overrides, trees) -> the checked configuration; may raise ``UserError``.
        jobs: overrides of each job of a sweep; None for a single job.
    """
    for overrides in [arguments.overrides] if jobs is None else jobs:
        if jobs is not None:
            print(f"---\n# {' '.join(overrides)}")
        print(_text(arguments, make, overrides, name), end="")
    return 0


def _text(arguments: Arguments, make: Make, overrides: Sequence[str], name: str) -> str:
    try:
        if arguments.cfg == "job":
            return as_yaml(make(without_hydra(overrides), arguments.config_dirs))
    except UserError as error:
        reason = f"note: this configuration cannot be run: {error}"
    else:
        reason = ""
    raw = compose_raw(overrides, name=name, extra=arguments.config_dirs)
    if reason:
        print(reason, file=sys.stderr)
    wanted = {"job": [False], "hydra": [True], "all": [False, True]}[arguments.cfg]
    keys = [str(key) for key in raw if (key == "hydra") in wanted]
    return OmegaConf.to_yaml(OmegaConf.masked_copy(raw, keys))


def show_info(arguments: Arguments) -> int:
    """Prints what ``--info`` asks Hydra for: defaults list, plugins, search path or all."""
    with command_line("specdec run", "--info", arguments.info, *arguments.overrides):
        run_hydra(lambda _: None, arguments.config_dirs)
    return 0


def run_hydra(task: Callable[[DictConfig], None], extra: Sequence[Path]) -> None:
    """Runs ``hydra.main`` with the arguments in ``sys.argv`` and further trees to search."""
    sys.argv += search_path(extra)
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(task)()


def without_hydra(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of the job itself, without those of Hydra's own node."""
    return [o for o in overrides if not o.lstrip("+~").startswith(("hydra.", "hydra/"))]


@contextmanager
def command_line(*words: str) -> Iterator[None]:
    """Replaces ``sys.argv`` in the block, since ``hydra.main`` reads it."""
    before = sys.argv
    sys.argv = list(words)
    try:
        yield
    finally:
        sys.argv = before
