"""Draft models with another tokenizer than the target: maps common tokens and translates texts.

For tests and measurements, ``other_tokenizer`` and ``with_vocabulary`` change a model's tokenizer.

Shape letters: V target vocabulary, U draft vocabulary, I tokens that both have, W rows of logits.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models.exits import spread
from specdec.models.runner import ModelRunner
from specdec.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

_WINDOW = 16  # draft tokens that are tokenised again with each new one, at most
_CACHED = 1 << 16  # number of cached results
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's mark of a space
_GAPS = {b" ", b"\t", b"\n", b"\r"}

TRANSLATED = "translated"
"""Name, in configurations and in the meter, of a draft model with another tokenizer."""

_BPE_SPACE = "\u0120"  # the space of byte-level BPE
_LETTERS = [_BPE_SPACE, *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789."]


_ALPHABET = {char: byte for byte, char in bytes_to_unicode().items()}  # of byte-level BPE


class Vocabulary:
    """A tokenizer's tokens as bytes, and an encoder for text that continues earlier text.

    Attributes:
        tokens: bytes of each token; None for special and unused ones.
        special: content of each special token -> its id.
        opening: tokens that the tokenizer puts before a text.
        begin, end: the tokens that begin and end a text; None if there are none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, size: int, end: int | None, name: str
    ) -> None:
        """Reads a fast tokenizer (tokenizer.json); UserError for slow ones and WordPiece. ``size``
        is the model's vocabulary size, not always the tokenizer's; messages contain ``name``.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"{name} has a {type(tokenizer).__name__} without tokenizer.json, so its tokens"
                " are not known as text: save the folder again with a fast tokenizer"
            )
        self.name, self.end = name, end
        described = json.loads(backend.to_str())
        self.special: dict[str, int] = {}
        self.tokens: list[bytes | None] = [None] * size
        read = _reader(described.get("decoder"), name)
        added = {entry["id"]: entry for entry in described["added_tokens"]}
        for text, token in backend.get_vocab(with_added_tokens=True).items():
            if token >= size:
                continue
            if token not in added:
                self.tokens[token] = read(text)
            elif added[token]["special"]:
                self.special[text] = token
            else:
                self.tokens[token] = text.encode()
        self._drop_unknown(described["model"])
        self.opening: tuple[int, ...] = tuple(tokenizer("")["input_ids"])
        self.begin: int | None = tokenizer.bos_token_id
        self._encoder = _continuing(described)

    def _drop_unknown(self, model: dict[str, Any]) -> None:
        unknown = model.get("unk_token")
        token = model.get("unk_id") if unknown is None else model["vocab"].get(unknown)
        if token is not None and token < len(self.tokens):
            self.tokens[token] = None

    def encode(self, text: str) -> list[int]:
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def by_bytes(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for token, data in enumerate(self.tokens):
            if data:
                found.setdefault(data, token)
        return found


def _reader(decoder: dict[str, Any] | None, name: str) -> Any:
    kinds = {step["type"] for step in _steps(decoder, "decoders")}
    if "WordPiece" in kinds:
        raise UserError(
            f"{name} has a WordPiece tokenizer, whose tokens leave out the spaces between words:"
            " give a draft with a byte-level or SentencePiece tokenizer"
        )
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return _sentence_piece
    return str.encode


def _byte_level(text: str) -> bytes | None:
    codes = [_ALPHABET.get(char) for char in text]
    return None if None in codes else bytes(code for code in codes if code is not None)


def _sentence_piece(text: str) -> bytes:
    if found := _BYTE.fullmatch(text):
        return bytes([int(found[1], 16)])
    return text.replace(_SPACE, " ").encode()


def _steps(node: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if node is None:
        return []
    return list(node[inner]) if node["type"] == "Sequence" else [node]


def _continuing(described: dict[str, Any]) -> Tokenizer:
    kept = [s for s in _steps(described.get("normalizer"), "normalizers") if s["type"] != "Prepend"]
    before = _steps(described.get("pre_tokenizer"), "pretokenizers")
    for step in before:
        if "prepend_scheme" in step:
            step["prepend_scheme"] = "never"
        if "add_prefix_space" in step:
            step["add_prefix_space"] = False
    changed = {
        "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before} if before else None,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return Tokenizer.from_str(json.dumps(described | changed))


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a text as draft tokens, the last of which may change when text is added. ``rest``:
    the bytes after ``tokens`` of a character that is incomplete, for which there is no token.
    """

    tokens: tuple[int, ...]
    rest: bytes = b""


class Translation:
    """Maps the tokens that target and draft share, and translates texts from target to draft.

    The *token-level intersection* (Timor et al. 2025, arXiv 2502.05202, algorithm 4) has pairs of
    tokens with equal bytes, special tokens with equal text, and the two tokens that end a text.

    A text is translated one target token at a time: the last word, if it is within the last 16
    draft tokens, is tokenised again together with the bytes of the new token. So draft tokens
    before the last word are final.

    Attributes:
        draft_ids: int64[I], draft tokens of the intersection.
        target_ids: int64[I], target tokens of the intersection in the same order, ascending.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self._target, self._draft = target, draft
        own = draft.by_bytes()
        pairs = {own[data]: token for data, token in target.by_bytes().items() if data in own}
        if not pairs:
            raise UserError(
                f"{draft.name} and {target.name} have no token with the same text, so nothing can"
                " be proposed: give a model.translated whose tokenizer writes the same language"
            )
        self._specials = _specials(target, draft)
        pairs.update({mine: token for token, mine in self._specials.items()})
        order = sorted(pairs.items(), key=lambda pair: pair[1])
        self.draft_ids: IntArray = np.array([mine for mine, _ in order], np.int64)
        self.target_ids: IntArray = np.array([token for _, token in order], np.int64)
        self._single = {data: token for data, token in own.items() if len(data) == 1}
        self._cached = lru_cache(_CACHED)(self._extended)

    def translated(self, tokens: Iterable[int]) -> Tail:
        """Translates the target tokens of a whole text, such as a prompt. The target's token for
        the beginning of a text is replaced by the tokens that the draft's tokenizer puts there.
        """
        ids = list(tokens)
        if ids and ids[0] == self._target.begin:
            ids = ids[1:]
        found, data = [*self._draft.opening], b""
        for token in ids:
            if token in self._specials:
                found += [*self._encoded(data).tokens, self._specials[token]]
                data = b""
            else:
                data += self._bytes(token)
        last = self._encoded(data)
        return Tail((*found, *last.tokens), last.rest)

    def extended(self, tail: Tail, token: int) -> Tail:
        """Returns the new end of the text, to replace ``tail``, after one more target token."""
        return self._cached(tail, token)

    def num_final(self, tokens: Sequence[int]) -> int:
        """Returns how many of a text's draft tokens no further text can change: those before its
        last word or special token.
        """
        texts = self._draft.tokens
        first = max(0, len(tokens) - _WINDOW)
        for at in range(len(tokens) - 1, first, -1):
            before, here = texts[tokens[at - 1]], texts[tokens[at]]
            if before is None or here is None:
                return at
            if here[:1] in _GAPS and before[-1:] not in _GAPS:
                return at
        while first and _continues(texts[tokens[first]]):
            first -= 1
        return first

    def _extended(self, tail: Tail, token: int) -> Tail:
        if token in self._specials:
            return Tail((*tail.tokens, self._specials[token]))
        added = self._bytes(token)
        if not added:
            return tail
        texts = self._draft.tokens
        known = [texts[mine] for mine in tail.tokens]
        start = 1 + max((at for at, data in enumerate(known) if data is None), default=-1)
        data = b"".join(data for data in known[start:] if data is not None)
        new = self._encoded(data + tail.rest + added)
        return Tail((*tail.tokens[:start], *new.tokens), new.rest)

    def _encoded(self, data: bytes) -> Tail:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        rest = decoder.getstate()[0]
        tokens = self._draft.encode(text) if text else []
        singles = [self._single.get(rest[at : at + 1]) for at in range(len(rest))]
        if None in singles:
            return Tail(tuple(tokens), rest)
        return Tail((*tokens, *(token for token in singles if token is not None)))

    def _bytes(self, token: int) -> bytes:
        texts = self._target.tokens
        return (texts[token] if token < len(texts) else None) or b""


def _continues(data: bytes | None) -> bool:
    return bool(data) and data is not None and 0x80 <= data[0] < 0xC0


def _specials(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    there = draft.special
    found = {token: there[text] for text, token in target.special.items() if text in there}
    if (
        target.end is not None
        and draft.end is not None
        and target.end not in found
        and draft.end not in found.values()
    ):
        found[target.end] = draft.end
    return found


class TranslatedDraft:
    def __init__(
        self, runner: ModelRunner, translation: Translation, *, vocab_size: int, weight_bytes: int
    ) -> None:
        self.runner, self.translation = runner, translation
        self.vocab_size, self.weight_bytes = vocab_size, weight_bytes

    @classmethod
    def from_pair(cls, pair: Any, *, meter: Meter) -> TranslatedDraft:
        translation = Translation(pair.vocabulary("target"), pair.vocabulary(TRANSLATED))
        runner = pair.runner(TRANSLATED, meter)
        size = sum(p.nbytes for p in pair.model(TRANSLATED).parameters())
        return cls(runner, translation, vocab_size=pair.vocab_size, weight_bytes=size)

    @cached_property
    def target_ids(self) -> Tensor:
        return torch.from_numpy(self.translation.target_ids).to(self.runner.device)

    @cached_property
    def _draft_ids(self) -> Tensor:
        return torch.from_numpy(self.translation.draft_ids).to(self.runner.device)

    def shared_logits(self, logits: Tensor) -> Tensor:
        """Selects the logits [W, I] of tokens that the target also has from draft logits [W, U]."""
        return logits[:, self._draft_ids.to(logits.device)]

    def target_logits(self, logits: Tensor) -> Tensor:
        """Maps draft logits [W, U] to target logits [W, V], -inf for tokens the draft lacks."""
        ids = self.target_ids.to(logits.device)
        return spread(self.shared_logits(logits), ids, self.vocab_size)


def simple_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Returns the content of tokenizer.json for a byte-level BPE tokenizer of at most 64 letters,
    then pairs of letters, so that a text can be cut into tokens in many ways. If ``vocab_size``
    exceeds the number of letters and pairs, the remaining ids have no text.
    """
    letters = _LETTERS[: isqrt(vocab_size - 1) + 1]
    pairs = [(a, letters[(n + d) % len(letters)]) for d, n, a in _offsets(letters)]
    pairs = pairs[: vocab_size - len(letters)]
    texts = [*letters, *(a + b for a, b in pairs)]
    model = {
        "type": "BPE",
        "vocab": {text: token for token, text in enumerate(texts)},
        "merges": [list(pair) for pair in pairs],
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    described = {"pre_tokenizer": level, "decoder": level | {"trim_offsets": True}}
    level["trim_offsets"] = True
    return described | {"version": "1.0", "added_tokens": [], "model": model}


def _offsets(letters: Sequence[str]) -> list[tuple[int, int, str]]:
    numbers = range(1, len(letters) + 1), range(len(letters))
    return [(d, n, letters[n]) for d, n in product(*numbers)]


def other_tokenizer(
    described: dict[str, Any], *, merges: int, joined: int = 0, seed: int = 0
) -> tuple[dict[str, Any], list[list[int]]]:
    """Derives another byte-level BPE tokenizer from the tokenizer.json ``described``.

    The new tokenizer keeps the first ``merges`` merges and has ``joined`` further tokens, each a
    pair of kept ones; ``seed`` determines the pairs and all token ids. Returns its tokenizer.json
    and, per new token, the old tokens that make up its text.
    """
    model = described["model"]
    old, kept = model["vocab"], [list(pair) for pair in model["merges"]]
    made = {a + b for a, b in kept}
    kept = kept[:merges]
    texts = [text for text in old if text not in made]
    texts += [a + b for a, b in kept]
    parts = {text: [old[text]] for text in texts}
    draws = np.random.default_rng(seed)
    added = [dict(entry) for entry in described["added_tokens"]]
    words = [text for text in texts if text not in {entry["content"] for entry in added}]
    while joined:
        a, b = (words[at] for at in draws.integers(len(words), size=2))
        if a + b not in old and a + b not in parts:
            kept.append([a, b])
            parts[a + b] = [old[a], old[b]]
            joined -= 1
    order = [list(parts)[at] for at in draws.permutation(len(parts))]
    vocab = {text: token for token, text in enumerate(order)}
    for entry in added:
        entry["id"] = vocab[entry["content"]]
    changed = model | {"vocab": vocab, "merges": kept}
    return described | {"model": changed, "added_tokens": added}, [parts[text] for text in order]


def fast_tokenizer(described: dict[str, Any], **special: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(json.dumps(described))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def with_vocabulary(model: PreTrainedModel, parts: Sequence[Sequence[int]]) -> PreTrainedModel:
    """Returns a copy of a model with another vocabulary: a new token's rows of embedding and output
    matrix are means over the rows of its ``parts``, the old tokens that it consists of.
    """
    changed = copy.deepcopy(model)
    inputs, outputs = changed.get_input_embeddings(), changed.get_output_embeddings()
    tied = inputs.weight is outputs.weight
    inputs.weight = _mean_rows(inputs.weight, parts)
    inputs.num_embeddings = len(parts)
    outputs.weight = inputs.weight if tied else _mean_rows(outputs.weight, parts)
    outputs.out_features = len(parts)
    if getattr(outputs, "bias", None) is not None:
        outputs.bias = _mean_rows(outputs.bias, parts)
    changed.config.get_text_config().vocab_size = len(parts)
    return changed


def _mean_rows(weight: nn.Parameter, parts: Sequence[Sequence[int]]) -> nn.Parameter:
    rows = [weight[torch.tensor(tokens).to(weight.device)].mean(dim=0) for tokens in parts]
    return nn.Parameter(torch.stack(rows), requires_grad=False)
