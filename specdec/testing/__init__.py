"""The checks of `specdec verify`, for tests of parts outside this library (docs/verify.md).

    from specdec.testing import assert_lossless, assert_lossless_parts

    def test_my_preset():
        assert_lossless(["strategy=mine"], config_dirs=["conf"])

    def test_my_policy():
        assert_lossless_parts(lambda bench: bench.parts(source=..., policy=..., verifier=...))

``check_source``, ``check_policy`` and ``check_executor`` test one part alone. The building blocks
of the checks are exported too: a reference decoder that is independent of the decode loop
(``Oracle``, ``plain_decode``), test requests (``Case``), the exact distributions of table models,
and observers of caches while a strategy runs.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.api import verify as certify_overrides
from specdec.certify import CHECKS, Check, Report
from specdec.certify.cases import Case, ending_cases, parity_cases
from specdec.certify.certify import certify
from specdec.certify.invariants import Fresh, Watch
from specdec.certify.laws import FALSE_ALARM, OPPOSED_TABLE, TARGET_TABLE, log_evidence
from specdec.certify.oracle import Oracle, plain_decode, reference_probs, reference_token
from specdec.certify.subject import Decoded, Subject, decode_cases, decode_steps
from specdec.compose.workbench import Parts, Workbench
from specdec.pairs import ModelPair, RandomPair, TablePair
from specdec.testing.contracts import check_executor, check_policy, check_source

__all__ = [
    "CHECKS",
    "FALSE_ALARM",
    "OPPOSED_TABLE",
    "TARGET_TABLE",
    "Case",
    "Check",
    "Decoded",
    "Fresh",
    "Oracle",
    "RandomPair",
    "Report",
    "Subject",
    "TablePair",
    "Watch",
    "assert_lossless",
    "assert_lossless_parts",
    "certify_parts",
    "check_executor",
    "check_policy",
    "check_source",
    "decode_cases",
    "decode_steps",
    "ending_cases",
    "log_evidence",
    "parity_cases",
    "plain_decode",
    "reference_probs",
    "reference_token",
]


def assert_lossless(
    overrides: Sequence[str],
    *,
    config_dirs: Sequence[str | Path] = (),
    checks: Sequence[str] | None = None,
) -> Report:
    """Certifies a configuration (``overrides`` as for ``specdec verify``) by all checks or those
    named, and returns the report; AssertionError: the failed checks with their details.
    """
    return _asserted(certify_overrides(overrides, config_dirs=config_dirs, checks=checks))


def assert_lossless_parts(
    build: Callable[[Workbench], Parts], *, seed: int = 0, checks: Sequence[str] | None = None
) -> Report:
    """Certifies parts composed in Python and returns the report.

    ``build`` makes new parts from a workbench; it is called several times, with different models.
    ``checks`` default to all that need no configured model. AssertionError: as for
    ``assert_lossless``.
    """
    return _asserted(certify_parts(build, seed=seed, checks=checks))


def certify_parts(
    build: Callable[[Workbench], Parts], *, seed: int = 0, checks: Sequence[str] | None = None
) -> Report:
    """Like ``assert_lossless_parts``, but returns the report even if a check failed."""

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
