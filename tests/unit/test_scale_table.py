"""The rehearsal at real shapes: its page, and how complete its results are."""

import json

import pytest

from experiments.scale.measure import SAMPLINGS, STRATEGIES
from experiments.scale.table import RESULTS, page

pytestmark = pytest.mark.fast


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
