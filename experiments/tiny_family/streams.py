"""Token streams: encoded documents, and a seeded, resumable mixture of their windows."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from experiments.tiny_family.corpus import Corpus
from specdec.errors import UserError
from specdec.files import write_bytes

ALIGNED = frozenset({"function", "samples"})
"""Streams whose windows begin at the start of a document, as a prompt does."""


def encode(tokenizer: Tokenizer, texts: Iterable[str], end: int = 0) -> np.ndarray:
    """Returns token ids of all texts, each preceded by the end token, in ``compact``'s dtype."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(list(texts)):
        ids += (end, *encoding.ids)
    return compact(np.asarray(ids, dtype=np.int64))


def compact(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.uint16 if ids.max(initial=0) < 2**16 else np.uint32)


def encode_corpus(
    corpus: Corpus, tokenizer: Tokenizer, seed: int, end: int = 0
) -> dict[str, np.ndarray]:
    """Encodes each stream of a corpus, in random order of documents except for "held_out"."""
    generator, streams = np.random.default_rng(seed), {}
    for name, documents in corpus.streams().items():
        count = len(documents)
        order = range(count) if name == "held_out" else generator.permutation(count)
        streams[name] = encode(tokenizer, (documents[i].text for i in order), end)
    return streams


def save_streams(streams: dict[str, np.ndarray], path: Path) -> None:
    stream = BytesIO()
    np.savez(stream, **streams)  # type: ignore[arg-type]
    write_bytes(path, stream.getvalue())


def load_streams(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        return dict(archive)


class Mixture:
    """Draws windows of one length from several streams in fixed proportions.

    A window of an ALIGNED stream begins at a document's first token; windows of other streams do
    not overlap. Each epoch of a stream visits its windows in a new order. The same seed and the
    same calls give the same batches; `state` and `restore` carry the position across runs.
    """

    def __init__(
        self,
        streams: dict[str, np.ndarray],
        weights: dict[str, float],
        seed: int,
        *,
        end: int = 0,
    ) -> None:
        """Normalises the weights, shares of the windows; a stream without text is skipped.

        ``end`` is the token between documents.
        """
        names = [name for name, weight in weights.items() if weight > 0]
        missing = [name for name in names if name not in streams]
        if missing:
            raise UserError(f"no stream for weights {missing}; there are {', '.join(streams)}")
        self.streams = {name: streams[name] for name in names if len(streams[name]) > 2}
        self.names = list(self.streams)
        if not self.names:
            raise UserError(f"no stream with text for weights {weights}")
        share = np.asarray([weights[name] for name in self.names], dtype=np.float64)
        self.share = share / share.sum()
        self.seed, self.draws, self.end = seed, 0, end
        self.cursors = dict.fromkeys(self.names, (0, 0))  # epoch, window
        self._starts: dict[tuple[str, int], np.ndarray] = {}

    def _windows(self, name: str, length: int) -> np.ndarray:
        if (name, length) not in self._starts:
            stream = self.streams[name]
            last = max(0, len(stream) - length)  # a window needs one more token as target
            aligned = np.flatnonzero(stream == self.end) + 1
            starts = aligned[aligned < last] if name in ALIGNED else np.arange(0, last, length)
            self._starts[name, length] = starts
        return self._starts[name, length]

    def check(self, length: int) -> None:
        for name, stream in self.streams.items():
            if not len(self._windows(name, length)):
                raise UserError(
                    f"no window of length={length} in stream {name!r} of"
                    f" {len(stream)} tokens: lower the length, or its weight to 0"
                )

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and next-token targets, two int64 tensors of (size, length)."""
        # The constant separates these draws from those of ``_order``.
        rng = np.random.default_rng((self.seed, 7919, self.draws))
        self.draws += 1
        rows = []
        for choice in rng.choice(len(self.names), size=size, p=self.share):
            name = self.names[choice]
            starts, (epoch, index) = self._windows(name, length), self.cursors[name]
            if index >= len(starts):
                epoch, index = epoch + 1, 0
            start = starts[_order((self.seed, choice, length, epoch), len(starts))[index]]
            self.cursors[name] = (epoch, index + 1)
            rows.append(self.streams[name][start : start + length + 1].astype(np.int64))
        tokens = torch.from_numpy(np.stack(rows))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def settings(self) -> dict[str, Any]:
        sizes = {name: len(stream) for name, stream in self.streams.items()}
        shares = dict(zip(self.names, self.share.tolist(), strict=True))
        return {"seed": self.seed, "shares": shares, "tokens": sizes}

    def state(self) -> dict[str, Any]:
        return {"draws": self.draws, "cursors": dict(self.cursors)}

    def restore(self, state: dict[str, Any]) -> None:
        self.draws, self.cursors = state["draws"], dict(state["cursors"])


@lru_cache(maxsize=16)
def _order(seed: tuple[int, ...], count: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)
