"""Where the jobs of a sweep run: in turn, side by side (joblib), or on a cluster (submitit)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from hydra.core.override_parser.types import Override

from specdec.errors import UserError

_PLUGINS = {
    "joblib": ("hydra_joblib_launcher", "joblib"),
    "submitit_local": ("hydra_submitit_launcher", "submitit"),
    "submitit_slurm": ("hydra_submitit_launcher", "submitit"),
}
"""Launcher -> Hydra plugin, and the extra of this package that installs it."""

SIDE_BY_SIDE = ("joblib", "submitit_local")
"""Launchers whose jobs share this machine."""


def check_launcher(overrides: Sequence[Override]) -> None:
    """Checks that the plugin of a launcher is installed.

    Raises:
        UserError: ``hydra/launcher=`` names a launcher whose plugin is not installed.
    """
    for override in overrides:
        name = str(override.value()) if override.key_or_group == "hydra/launcher" else ""
        if name not in _PLUGINS:
            continue
        plugin, extra = _PLUGINS[name]
        if not _installed(plugin):
            raise UserError(
                f"hydra/launcher={name} needs the package {plugin.replace('_', '-')}, which is not"
                f" installed: run pip install 'specdec-lab[{extra}]', or leave it out to run the"
                " jobs one after the other"
            )


def _installed(plugin: str) -> bool:
    try:
        return importlib.util.find_spec(f"hydra_plugins.{plugin}") is not None
    except ModuleNotFoundError:  # no plugin at all
        return False
