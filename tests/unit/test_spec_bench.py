"""Spec-Bench: all turns, answers in its format, and its formula on them gives our figures."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.data.prompt import TURN_IDS, Prompt, prompt_tokens
from specdec.data.sets import TASKS
from specdec.report.results import read_requests

pytestmark = pytest.mark.slow

QUESTIONS = [  # two tasks, one of them with two turns
    {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now in prose."]},
    {"question_id": 90, "category": "coding", "turns": ["def f(x):", "def g(x):"]},
    {"question_id": 241, "category": "translation", "turns": ["Guten Tag"]},
]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison over all turns of three questions, on a simulated clock."""
    base = tmp_path_factory.mktemp("spec_bench")
    file = base / "data" / "spec_bench" / "question.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_DATA", str(base / "data"))
        words = ["strategies=[ar,speculative]", "data=spec_bench", "data.turns=all", "repeats=1"]
        words += [f"max_new_tokens={NEW_TOKENS}", "clock=simulated", f"output_dir={base / 'out'}"]
        assert main(["compare", *words, "clock.profile=uniform_30ms"]) == 0
    return base / "out"


def answers(folder: Path, strategy: str) -> list[dict[str, Any]]:
    text = (folder / "model_answer" / f"{strategy}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_answers_have_the_format_and_all_turns(folder: Path) -> None:
    records = read_requests(folder / "requests.jsonl")
    for strategy in ("ar", "speculative"):
        found = answers(folder, strategy)
        assert [a["question_id"] for a in found] == [81, 90, 241]
        for answer, question in zip(found, QUESTIONS, strict=True):
            keys = {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
            assert answer.keys() == keys
            (choice,) = answer["choices"]
            number = len(question["turns"])  # type: ignore[arg-type]
            for key in ("turns", "decoding_steps", "new_tokens", "wall_time"):
                assert len(choice[key]) == number
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
        counted = {r.result.id: r.result for r in records if r.strategy == strategy}
        assert counted.keys() == {0, 1, 2, TURN_IDS, TURN_IDS + 1}
        assert found[1]["choices"][0]["turns"] == [counted[1].text, counted[TURN_IDS + 1].text]


def test_its_formula_on_our_answers_gives_our_speed_up(folder: Path) -> None:
    """speed.py: mean over questions of tokens / time of all turns, over that of the baseline."""

    def figures(strategy: str, task: str) -> tuple[float, float]:
        speeds, lengths = [], []
        for answer in answers(folder, strategy):
            if task == "overall" or answer["category"] in TASKS[task]:
                choice = answer["choices"][0]
                speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
                lengths += choice["accept_lengths"]
        return fmean(speeds), fmean(lengths)

    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    (ours,) = [row for row in rows if row["strategy"] == "speculative"]
    assert ours["by_category"].keys() == {"mt_bench", "translation", "overall"}
    for task, found in ours["by_category"].items():
        (speed, length), (plain, _) = figures("speculative", task), figures("ar", task)
        assert found["speedup"] == pytest.approx(speed / plain, rel=1e-6)
        assert found["accept_length"] == pytest.approx(length)
    # One token per step costs the same everywhere, so the ratio differs from 1 by the drafts alone.
    assert ours["by_category"]["overall"]["speedup"] != pytest.approx(1.0, abs=0.02)
    assert "## By category" in (folder / "comparison.md").read_text("utf-8")


def test_chat_templates_get_the_whole_dialogue() -> None:
    class Chat:
        chat_template = "x"

        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
            self.messages = messages
            return "text"

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [1]}

    tokenizer: Any = Chat()
    prompt = Prompt(0, "USER: a", "x/0", "", "a", later=(("USER: b", "b"), ("USER: c", "c")))
    prompt_tokens(prompt, tokenizer, answers=["yes"])
    said = [(m["role"], m["content"]) for m in tokenizer.messages]
    assert said == [("user", "a"), ("assistant", "yes"), ("user", "b")]
