"""Writes answers in the format of Spec-Bench (Xia et al. 2024), and its figures by category.

As in its script ``evaluation/speed.py``, a question's speed is the new tokens of all turns over
their wall time, the speed-up is the ratio of mean speeds over questions, and the mean accepted
tokens are over all steps of all questions. The script counts the baseline's tokens by tokenising
its text again; here both are counted as they were generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from time import time
from typing import Any

from specdec.data import Prompt
from specdec.data.prompt import TURN_IDS
from specdec.data.sets import TASKS
from specdec.files import write_text
from specdec.metrics.results import RequestResult

ANSWERS_FOLDER = "model_answer"
"""Subfolder of a run or comparison, with a file ``<strategy>.jsonl`` per strategy."""

OVERALL = "overall"

Answer = dict[str, Any]
_TASK_OF = {category: task for task, categories in TASKS.items() for category in categories}


def answers_of(
    prompts: Mapping[int, Prompt],
    repeats: Sequence[Sequence[RequestResult]],
    strategy: str,
    decode: Callable[[Sequence[int]], str],
) -> list[Answer]:
    """Builds a strategy's answers, one per question, with a choice per repeat.

    ``wall_time`` is the time from admission to the last token by the run's clock, prefill included.

    Args:
        prompts: prompt id -> prompt; those without ``question_id`` have no answer.
        repeats: finished requests of each repeat; each turn of a dialogue is a request.
        strategy: the ``model_id`` of the answers.
        decode: token ids -> text without special tokens.
    """
    turns: list[dict[int, list[RequestResult]]] = []
    for results in repeats:
        found: dict[int, list[RequestResult]] = {}
        for result in sorted(results, key=lambda r: r.id):
            found.setdefault(result.id % TURN_IDS, []).append(result)
        turns.append(found)
    return [
        {
            "question_id": prompt.question_id,
            "category": prompt.category,
            "answer_id": f"{strategy}-{prompt.question_id}",
            "model_id": strategy,
            "choices": [_choice(i, found[at], decode) for i, found in enumerate(turns)],
            "tstamp": time(),
        }
        for at, prompt in prompts.items()
        if prompt.question_id is not None and all(at in found for found in turns)
    ]


def write_answers(folder: Path, strategy: str, answers: Sequence[Answer]) -> Path | None:
    """Writes one answer per line; without answers it writes no file and returns None."""
    if not answers:
        return None
    text = "".join(json.dumps(answer) + "\n" for answer in answers)
    return write_text(folder / ANSWERS_FOLDER / f"{strategy}.jsonl", text)


def by_category(
    answers: Sequence[Answer], baseline: Sequence[Answer] | None
) -> dict[str, dict[str, Any]]:
    """Returns figures per Spec-Bench task, or per category of other sets, and over all questions.

    Args:
        baseline: answers of plain decoding; None for no ratio.

    Returns:
        Category -> ``num_questions``; ``tokens_per_s``, a mean over questions; ``accept_length``,
        a mean over steps; ``speedup`` over the baseline, the median over repeats. Empty without
        categories.
    """
    plain = {answer["question_id"]: answer for answer in baseline or ()}
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        category: str | None = answer["category"]
        if category:
            groups.setdefault(task_of(category), []).append(answer)
    if groups:
        groups[OVERALL] = [answer for group in groups.values() for answer in group]
    return {name: _figures(group, plain) for name, group in groups.items()}


def task_of(category: str) -> str:
    """Returns Spec-Bench's task of a category; categories of other sets are unchanged."""
    return _TASK_OF.get(category, category)


def _choice(
    index: int, turns: Sequence[RequestResult], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    return {
        "index": index,
        "turns": [decode(turn.output) for turn in turns],
        "decoding_steps": [turn.counters.answers for turn in turns],
        "new_tokens": [len(turn.output) for turn in turns],
        "wall_time": [turn.emitted_s[-1] - turn.admitted_s for turn in turns],
        "accept_lengths": [length for turn in turns for length in _lengths(turn)],
    }


def _lengths(turn: RequestResult) -> list[int]:
    """Returns the tokens emitted by each step, without those cut at the end of the answer."""
    lengths = list(turn.counters.decided)
    if lengths:
        lengths[-1] -= turn.counters.cut_tokens
    return lengths


def _figures(answers: Sequence[Answer], plain: Mapping[Any, Answer]) -> dict[str, Any]:
    num_repeats = len(answers[0]["choices"])
    speeds = [_speed(answers, repeat) for repeat in range(num_repeats)]
    lengths = [n for answer in answers for n in answer["choices"][0]["accept_lengths"]]
    compared = [plain[a["question_id"]] for a in answers if a["question_id"] in plain]
    ratios = []
    if len(compared) == len(answers):
        ratios = [speeds[repeat] / _speed(compared, repeat) for repeat in range(num_repeats)]
    return {
        "num_questions": len(answers),
        "tokens_per_s": median(speeds),
        "accept_length": fmean(lengths) if lengths else None,
        "speedup": median(ratios) if ratios else None,
    }


def _speed(answers: Sequence[Answer], repeat: int) -> float:
    """Mean over questions of new tokens per second, all turns of a question together."""
    choices = [answer["choices"][repeat] for answer in answers]
    return fmean(sum(c["new_tokens"]) / max(sum(c["wall_time"]), 1e-9) for c in choices)
