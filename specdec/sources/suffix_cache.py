"""Token sequences of finished requests in one suffix automaton of bounded size.

A cache is saved as an ``.npz`` archive without pickled objects: ``head`` (JSON: format, version,
vocabulary size), ``tokens`` (all sequences, oldest first), ``lengths`` and ``num_prompt``.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import UserError
from specdec.files import NOT_ARRAYS, parse_json, write_bytes
from specdec.sources.suffix import SuffixAutomaton
from specdec.types import IntArray

FORMAT = "specdec-suffix-cache"
VERSION = 1
_ARRAYS = ("tokens", "lengths", "num_prompt")


@dataclass(frozen=True, slots=True)
class CachedText:
    """Tokens of a finished request, int64[T]: ``num_prompt`` of the prompt, then the output."""

    tokens: IntArray
    num_prompt: int

    @property
    def prompt(self) -> bytes:
        return self.tokens[: self.num_prompt].tobytes()


class SuffixCache:
    """The latest finished requests, at most ``max_tokens`` tokens of them.

    The automaton has at most twice as many tokens, including removed ones. Rebuilding it replaces
    the object. ``version`` changes whenever the automaton does.
    """

    def __init__(self, max_tokens: int) -> None:
        self.automaton = SuffixAutomaton()
        self.num_tokens = self.version = 0
        self._max_tokens = max_tokens
        self._texts: list[CachedText] = []

    @property
    def texts(self) -> tuple[CachedText, ...]:
        return tuple(self._texts)

    def add(self, text: CachedText) -> None:
        """Adds a request, evicting the oldest ones; keeps only the last tokens of one too long."""
        cut = max(0, len(text.tokens) - self._max_tokens)
        if cut:
            text = CachedText(text.tokens[cut:], max(0, text.num_prompt - cut))
        while self._texts and self.num_tokens + len(text.tokens) > self._max_tokens:
            self._remove(self._texts.pop(0))
        self._append(text)
        if self.automaton.size > 2 * self._max_tokens:
            self._rebuild()

    def forget(self, prompt: IntArray) -> None:
        key = np.asarray(prompt, np.int64).tobytes()
        for text in [text for text in self._texts if text.prompt == key]:
            self._texts = [kept for kept in self._texts if kept is not text]
            self._remove(text)

    def _append(self, text: CachedText) -> None:
        self.automaton.begin()
        for token in text.tokens.tolist():
            self.automaton.append(token)
        self._texts.append(text)
        self.num_tokens += len(text.tokens)
        self.version += 1

    def _remove(self, text: CachedText) -> None:
        self.automaton.remove(text.tokens.tolist())
        self.num_tokens -= len(text.tokens)
        self.version += 1

    def _rebuild(self) -> None:
        """Frees the memory of removed requests."""
        texts, self._texts = self._texts, []
        self.automaton, self.num_tokens = SuffixAutomaton(), 0
        for text in texts:
            self._append(text)

    def save(self, path: str | Path, *, vocab_size: int) -> Path:
        texts = self._texts
        head = {"format": FORMAT, "version": VERSION, "vocab_size": vocab_size}
        joined = np.concatenate([np.zeros(0, np.int64), *(text.tokens for text in texts)])
        stream = io.BytesIO()
        np.savez_compressed(
            stream,
            head=np.array(json.dumps(head)),
            tokens=joined.astype(np.int32),
            lengths=np.array([len(text.tokens) for text in texts], np.int64),
            num_prompt=np.array([text.num_prompt for text in texts], np.int64),
        )
        return write_bytes(Path(path).expanduser(), stream.getvalue())


def read_texts(path: str | Path, *, vocab_size: int, key: str = "source.path") -> list[CachedText]:
    """Returns the requests of a saved cache, oldest first; ``key`` names the file in messages.

    Raises:
        UserError: no such file, not a cache, another version or vocabulary, or a damaged cache.
    """
    at = f"{key}={path}"
    try:
        with np.load(Path(path).expanduser(), allow_pickle=False) as file:
            head = parse_json(str(file["head"]))
            arrays = {name: file[name] for name in _ARRAYS}
    except FileNotFoundError as error:
        raise UserError(
            f"{at}: no such file; source.save=FILE writes one at the end of a run"
        ) from error
    except NOT_ARRAYS as error:
        raise UserError(
            f"{at} is not a suffix cache ({type(error).__name__}: {error}); give a file that"
            " source.save=FILE has written"
        ) from error
    if not isinstance(head, dict) or (head.get("format"), head.get("version")) != (FORMAT, VERSION):
        raise UserError(
            f"{at} is not a {FORMAT} of version {VERSION}; write it again with source.save=FILE"
        )
    if head.get("vocab_size") != vocab_size:
        raise UserError(
            f"{at} has tokens of a vocabulary of {head.get('vocab_size')}, the target has"
            f" {vocab_size}; use a cache that the same model family has written"
        )
    damage = _damage(arrays, vocab_size)
    if damage:
        raise UserError(f"{at} is damaged: {damage}; write it again with source.save=FILE")
    texts = np.split(arrays["tokens"].astype(np.int64), np.cumsum(arrays["lengths"])[:-1])
    pairs = zip(texts, arrays["num_prompt"].tolist(), strict=True)
    return [CachedText(*pair) for pair in pairs] if len(arrays["lengths"]) else []


def _damage(arrays: dict[str, Any], vocab_size: int) -> str:
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            return f"{name} is {array.dtype}[{', '.join(map(str, array.shape))}], not int[n]"
    tokens, lengths, num_prompt = (arrays[name] for name in _ARRAYS)
    if len(lengths) != len(num_prompt):
        return f"{len(lengths)} lengths but {len(num_prompt)} prompts"
    if (lengths < 1).any() or (num_prompt < 0).any() or (num_prompt > lengths).any():
        return "a length is below 1 or shorter than its prompt"
    if sum(lengths.tolist()) != len(tokens):
        return f"its lengths add up to {sum(lengths.tolist())}, but it has {len(tokens)} tokens"
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        return f"a token is not in 0 .. {vocab_size - 1}"
    return ""
