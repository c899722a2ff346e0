"""Ranks that share layers decode the same as one process, for any degree and layout."""

from collections.abc import Callable

import pytest

from specdec.certify.certify import certify
from specdec.distributed.shared_draft import RecordingRunner
from specdec.errors import RankFailure
from tests.distributed.support import config, rejection, run, same
from tests.sampled import sampled

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def _ranks(keep_ranks: Callable[..., None]) -> None:
    keep_ranks()


@pytest.mark.parametrize(
    ("target", "draft", "sampling"),
    sampled([(2, 2, "t06"), (1, 1, "t06"), (2, 1, "greedy"), (3, 1, "t06")], every=3),
)
def test_two_groups_equal_one_process(target: int, draft: int, sampling: str) -> None:
    """Output, hits, path lengths and all other counts; 3 ranks share 2 key/value heads."""
    degrees = {"executor__target_degree": target, "executor__draft_degree": draft}
    same(config("swiftspec", 1, sampling, **degrees))


def test_the_serial_form_on_shared_ranks() -> None:
    """Draft and target use the same ranks in turn, in the order of rank 0's messages."""
    degrees = {"executor__target_degree": 2, "executor__draft_degree": 2}
    same(config("swiftspec_base", 1, executor__shared=True, **degrees))


def test_a_staged_draft_on_its_own_ranks() -> None:
    """Its caches contain a scratch tree; the other ranks replay rank 0's calls."""
    same(config("staged", 1, "t06", executor__target_degree=2, executor__draft_degree=2))


def test_pipeline_stages_of_several_ranks() -> None:
    """TP x PP: each rank of a stage sends rows to its counterpart; the last rank answers."""
    same(config("specpipe", 2, "t06", executor__target_degree=2, executor__draft_degree=2))
    same(config("specinfer", 2, executor__target_degree=2, verifier=rejection()))


def test_what_one_rank_of_a_shared_stage_tells() -> None:
    """Exits: one rank has the whole head. Hidden states: all ranks have them, one sends them."""
    head = {"model__exit_layer": 3, "model__exit_head": "transformer"}
    same(config("ppsd_tree", 2, "t06", executor__target_degree=2, **head))
    same(config("medusa", 2, "t06", executor__target_degree=2))
    same(config("eagle3", 2, "t06", executor__target_degree=2))


@pytest.mark.exhaustive
def test_a_shared_draft_keeps_its_cache() -> None:
    """Checks rank 0's share of the cache after every step."""
    degrees = {"executor__target_degree": 2, "executor__draft_degree": 2}
    values = config("swiftspec", 1, distributed=True, **degrees)
    (check,) = certify(values, checks=["cache_invariant"]).checks
    assert check.passed, check


# Last: it breaks its ranks.
def test_followers_that_miss_a_commit_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: rank 0 does not send commits. The first rank to fail is named in seconds."""
    add = RecordingRunner.add
    monkeypatch.setattr(
        RecordingRunner, "add", lambda self, name, *rest: name == "commit" or add(self, name, *rest)
    )
    degrees = {"executor__target_degree": 1, "executor__draft_degree": 2}
    with pytest.raises(RankFailure, match="rank 2"):
        run(config("swiftspec", 1, distributed=True, executor__timeout_s=20.0, **degrees))
