"""A target that writes given texts (``model=transcript``), for sources that read text.

Prompt lookup and suffix decoding propose from tokens alone, so their tokens per pass on a workload
depend on the text that the target writes and not on the target. Here the text is given: the turns
of ``data.edits``, or prompts and completions of a file, such as the log of a larger model. Tokens,
hits and passes are exactly those of a target that writes this text; there are no probabilities, no
draft model, and no times of its own (use ``clock=simulated``).

Shape letters: T tokens of a request, n given positions.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from specdec.clocks.meter import Meter
from specdec.data.edits import chosen_turns, edits_provenance
from specdec.data.files import read_records, text_field
from specdec.errors import UserError
from specdec.models.bundled import family_path
from specdec.models.loading import load_tokenizer
from specdec.models.runner import ModelRunner
from specdec.pairs.synthetic import HiddenModels
from specdec.parts.fields import Count, Text, validated
from specdec.sources.pair import A
from specdec.types import IntArray

EDITS = "edits"
"""Value of ``model.texts`` for the turns of ``data.edits``."""

_COPIES = "use source=suffix or source=prompt_lookup, or model=tiny or model=hf"


class GivenTexts:
    """Token sequences of requests: prompt, completion, and the end-of-sequence token for ever."""

    def __init__(
        self, texts: list[tuple[int, IntArray, IntArray]], *, vocab_size: int, end: int
    ) -> None:
        """Takes the texts.

        Args:
            texts: (id, prompt, completion) per request.
            vocab_size: of the tokenizer.
            end: token that follows each completion.
        """
        self.vocab_size = vocab_size
        self._end = end
        self._prompts = [(i, prompt) for i, prompt, _ in texts]
        self._whole = {i: np.concatenate([prompt, text, [end]]) for i, prompt, text in texts}

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        """int64[n]: tokens of a request at absolute positions.

        Raises:
            UserError: there is no such request.
        """
        if request_id not in self._whole:
            raise UserError(
                f"model=transcript has no prompt {request_id}; it decodes its own prompts only"
            )
        whole = self._whole[request_id]
        inside = positions < len(whole)
        return np.where(inside, whole[np.minimum(positions, len(whole) - 1)], self._end)

    def prompts(self) -> list[tuple[int, IntArray]]:
        """(id, int64[T]) of every prompt."""
        return self._prompts


class TranscriptModels(HiddenModels):
    """A target that writes given texts, and no draft model."""

    hidden: GivenTexts  # type: ignore[assignment]  # without a draft's ranks
    option = "transcript"

    @validated
    def __init__(
        self,
        *,
        texts: Text = EDITS,
        subset: Text | None = None,
        tokenizer: Text = "bundled:target",
        num_layers: Count = 80,
    ) -> None:
        """Reads and tokenizes the texts.

        Args:
            texts: "edits", or a JSON lines file with the fields ``prompt`` and ``completion``.
            subset: one kind of turn of "edits"; None for all.
            tokenizer: folder of a model, or ``bundled:NAME``.
            num_layers: of the target; the largest possible number of stages.

        Raises:
            UserError: texts or tokenizer that cannot be read, an empty prompt or completion.
        """
        tools = load_tokenizer(family_path(tokenizer))
        end = tools.eos_token_id
        if end is None:
            raise UserError(f"model.tokenizer={tokenizer} has no end-of-sequence token")
        pairs, facts = _read(texts, subset)
        tokenized = []
        for index, (prompt, completion) in enumerate(pairs):
            ids = [np.array(tools(text)["input_ids"], np.int64) for text in (prompt, completion)]
            if not len(ids[0]) or not len(ids[1]):
                raise UserError(f"model.texts={texts}: prompt or completion {index} has no tokens")
            tokenized.append((index, ids[0], ids[1]))
        given = GivenTexts(tokenized, vocab_size=len(tools), end=int(end))
        super().__init__(pair=given, num_layers=num_layers)  # type: ignore[arg-type]
        self._facts = facts
        self.eos_ids = frozenset({int(end)})

    def prompts(self) -> list[tuple[int, IntArray]]:
        """(id, int64[T]) of every prompt, in the order of the texts; in place of ``data=``."""
        return self.hidden.prompts()

    def conditions(self) -> dict[str, Any]:
        """Conditions in place of the configuration's: the text is given, whatever the sampling."""
        note = "the target's text is given: passes and tokens are exact, times are not a target's"
        return {"sampling": "given text", "dtype": None, "replay": note, **self._facts}

    def artefact(self, kind: type[A], **options: Any) -> A:
        """Raises ``UserError``: there are no weights."""
        raise UserError(f"{kind.__name__} needs a model, which model=transcript has not; {_COPIES}")

    def runner(self, name: str, meter: Meter) -> ModelRunner:
        """Raises ``UserError``: there is no model."""
        raise UserError(f"model=transcript has no {name} model; {_COPIES}")

    def fitted_source(self, source: Any, policy: Any) -> Any:
        """The source node, unchanged: there is no draft model, which ``runner`` says."""
        return source


def _read(texts: str, subset: str | None) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """(prompt, completion) pairs, and facts about them."""
    if texts == EDITS:
        turns = chosen_turns(subset, "model.subset")
        name = EDITS if subset is None else f"{EDITS}/{subset}"
        return [(t.prompt, t.completion) for t in turns], {"data": name, **edits_provenance()}
    if subset is not None:
        raise UserError(f"model.subset={subset} is only used by model.texts={EDITS}: leave it out")
    path = Path(texts).expanduser()
    hint = "each line needs the fields prompt and completion"
    pairs = [
        (
            text_field(fields, "prompt", where=f"{path.name} line {number}", hint=hint),
            text_field(fields, "completion", where=f"{path.name} line {number}", hint=hint),
        )
        for number, fields in read_records(path)
    ]
    if not pairs:
        raise UserError(f"model.texts={texts} has no lines; {hint}")
    digest = zlib.crc32("".join(map("".join, pairs)).encode())
    return pairs, {"data": path.name, "turns": len(pairs), "crc32": digest}
