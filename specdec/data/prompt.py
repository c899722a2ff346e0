from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specdec.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_DATE = "01 Jan 2025"
"""Date for chat templates that contain one, so that prompts are the same every day."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. Random numbers of decoding depend on its ``id``: the index in the whole data set,
    whatever limit, order and subset. In data set ``mixed``, ids of its set s start at 1,000,000 s.
    """

    id: int
    text: str  # for a base model, within the set's template
    name: str  # short and unique in the data set ("humaneval/17")
    source: str  # origin of the text ("json/decoder.py:JSONDecoder.decode", "line 3")
    message: str = ""  # for a model with a chat template; if empty, ``text`` is used
    later: tuple[tuple[str, ...], ...] = ()  # (text, message) of each further turn of a dialogue
    question_id: int | str | None = None  # as in the set's file
    category: str = ""  # likewise


class DataReader(ABC):
    """Base class of readers of data sets outside this library (``data=`` with ``_target_``).

    Limit, sample, chat template and lengths of ``data=`` are applied afterwards.
    """

    @abstractmethod
    def prompts(self) -> Iterable[Prompt]:
        """Returns prompts with different ids, in the data set's order; UserError for a missing file
        or an unreadable record. Called twice: for the first prompt before a run, and in the run.
        """

    def provenance(self) -> dict[str, Any]:
        """Returns facts on the data set's origin, for ``provenance.json``, as JSON values."""
        return {}


TURN_IDS = 1_000_000_000
"""Turn t of a dialogue is decoded under the prompt's id plus t times this number."""


def prompt_tokens(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: str = "auto",
    answers: Sequence[str] = (),
) -> npt.NDArray[np.int64]:
    """Tokenizes a prompt, or its dialogue up to the turn after ``answers``, as int64[T].

    ``chat``: "auto" applies the tokenizer's chat template to the message if it has one, "never"
    uses the text, "always" refuses a tokenizer without a template.
    """
    turns = [(prompt.text, prompt.message or prompt.text), *prompt.later][: len(answers) + 1]

    def ids(text: str, **options: Any) -> npt.NDArray[np.int64]:
        return np.asarray(tokenizer(text, verbose=False, **options)["input_ids"], np.int64)

    if chat == "never" or (chat == "auto" and not tokenizer.chat_template):
        before = [f"{text}{reply}" for (text, _), reply in zip(turns, answers, strict=False)]
        return ids("\n".join([*before, turns[-1][0]]))
    if not tokenizer.chat_template:
        raise UserError("data.chat=always, but this model has no chat template: use data.chat=auto")
    contents = chain.from_iterable(zip_longest((message for _, message in turns), answers))
    roles = cycle(("user", "assistant"))
    said = zip(roles, contents, strict=False)
    messages = [{"role": role, "content": text} for role, text in said if text is not None]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string=CHAT_DATE
        )
    except Exception as error:  # the template's code may raise anything
        raise UserError(
            f"the model's chat template cannot be applied to {prompt.name} ({error});"
            " data.chat=never uses the plain text"
        ) from error
    return ids(text, add_special_tokens=False)  # the template includes them


def fit_prompt(
    tokens: npt.ArrayLike, *, max_len: int, truncation: str = "left", label: str = "prompt"
) -> tuple[npt.NDArray[np.int64], int]:
    """Truncates a tokenized prompt; returns at most ``max_len`` tokens, int64[T], and the number
    dropped. ``truncation``: "left" drops the first, "error" is a UserError that names ``label``.
    """
    row = np.asarray(tokens, np.int64)
    if row.ndim != 1 or not len(row):
        raise UserError(f"{label} has no tokens; give at least one (such as the BOS token)")
    if max_len < 1:
        raise UserError(f"max_new_tokens leaves no room for {label}: lower max_new_tokens")
    cut = max(0, len(row) - max_len)
    if cut and truncation == "error":
        raise UserError(
            f"{label} has {len(row)} tokens but only {max_len} fit beside max_new_tokens; shorten"
            " it, lower max_new_tokens, or use data.truncation=left to drop its oldest tokens"
        )
    return row[cut:].copy(), cut
