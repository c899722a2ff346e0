"""Groups of ranks that share layers decode what one process does: any degree, any layout."""

from __future__ import annotations

import pytest

from tests.distributed.support import config, rejection, same

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("target", "draft", "sampling"),
    [(1, 1, "t06"), (2, 1, "greedy"), (3, 1, "t06"), (2, 2, "t06")],
)
def test_two_groups_equal_one_process(target: int, draft: int, sampling: str) -> None:
    """Output, hits, path lengths and every other count; 3 ranks have 2 key/value heads to share."""
    degrees = {"executor__target_degree": target, "executor__draft_degree": draft}
    same(config("swiftspec", 1, sampling, **degrees))


def test_the_serial_form_on_shared_ranks() -> None:
    """The draft's ranks are the target's: they take turns, in the order of rank 0's messages."""
    degrees = {"executor__target_degree": 2, "executor__draft_degree": 2}
    same(config("swiftspec_base", 1, executor__shared=True, **degrees))


def test_pipeline_stages_of_several_ranks() -> None:
    """TP x PP: rows go from each rank of a stage to its like in the next; the last one answers."""
    same(config("specpipe", 2, "t06", executor__target_degree=2, executor__draft_degree=2))
    same(config("specinfer", 2, executor__target_degree=2, verifier=rejection()))
