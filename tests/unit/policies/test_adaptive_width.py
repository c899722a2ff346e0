"""The shared width follows the price of a step and the number of requests, never the tokens."""

import json
from pathlib import Path

import pytest

from specdec.cli.main import main

WORDS = ("run", "strategy=specpipe_db_adaptive", "model=synthetic", "clock=simulated")


def decoded(folder: Path, per_node_ms: float, batch_size: int = 1) -> tuple[float, list[list[int]]]:
    """Nodes per step and request, and the outputs, where each node of a step adds `per_node_ms`."""
    profile = folder / f"profile{per_node_ms}.yaml"
    profile.write_text(
        "note: of this test\n"
        "costs:\n"
        f"  stage: {{tokens: [1, 1001], ms: [30.0, {30.0 + 1000 * per_node_ms}]}}\n"
        "  draft: {tokens: [1], ms: [1.0]}\n",
        encoding="utf-8",
    )
    out = folder / f"{per_node_ms}-{batch_size}"
    size = ("executor.stages=4", "data.limit=4", "max_new_tokens=32", f"batch_size={batch_size}")
    assert main([*WORDS, *size, f"clock.profile={profile}", f"output_dir={out}"]) == 0
    found = json.loads((out / "summary.json").read_text())
    lines = sorted(
        (out / "requests.jsonl").read_text().splitlines(), key=lambda x: json.loads(x)["id"]
    )
    outputs = [json.loads(line)["output"] for line in lines]
    return found["rows_per_target_pass"] / found["mean_batch"], outputs


@pytest.mark.slow
def test_the_width_falls_with_the_price_of_a_node_and_the_number_of_requests(
    tmp_path: Path,
) -> None:
    free, outputs = decoded(tmp_path, 0.0)
    fair, same = decoded(tmp_path, 0.5)
    dear, too = decoded(tmp_path, 30.0)
    together, again = decoded(tmp_path, 0.5, batch_size=4)
    assert outputs == same == too == again
    assert free > 1.5 * fair > 1.5 * dear
    assert dear < 2.0, "a node as dear as a step is worth it only where the draft is unsure"
    assert together < 0.8 * fair
