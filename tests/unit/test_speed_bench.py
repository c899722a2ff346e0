"""SPEED-Bench as data: its rows, categories and placeholders, and acceptance by category."""

import json
from pathlib import Path

import pytest

from specdec.data import Request, load_prompts
from specdec.errors import UserError
from specdec.report.spec_bench import by_category

ROWS = [
    {"question_id": "a", "category": "coding", "turns": ["def f(x):", "def g(x):"]},
    {"question_id": "b", "category": "writing", "turns": ["Write a poem."]},
    {"question_id": "c", "category": "coding", "turns": ["def h(x):"]},
]
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def written(folder: Path, rows: list[dict[str, object]]) -> str:
    path = folder / "qualitative.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_turns_and_categories(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    prompts = list(load_prompts(Request.of(name="speed_bench", path=path, turns="all")))
    assert [(p.question_id, p.category) for p in prompts] == [
        ("a", "coding"),
        ("b", "writing"),
        ("c", "coding"),
    ]
    assert prompts[0].message == "def f(x):"
    assert len(prompts[0].later) == 1
    coding = list(load_prompts(Request.of(name="speed_bench", path=path, subset="coding")))
    assert [(p.id, p.question_id) for p in coding] == [(0, "a"), (2, "c")]  # ids of the whole set


def test_placeholders_are_refused_where_they_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, [*ROWS, {"question_id": "d", "category": "rag", "turns": [MASKED]}])
    assert len(list(load_prompts(Request.of(name="speed_bench", path=path, subset="coding")))) == 2
    with pytest.raises(UserError, match=r"line 4 is a placeholder.*prepare_data"):
        list(load_prompts(Request.of(name="speed_bench", path=path, subset="rag")))


def test_acceptance_by_category_has_vllms_keys() -> None:
    """Bucket j counts steps with j accepted drafts; questions weigh alike in their own mean."""

    def answer(name: str, category: str, lengths: list[int]) -> dict[str, object]:
        choice = {"index": 0, "new_tokens": [sum(lengths)], "wall_time": [1.0]}
        choice |= {"accept_lengths": lengths, "draft_tokens": 4 * len(lengths), "spec_tokens": 4}
        return {"question_id": name, "category": category, "choices": [choice]}

    answers = [
        answer("a", "coding", [1, 3, 3]),
        answer("b", "writing", [1]),
        answer("c", "coding", [2]),
    ]
    found = by_category(answers, None)
    coding = {name: found["coding"][name] for name in found["coding"] if name != "speedup"}
    assert coding.pop("acceptance_histogram") == [1, 1, 2]
    expected = {"num_questions": 2, "tokens_per_s": 4.5, "num_spec_steps": 4, "num_spec_tokens": 4}
    expected |= {"num_draft_tokens": 16, "num_accepted_draft_tokens": 5, "accept_length": 9 / 4}
    expected |= {"mean_acceptance_length": 9 / 4, "draft_acceptance_rate": 5 / 16}
    assert coding == pytest.approx(expected | {"question_accept_length": (7 / 3 + 2) / 2})
    assert found["writing"]["acceptance_histogram"] == [1]
    assert found["overall"]["num_spec_steps"] == 5
