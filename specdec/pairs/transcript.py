"""A target that writes given texts (``model=transcript``), with or without a draft model.

Under ``verifier=match`` the tokens per pass depend only on the text that the target writes: here
that of ``data.edits`` (an agent's file edits), or of a file of prompts and completions, such as the
log of a larger model. With ``draft`` a real draft model proposes, so acceptance is exactly as
with that target. There are no probabilities of the target and no times of its own (use
``clock=simulated``).

Shape letters: T tokens of a request, n given positions.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from specdec.clocks.meter import Meter
from specdec.data.edits import chosen_turns, edits_provenance
from specdec.data.texts import Turn, read_turns, tokenized
from specdec.errors import UserError
from specdec.executors.models import A, ModelPair
from specdec.models.bundled import family_path
from specdec.models.loading import load_model, load_tokenizer, weight_bytes
from specdec.models.runner import ModelRunner
from specdec.pairs.options import Device, Dtype
from specdec.pairs.recorded import RecordedPair
from specdec.parts.fields import Count, Text, validated
from specdec.sources.synthetic import HiddenPair
from specdec.types import IntArray

EDITS = "edits"  # value of ``model.texts`` for the turns of ``data.edits``
_COPIES = "use source=suffix or source=prompt_lookup, or model=tiny or model=hf"
_DRAFT = "name its folder in model.draft, or use source=suffix or source=prompt_lookup"


class GivenTexts(HiddenPair):
    """Token sequences of requests: prompt, completion, and end-of-sequence tokens without limit."""

    def __init__(
        self, texts: list[tuple[int, IntArray, IntArray]], *, vocab_size: int, end: int
    ) -> None:
        self.vocab_size = vocab_size
        self._end = end
        self._prompts = [(i, prompt) for i, prompt, _ in texts]
        self._whole = {i: np.concatenate([prompt, text, [end]]) for i, prompt, text in texts}

    def tokens(self, request_id: int, positions: IntArray) -> IntArray:
        if request_id not in self._whole:
            raise UserError(
                f"model=transcript has no prompt {request_id}; it decodes its own prompts only"
            )
        whole = self._whole[request_id]
        inside = positions < len(whole)
        return np.where(inside, whole[np.minimum(positions, len(whole) - 1)], self._end)

    def prompts(self) -> list[tuple[int, IntArray]]:
        return self._prompts


class TranscriptModels(RecordedPair):
    hidden: GivenTexts  # without a draft's ranks
    option = "transcript"

    @validated
    def __init__(
        self,
        *,
        texts: Text = EDITS,
        subset: Text | None = None,
        tokenizer: Text | None = None,
        draft: Text | None = None,
        draft_name: Text | None = None,
        dtype: Dtype = "float32",
        device: Device = "cpu",
        num_layers: Count = 80,
    ) -> None:
        """Reads and tokenizes the texts.

        Args:
            texts: "edits", or a JSON lines file with ``prompt`` and ``completion``, or with the
                token ids ``prompt_token_ids`` and ``output_token_ids``.
            subset: one kind of turn of "edits" ("rewrite" or "resume"); None for all.
            tokenizer: folder of a model, or ``bundled:NAME``; None: the draft's tokenizer or,
                without a draft, that of ``bundled:target``.
            draft: folder of a draft model that shares the tokenizer, or ``bundled:NAME``.
            draft_name: the draft's name in latency profiles.
            num_layers: layers of the target, the largest possible number of stages.
        """
        name = tokenizer or draft or "bundled:target"
        key = "model.tokenizer" if tokenizer else "model.draft"
        tools = load_tokenizer(family_path(name, key))
        end = tools.eos_token_id
        if end is None:
            raise UserError(f"model.tokenizer={name} has no end-of-sequence token")
        turns, about = _read(texts, subset)
        tokens = [
            (i, *tokenized(turn, lambda: tools, f"model.texts={texts}: turn {i}"))
            for i, turn in enumerate(turns)
        ]
        self._draft, size, weights = None, len(tools), 0
        if draft is not None:
            folder = family_path(draft, "model.draft")
            self._draft = load_model(folder, dtype=dtype, device=device)
            size, weights = int(self._draft.config.vocab_size), weight_bytes(folder, dtype)
        most = max(int(ids.max()) for _, *parts in tokens for ids in parts)
        if most >= size:
            raise UserError(
                f"model.texts={texts} has the token {most}, but {name} has {size}: the texts are of"
                " another tokenizer; give them as text, or the draft that belongs to them"
            )
        given = GivenTexts(tokens, vocab_size=size, end=int(end))
        super().__init__(given, num_layers=num_layers, weight_bytes=(0, weights))
        self._facts = about | ({"draft": draft_name or draft} if draft else {})
        self.eos_ids = frozenset({int(end)})

    def prompts(self) -> list[tuple[int, IntArray]]:
        return self.hidden.prompts()

    def conditions(self) -> dict[str, Any]:
        note = "the target's text is given: passes and tokens are exact, times are not a target's"
        return {"sampling": "given text", "dtype": None, "replay": note, **self._facts}

    def sequences(self, model: str) -> HiddenPair:
        return ModelPair.sequences(self, model)  # type: ignore[no-any-return]  # refused: no ranks

    def artefact(self, kind: type[A], **options: Any) -> A:
        raise UserError(f"{kind.__name__} needs a model, which model=transcript has not; {_COPIES}")

    def runner(self, name: str, meter: Meter) -> ModelRunner:
        if name == "draft" and self._draft is not None:
            return ModelRunner(model=self._draft, name=name, meter=meter)
        raise UserError(f"model=transcript has no {name} model; {_DRAFT}")

    def fitted_source(self, source: Any, policy: Any) -> Any:
        return source


def _read(texts: str, subset: str | None) -> tuple[list[Turn], dict[str, Any]]:
    if texts == EDITS:
        edits = chosen_turns(subset, "model.subset")
        name = EDITS if subset is None else f"{EDITS}/{subset}"
        return [(t.prompt, t.completion) for t in edits], {"data": name, **edits_provenance()}
    if subset is not None:
        raise UserError(f"model.subset={subset} is only used by model.texts={EDITS}: leave it out")
    path = Path(texts).expanduser()
    turns = [turn for _, _, turn in read_turns(path)]
    if not turns:
        raise UserError(f"model.texts={texts} has no lines; see docs/replay.md")
    parts = (part if isinstance(part, str) else str(part.tolist()) for t in turns for part in t)
    digest = zlib.crc32("".join(parts).encode())
    return turns, {"data": path.name, "turns": len(turns), "crc32": digest}
