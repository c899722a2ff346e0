"""``data.turns=all``: later turns of dialogues are decoded after the strategy's own answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.data import fit_prompt, prompt_tokens
from specdec.data.prompt import TURN_IDS
from specdec.pairs import ModelPair
from specdec.report.requests import RequestRecord
from specdec.runs.runners import TokenPrompt


class Dialogues:
    """Makes the prompt of a turn from the turns before it.

    ``prompts`` has every later turn made so far, by (strategy, id).
    """

    def __init__(self, cfg: Mapping[str, Any], pair: ModelPair) -> None:
        self.prompts: dict[tuple[str, int], TokenPrompt] = {}
        self._data, self._tokenizer = cfg["data"], pair.tokenizer
        self._all = self._data.get("turns", "first") == "all"
        room = None if pair.max_positions is None else pair.max_positions - cfg["max_new_tokens"]
        bounds = [b for b in (room, self._data.get("max_prompt_tokens")) if b is not None]
        self._longest = min(bounds, default=None)

    def num_turns(self, prompt: TokenPrompt) -> int:
        return 1 + (len(prompt.source.later) if self._all and prompt.source is not None else 0)

    def after(
        self, strategy: str, prompt: TokenPrompt, done: Mapping[int, RequestRecord]
    ) -> TokenPrompt | None:
        """Returns the turn after ``prompt``, or None after the last.

        ``done`` has the finished requests of this strategy and repeat by id.
        """
        turn, first = divmod(prompt.id, TURN_IDS)
        if turn + 1 >= self.num_turns(prompt):
            return None
        source, tokenizer = prompt.source, self._tokenizer
        assert source is not None and tokenizer is not None, "data= has a tokenizer"  # noqa: PT018
        tokens = prompt_tokens(
            source,
            tokenizer,
            chat=self._data["chat"],
            answers=[
                str(tokenizer.decode(done[first + t * TURN_IDS].result.output, **_PLAIN))
                for t in range(turn + 1)
            ],
        )
        tokens, _ = fit_prompt(
            tokens,
            max_len=len(tokens) if self._longest is None else self._longest,
            truncation=self._data["truncation"],
            label=f"turn {turn + 2} of prompt {first} of data={self._data['name']}",
        )
        made = TokenPrompt(prompt.id + TURN_IDS, tokens, source)
        self.prompts[strategy, made.id] = made
        return made


_PLAIN = {"skip_special_tokens": True}
