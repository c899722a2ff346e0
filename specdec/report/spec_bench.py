"""Writes answers in the format of Spec-Bench (Xia et al. 2024), and its figures by category.

As in its script ``evaluation/speed.py``, a question's speed is the new tokens of all turns over
their wall time, the speed-up is the ratio of mean speeds over questions, and the mean accepted
tokens are over all steps of all questions. The script counts the baseline's tokens by tokenising
its text again; here the tokens of both runs are counted as they were generated.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time
from typing import Any

import pandas as pd

from specdec.data import Prompt
from specdec.data.prompt import TURN_IDS
from specdec.data.sets import TASKS
from specdec.files import write_text
from specdec.metrics.rates import acceptance_keys
from specdec.metrics.results import RequestResult, Run

Answer = dict[str, Any]
_TASK_OF = {category: task for task, categories in TASKS.items() for category in categories}


def write_answers(
    folder: Path, strategy: str, prompts: Mapping[int, Prompt], runs: Sequence[Run]
) -> list[Answer]:
    """Writes a strategy's answers, one per question, to ``model_answer/``, and returns them.

    An answer has a choice per repeat, with a request per turn; ``wall_time`` is from admission to
    the last token. Prompts without ``question_id`` are omitted; without answers no file is written.
    """
    turns: list[dict[int, list[RequestResult]]] = [{} for _ in runs]
    for questions, run in zip(turns, runs, strict=True):
        for result in sorted(run.results, key=lambda r: r.id):
            questions.setdefault(result.id % TURN_IDS, []).append(result)
    answers = [
        {
            "question_id": prompt.question_id,
            "category": prompt.category,
            "answer_id": f"{strategy}-{prompt.question_id}",
            "model_id": strategy,
            "choices": [_choice(i, questions[at]) for i, questions in enumerate(turns)],
            "tstamp": time(),
        }
        for at, prompt in prompts.items()
        if prompt.question_id is not None and all(at in questions for questions in turns)
    ]
    if answers:
        text = "".join(json.dumps(answer) + "\n" for answer in answers)
        write_text(folder / "model_answer" / f"{strategy}.jsonl", text)
    return answers


def _choice(index: int, turns: Sequence[RequestResult]) -> dict[str, Any]:
    lengths = []  # tokens emitted by each step, without those cut at the end of an answer
    for turn in turns:
        lengths += turn.counters.decided
        if turn.counters.decided:
            lengths[-1] -= turn.counters.cut_tokens
    return {
        "index": index,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [turn.counters.answers for turn in turns],
        "new_tokens": [len(turn.output) for turn in turns],
        "wall_time": [turn.emitted_s[-1] - turn.admitted_s for turn in turns],
        "accept_lengths": lengths,
        "draft_tokens": sum(turn.counters.proposed for turn in turns),
        "spec_tokens": max(max(t.counters.judged_by_depth, default=0) for t in turns),
    }


def by_category(
    answers: Sequence[Answer], baseline: Sequence[Answer] | None
) -> dict[str, dict[str, Any]]:
    """Returns figures per Spec-Bench task (other data sets: per category) and over all questions.

    ``tokens_per_s`` is a mean over questions, ``accept_length`` over steps, ``speedup`` the median
    over repeats.
    """
    table = _table(answers)
    if table.empty:
        return {}
    table["ar_speed"] = _table(baseline or ())["speed"].reindex(table.index)
    groups = [*table.groupby("task", sort=False), ("overall", table)]
    return {str(task): _figures(group) for task, group in groups}


def _table(answers: Sequence[Answer]) -> pd.DataFrame:
    counted = [answer for answer in answers if answer["category"]]
    if not counted:
        return pd.DataFrame(columns=["speed"])
    table = pd.json_normalize(counted, "choices", ["question_id", "category"])
    table["speed"] = table["new_tokens"].map(sum) / table["wall_time"].map(sum).clip(lower=1e-9)
    # SPEED-Bench, whose ids are text, has categories of the names of Spec-Bench's tasks.
    named = table["question_id"].map(lambda question: isinstance(question, str))
    table["task"] = table["category"].where(named, table["category"].replace(_TASK_OF))
    return table.set_index(["question_id", "index"])


def _figures(group: pd.DataFrame) -> dict[str, Any]:
    speeds = group.groupby("index")[["speed", "ar_speed"]].mean()
    first = group.xs(0, level="index")
    lengths = first["accept_lengths"]
    accepted = lengths.explode().dropna()
    steps = Counter(accepted.astype(int).clip(lower=1).tolist())
    means = [sum(steps) / len(steps) for steps in lengths if len(steps)]
    compared = group["ar_speed"].notna().all()
    return {
        "num_questions": len(lengths),
        "tokens_per_s": float(speeds["speed"].median()),
        "accept_length": float(accepted.mean()) if len(accepted) else None,
        # SPEED-Bench's mean over questions
        "question_accept_length": sum(means) / len(means) if means else None,
        **acceptance_keys(steps, int(first["draft_tokens"].sum()), int(first["spec_tokens"].max())),
        "speedup": float((speeds["speed"] / speeds["ar_speed"]).median()) if compared else None,
    }
