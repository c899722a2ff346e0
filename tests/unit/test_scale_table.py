"""The rehearsal at real shapes: its page, and how complete its results are."""

import json

import pytest

from experiments.scale.measure import SAMPLINGS, STRATEGIES
from experiments.scale.table import RESULTS, page

pytestmark = pytest.mark.fast

PAIR = {
    "shape": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 20_000},
    "draft_layers": 1, "agreement": 0.75, "target_bytes": 3_000_000, "draft_bytes": 2_000_000,
}  # fmt: skip


def _row(strategy: str, **changed: object) -> dict[str, object]:
    row = {
        "model": "some", "strategy": strategy, "sampling": "greedy", "stages": 1, "context": 512,
        "load_s": 1.25, "peak_mb": 1234, "rank_peak_mb": None, "weights_mb": 5, "cache_mb": 0.5,
        "tokens": 8, "steps": 9, "host_ms": 1.5, "share_of_12_ms": 0.111, "overhead": 0.02,
        "bytes_per_step": None, "accepted_per_pass": 1.5,
    }  # fmt: skip
    return {**row, **changed}


def test_the_page_has_a_line_per_row_in_the_order_of_the_strategies() -> None:
    """Whatever the order in which they were measured; rows of other shapes have their own table."""
    rows = [
        _row("ppsd"),
        _row("ar", stages=4, rank_peak_mb=900, bytes_per_step=2_500),
        _row("ar"),
        _row("ar", model="other", peak_mb=7),
        {**_row("best_first"), "refused": "a reason"},
    ]
    found = page(rows, {"some": PAIR})
    lines = [line for line in found.splitlines() if line.startswith("| `")]
    costs = "| 5 | 0.5 | 8 | 9 | 1.50 | 11 % | 2.0 % |"
    assert lines == [
        f"| `ar` | greedy | 1 | 512 | 1.2 | 1,234 | - {costs} - | 1.50 |",
        f"| `ppsd` | greedy | 1 | 512 | 1.2 | 1,234 | - {costs} - | 1.50 |",
        f"| `ar` | greedy | 4 | 512 | 1.2 | 1,234 | 900 {costs} 2 | 1.50 |",
    ]
    assert "vocabulary 20,000" in found
    assert "75 % of random tokens" in found
    assert "Refused: `best_first` greedy (target processes: 1, context: 512): a reason" in found


def test_the_checked_in_page_is_that_of_the_checked_in_rows() -> None:
    """Rows are those of known strategies, each measured once."""
    rows, pairs = [], {}
    for path in sorted(RESULTS.glob("*-pair.json")):
        name = path.name.removesuffix("-pair.json")
        pairs[name] = json.loads(path.read_text(encoding="utf-8"))
        lines = path.with_name(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows += [json.loads(line) for line in lines]
    assert (RESULTS / "table.md").read_text(encoding="utf-8") == page(rows, pairs)
    names = ("model", "strategy", "sampling", "stages", "context")
    keys = [tuple(row[name] for name in names) for row in rows]
    assert len(set(keys)) == len(keys)
    assert {key[1] for key in keys} <= set(STRATEGIES)
    assert {key[2] for key in keys} <= set(SAMPLINGS)
