"""Prompts with the text that a model wrote after them, as text or as token ids, from JSON lines."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.data.files import read_records
from specdec.errors import UserError

_IDS = ("prompt_token_ids", "output_token_ids")
_TEXTS = ("prompt", "completion")

IntArray = npt.NDArray[np.int64]
Turn = tuple[str, str] | tuple[IntArray, IntArray]
"""Prompt and completion, as text or as token ids int64[T]."""


def read_turns(path: Path) -> Iterator[tuple[str, dict[str, Any], Turn]]:
    for number, entry in read_records(path):
        where = f"{path} line {number}"
        yield where, entry, turn_of(entry, where)


def turn_of(entry: dict[str, Any], where: str) -> Turn:
    if all(key in entry for key in _IDS):
        prompt, output = (_token_ids(entry[key], f"{where}: {key}") for key in _IDS)
        return prompt, output
    if all(isinstance(entry.get(key), str) for key in _TEXTS):
        return entry["prompt"], entry["completion"]
    raise UserError(f"{where} needs {' and '.join(_IDS)}, or {' and '.join(_TEXTS)}")


def tokenized(turn: Turn, tokenizer: Callable[[], Any], where: str) -> tuple[IntArray, IntArray]:
    """Returns prompt and completion of a turn as int64[T] each; ``tokenizer`` loads the tokenizer
    and is called only for text.
    """
    prompt, output = turn
    if isinstance(prompt, str):
        tools = tokenizer()
        prompt = np.array(tools(prompt)["input_ids"], np.int64)
        output = np.array(tools(output, add_special_tokens=False)["input_ids"], np.int64)
    assert not isinstance(output, str), "both parts are text, or neither"
    if not len(prompt) or not len(output):
        raise UserError(f"{where} has an empty prompt or output")
    return prompt, output


def _token_ids(values: Any, where: str) -> IntArray:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise UserError(f"{where} is not a list of token ids")
    return np.array(values, np.int64)
