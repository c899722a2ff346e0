"""Assertions that a configuration, or parts composed in Python, are lossless."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.api import verify as certify_overrides
from specdec.certify import Report
from specdec.certify.certify import certify
from specdec.compose.workbench import Parts, Workbench
from specdec.pairs import ModelPair


def assert_lossless(
    overrides: Sequence[str],
    *,
    config_dirs: Sequence[str | Path] = (),
    checks: Sequence[str] | None = None,
) -> Report:
    """Certifies a configuration (``overrides`` as for ``specdec verify``) and returns the report.
    ``checks`` default to all. Raises AssertionError with the details of the failed checks.
    """
    return _asserted(certify_overrides(overrides, config_dirs=config_dirs, checks=checks))


def assert_lossless_parts(
    build: Callable[[Workbench], Parts], *, seed: int = 0, checks: Sequence[str] | None = None
) -> Report:
    """Certifies parts composed in Python and returns the report.

    ``build`` makes new parts from a workbench; it is called several times, with different models.
    ``checks`` default to all that need no configured model. Raises AssertionError with the details
    of the failed checks.
    """
    return _asserted(certify_parts(build, seed=seed, checks=checks))


def certify_parts(
    build: Callable[[Workbench], Parts], *, seed: int = 0, checks: Sequence[str] | None = None
) -> Report:
    """Runs the checks of ``assert_lossless_parts``; returns the report even if a check failed."""

    def built(cfg: Mapping[str, Any], pair: ModelPair) -> Parts:
        return build(Workbench(pair, seed=int(cfg["seed"])))

    cfg = {
        "strategy": {"name": "parts", "kind": "parts"},
        "executor": {},
        "clock": {"kind": "measured"},
        "model": {"kind": "none"},
        "sampling": {},
        "seed": seed,
        "batch_size": 1,
    }
    return certify(cfg, build=built, checks=checks)


def _asserted(report: Report) -> Report:
    lines = [f"{c.name}: {c.detail}" for c in report.checks if c.passed is False]
    assert report.lossless, "\n".join([report.verdict, *lines])
    return report
