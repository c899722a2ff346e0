"""Paced time over real processes against simulated time in one."""

import json
from pathlib import Path

import pytest

from specdec.cli.main import main

COMMON = [
    "run",
    "strategy=specpipe",
    "policy.width=4",
    "policy.children=3",
    "executor.stages=3",
    "model=random",
    "data.limit=2",
    "max_new_tokens=6",
    "sampling=t08",
    "clock.scale=3",
    "trace=true",
    "logger=none",
]
PROFILE = """\
note: of this test; long enough that a busy machine keeps the pace
costs:
  stage: {tokens: [1, 8], ms: [20.0, 24.0]}
  head: {tokens: [1], ms: [5.0]}
  draft: {tokens: [1], ms: [8.0]}
  prune: {tokens: [1], ms: [4.0]}
  transfer: {tokens: [1], ms: [3.0]}
"""
SAME = (
    *("steps", "steps_per_token", "hit_rate", "target_passes", "target_rows", "draft_passes"),
    *("flush_steps", "refill_steps", "fill_steps", "answers", "wasted_nodes", "path_lengths"),
)


@pytest.mark.distributed
@pytest.mark.slow
def test_paced_ranks_do_what_the_simulator_says(tmp_path: Path) -> None:
    """Identical tokens, hits, steps and pieces of work, none of them faster than the profile.

    When an answer reaches rank 0 within a step is the machine's affair.
    """
    profile = tmp_path / "profile.yaml"
    profile.write_text(PROFILE, encoding="utf-8")
    kinds = {"simulated": "in_process", "paced": "distributed"}
    for kind, transport in kinds.items():
        words = [f"clock={kind}", f"executor.transport={transport}", f"clock.profile={profile}"]
        assert main([*COMMON, *words, f"output_dir={tmp_path / kind}"]) == 0
    found = {kind: json.loads((tmp_path / kind / "summary.json").read_text()) for kind in kinds}
    outputs = {
        kind: [
            json.loads(line)["output"]
            for line in (tmp_path / kind / "requests.jsonl").read_text().splitlines()
        ]
        for kind in kinds
    }
    assert outputs["paced"] == outputs["simulated"]
    assert {key: found["paced"][key] for key in SAME} == {
        key: found["simulated"][key] for key in SAME
    }
    assert found["paced"]["clock"] == "paced"
    busy = {kind: busy_s(summary) for kind, summary in found.items()}
    assert set(busy["paced"]) == {"1", "2", "3"}
    for rank, seconds in busy["simulated"].items():
        assert busy["paced"][rank] >= seconds - 1e-6, "every piece takes what the profile says"
    assert found["paced"]["overrun_share"] is not None
    assert found["paced"]["bytes_sent_per_step"] > 0
    works = {kind: work(tmp_path / kind) for kind in kinds}
    assert works["paced"] == works["simulated"], "rank by rank the same work, level by level"


def busy_s(summary: dict) -> dict[str, float]:
    """Seconds of work per rank, from the shares of time without."""
    return {rank: (1 - b) * summary["clock_s"] for rank, b in summary["bubble_share"].items()}


def work(folder: Path) -> dict[str, list]:
    """Per rank, what it did: kind, step, level, tokens, in order of time."""
    found: dict[str, list] = {}
    for event in json.loads((folder / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == "compute":
            args = event["args"]
            what = (event["name"], args["step"], args.get("level"), args["tokens"])
            found.setdefault(str(event["tid"]), []).append(what)
    return found
