"""DSI: blocks of one chain on copies of the target; its law, and a planted fault."""

from typing import Any

import pytest

from experiments.open.time_laws import dsi_time
from specdec.certify.certify import certify
from specdec.compose.workbench import build
from specdec.config.job import run_job_of
from specdec.executors import replicas
from tests.laws import one_class_bench
from tests.unit.test_asynchronous import decoded

pytestmark = pytest.mark.slow

BOUND = 0.05


def test_it_takes_the_time_of_its_law() -> None:
    """A copy is always free: of 3 for the present chain, as many for the dropped one, and 2."""
    bench = one_class_bench(0.8, 10.0, 2.0)
    time, _ = decoded(build("dsi", bench, lookahead=2, replicas=8), num_requests=8)
    law = dsi_time(alpha=0.8, lookahead=2, target=10.0, draft=2.0)
    assert time == pytest.approx(law, rel=BOUND)
    with pytest.raises(ValueError, match="alpha=1"):
        dsi_time(alpha=1.0, lookahead=1, target=2.0, draft=1.0)


def test_one_copy_does_not_keep_the_law() -> None:
    """A control: the blocks of one target take turns."""
    bench = one_class_bench(0.8, 10.0, 2.0)
    time, _ = decoded(build("dsi", bench, lookahead=2, replicas=1), num_requests=2)
    assert time > 1.2 * dsi_time(alpha=0.8, lookahead=2, target=10.0, draft=2.0)


def test_it_is_certified() -> None:
    """``stop_rules``: a batch of a request that had ended, and not been closed, was started."""
    words = ["strategy=dsi", "model=random", "clock=simulated", "clock.profile=swiftspec_table6"]
    checks = certify(run_job_of(words).config, checks=["cache_invariant", "stop_rules"]).checks
    assert all(check.passed for check in checks), checks


def test_a_copy_that_misses_commits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: a copy that keeps what was pruned; whichever part sees it first."""
    original: Any = replicas.TargetCopy.commit

    def forgets(self: Any, commits: Any) -> None:
        kept = [commit for commit in commits if commit.kind != "miss"]
        original(self, kept if self._rank == 2 else commits)

    monkeypatch.setattr(replicas.TargetCopy, "commit", forgets)
    words = ["strategy=dsi", "model=random", "clock=simulated", "clock.profile=swiftspec_table6"]
    checks = ["cache_invariant", "greedy_parity"]
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError, RuntimeError)):
        assert all(c.passed for c in certify(run_job_of(words).config, checks=checks).checks)
