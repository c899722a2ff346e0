"""Token streams: encoded documents, and a seeded, resumable mixture of their windows."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specdec.errors import UserError
from specdec.files import write_bytes
from specdec.train.corpus import Corpus, Document

STREAMS = ("stdlib", "function", "package", "gsm8k")
"""Names of the streams of training text."""
ALIGNED = frozenset({"function", "samples"})
"""Streams whose windows begin at the start of a document, as a prompt does."""


def stream_of(document: Document) -> str:
    """Name of a training document's stream, one of STREAMS."""
    if document.kind == "functions":
        return "function"
    return document.source if document.source in ("stdlib", "gsm8k") else "package"


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """Token ids of all texts, each preceded by the end token 0, in ``compact``'s dtype."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(list(texts)):
        ids.append(0)
        ids.extend(encoding.ids)
    return compact(np.asarray(ids, dtype=np.int64))


def compact(ids: np.ndarray) -> np.ndarray:
    """The ids as uint16 if they fit, else as uint32."""
    return ids.astype(np.uint16 if ids.max(initial=0) < 2**16 else np.uint32)


def encode_corpus(corpus: Corpus, tokenizer: Tokenizer, seed: int) -> dict[str, np.ndarray]:
    """Encodes a corpus into one token array per stream, in random order, and "held_out"."""
    groups: dict[str, list[str]] = {name: [] for name in STREAMS}
    for document in corpus.train:
        groups[stream_of(document)].append(document.text)
    generator = np.random.default_rng(seed)
    streams = {}
    for name, texts in groups.items():
        order = generator.permutation(len(texts))
        streams[name] = encode(tokenizer, (texts[i] for i in order))
    streams["held_out"] = encode(tokenizer, (d.text for d in corpus.held_out))
    return streams


def save_streams(streams: dict[str, np.ndarray], path: Path) -> None:
    """Writes token arrays to an .npz file atomically."""
    stream = BytesIO()
    np.savez(stream, **streams)  # type: ignore[arg-type]
    write_bytes(path, stream.getvalue())


def load_streams(path: Path) -> dict[str, np.ndarray]:
    """Reads what save_streams wrote."""
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


class Mixture:
    """Draws windows of one length from several streams in fixed proportions.

    A window of an ALIGNED stream begins at a document's first token; windows of other streams do
    not overlap. Each epoch of a stream visits its windows in a new order. The same seed and the
    same calls give the same batches; `state` and `restore` carry the position across runs.
    """

    def __init__(
        self, streams: dict[str, np.ndarray], weights: dict[str, float], seed: int
    ) -> None:
        """Normalises the weights; a stream without text is skipped.

        Args:
            streams: token arrays by name.
            weights: share of the windows by stream.
            seed: of all draws.

        Raises:
            UserError: a stream is missing, or all are empty.
        """
        self.names = [name for name, weight in weights.items() if weight > 0]
        missing = [name for name in self.names if name not in streams]
        if missing:
            raise UserError(f"no stream for weights {missing}; there are {', '.join(streams)}")
        self.names = [name for name in self.names if len(streams[name]) > 2]
        if not self.names:
            raise UserError(f"no stream with text for weights {weights}")
        self.streams = streams
        share = np.asarray([weights[name] for name in self.names], dtype=np.float64)
        self.share = share / share.sum()
        self.seed = seed
        self.draws = 0
        self.cursors = dict.fromkeys(self.names, (0, 0))  # epoch, window
        self._orders: dict[tuple[str, int, int], np.ndarray] = {}
        self._starts: dict[tuple[str, int], np.ndarray] = {}

    def _windows(self, name: str, length: int) -> np.ndarray:
        if (name, length) not in self._starts:
            stream = self.streams[name]
            last = max(0, len(stream) - length)  # a window needs one more token as target
            if name in ALIGNED:
                starts = np.flatnonzero(stream == 0) + 1
                starts = starts[starts < last]
            else:
                starts = np.arange(0, last, length)
            self._starts[name, length] = starts
        return self._starts[name, length]

    def check(self, length: int) -> None:
        """Checks that every stream has a window of this many positions.

        Raises:
            UserError: a stream is too short.
        """
        for name in self.names:
            if not len(self._windows(name, length)):
                raise UserError(
                    f"no window of length={length} in stream {name!r} of"
                    f" {len(self.streams[name])} tokens: lower the length, or its weight to 0"
                )

    def _order(self, name: str, length: int, epoch: int) -> np.ndarray:
        key = (name, length, epoch)
        if key not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[0] != name}
            rng = np.random.default_rng((self.seed, self.names.index(name), length, epoch))
            self._orders[key] = rng.permutation(len(self._windows(name, length)))
        return self._orders[key]

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and next-token targets, two int64 tensors of (size, length)."""
        rng = np.random.default_rng((self.seed, 7919, self.draws))
        self.draws += 1
        rows = []
        for choice in rng.choice(len(self.names), size=size, p=self.share):
            name = self.names[choice]
            starts, (epoch, index) = self._windows(name, length), self.cursors[name]
            if index >= len(starts):
                epoch, index = epoch + 1, 0
            start = starts[self._order(name, length, epoch)[index]]
            self.cursors[name] = (epoch, index + 1)
            rows.append(self.streams[name][start : start + length + 1].astype(np.int64))
        tokens = torch.from_numpy(np.stack(rows))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all streams."""
        return sum(len(self.streams[name]) for name in self.names)

    def settings(self) -> dict[str, Any]:
        """Seed, shares and sizes of the streams, which determine the batches."""
        sizes = {name: len(self.streams[name]) for name in self.names}
        shares = dict(zip(self.names, self.share.tolist(), strict=True))
        return {"seed": self.seed, "shares": shares, "tokens": sizes}

    def state(self) -> dict[str, Any]:
        """Position of the draws, as plain values."""
        return {"draws": self.draws, "cursors": dict(self.cursors)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a position that ``state`` returned."""
        self.draws = state["draws"]
        self.cursors = dict(state["cursors"])
