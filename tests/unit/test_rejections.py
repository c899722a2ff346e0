"""Why draft tokens were rejected."""

from pathlib import Path

import numpy as np
import pytest

from specdec.cli.main import main
from specdec.files import parse_json
from specdec.report.results import read_requests
from specdec.report.traces import REASONS, judgements, rejection_metrics, rejections_png
from specdec.trace.recorder import _NO_PROPOSAL, Judgement, Proposal, judgement

pytestmark = pytest.mark.slow


def proposal(tokens: list[int], probs: list[float], target: list[float] | None) -> Proposal:
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.array(probs))
    return Proposal(
        tokens=np.array(tokens),
        logprobs=logprobs,
        target=None if target is None else np.array(target),
    )


class TestJudgement:
    target = (0.1, 0.2, 0.3, 0.4)

    def test_ranks_count_candidates_in_the_tree_and_not(self) -> None:
        """Taken candidates have no log probability any more: the tree's nodes have it."""
        given = proposal([3, 1, 0], [0.0, 0.3, 0.1], list(self.target))
        found = judgement(given, {3: float(np.log(0.5))}, 1)
        assert found == Judgement(
            rank=2,
            candidates=3,
            in_tree=False,
            draft_prob=0.3,
            top_prob=0.5,
            top_target_prob=0.4,
            top_target_rank=1,
        )

    def test_tokens_that_were_not_proposed(self) -> None:
        found = judgement(proposal([1], [0.5], None), {}, 2)
        assert (found.rank, found.candidates, found.draft_prob) == (0, 1, None)
        assert found.top_target_prob is None
        assert judgement(_NO_PROPOSAL, {}, 2) == Judgement(rank=0, candidates=0, in_tree=False)

    def test_the_target_ranks_the_draft_s_first_choice(self) -> None:
        found = judgement(proposal([0, 2], [0.6, 0.4], list(self.target)), {}, 3)
        assert (found.top_target_prob, found.top_target_rank) == (0.1, 4)


def test_counts_of_a_trace() -> None:
    nothing = Judgement(rank=0, candidates=0, in_tree=False)
    rows = [
        Judgement(rank=1, candidates=4, in_tree=True, draft_prob=0.9, top_prob=0.9),
        Judgement(rank=3, candidates=4, in_tree=False, draft_prob=0.1, top_prob=0.5),
        nothing._replace(candidates=4, top_prob=0.7, top_target_prob=0.2, top_target_rank=2),
        nothing,
    ]
    steps = [{"commit": {"judged": [[*one]]}} for one in rows]
    trees = {"requests": [{"steps": [*steps, {"commit": None}]}]}
    table = judgements(trees)
    assert table["reason"].tolist() == list(REASONS)
    assert table["bin"].tolist() == ["1", "3-4", "none", "none"]
    assert rejection_metrics(trees) == {
        **dict.fromkeys(("share_accepted", "share_no_room"), 0.25),
        **dict.fromkeys(("share_not_a_candidate", "share_no_proposal"), 0.25),
        "target_prob_of_rejected": pytest.approx(0.2),
        "draft_prob_of_rejected": pytest.approx(0.6),
    }
    png = rejections_png(trees, title="")
    assert png is not None
    assert png.startswith(b"\x89PNG")
    earlier = {"requests": [{"steps": [{"commit": {"kind": "hit"}}]}]}
    assert rejections_png(earlier, title="") is None
    assert rejection_metrics(earlier) == {}


@pytest.mark.parametrize(("strategy", "sampling"), [("specinfer", "t06"), ("specpipe", "greedy")])
def test_a_traced_run_agrees_with_its_counts(strategy: str, sampling: str, tmp_path: Path) -> None:
    """Tokens in the tree are the accepted ones and the hits; every decided token is judged."""
    folder = tmp_path / "t"
    words = [f"strategy={strategy}", "model=replay", f"sampling={sampling}", "data.limit=2"]
    words += ["max_new_tokens=24", "clock=simulated", "trace=true", f"output_dir={folder}"]
    assert main(["run", *words]) == 0
    found = judgements(parse_json((folder / "trees.json").read_bytes()))["reason"]
    counters = [r.result.counters for r in read_requests(folder / "requests.jsonl")]
    assert len(found) == sum(c.accepted + c.answers for c in counters)
    assert (found == next(iter(REASONS))).sum() == sum(c.accepted + c.hits for c in counters)
    assert main(["trace", str(folder)]) == 0
    assert (folder / "rejections.png").is_file()
