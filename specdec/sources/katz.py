"""Katz back-off n-gram model (Katz 1987) with Good-Turing discounts.

For a context h with continuations w counted c(hw), and h' = h without its first token:

    P(w | h) = d(c) c(hw) / c(h)          if c(hw) > 0
             = alpha(h) P(w | h')         otherwise,

where alpha(h) makes the row sum to 1; an unseen h is replaced by h'. The empty context backs off to
the uniform distribution. N-grams form a trie: an m-gram has the key ``id(first m-1 tokens) * V +
w`` in a sorted array, so keys are exact for any order and vocabulary, and the id of a context takes
one bisection per token.

Shape letters: W contexts, K candidates, V vocabulary, G n-grams of one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from specdec.sources.contexts import NO_TOKEN
from specdec.sources.discounts import discounts
from specdec.types import FloatArray, IntArray

_LIGHT = 16  # contexts of at most this many continuations are merged with their back-off on lookup
_LIST = 48  # length of the cached list of other contexts; exact for k <= _LIST - _LIGHT
_COUNTED: WeakKeyDictionary[Any, KatzModel] = WeakKeyDictionary()
_NOTHING_LEFT = 1e-9  # discounted mass below this is taken as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """The continuations of the contexts of one length.

    Attributes:
        keys: int64[G], sorted ``context id * V + token``; only seen n-grams.
        tokens: int64[G].
        probs: float64[G], discounted.
        starts: int64[C + 1], where the continuations of each of C contexts begin.
        alphas: float64[C], back-off weights; 1 for a context without continuations.
    """

    keys: IntArray
    tokens: IntArray
    probs: FloatArray
    starts: IntArray
    alphas: FloatArray


class KatzModel:
    """Katz back-off over token ids, counted from token sequences.

    Every distribution sums to 1 and gives every token a positive probability, except where all V
    tokens were seen after a context. Where discounting leaves no mass (all counts above the
    threshold), the context is treated as if one unseen continuation had been counted once.

    Attributes:
        order: longest n-gram; contexts are the last ``order - 1`` tokens.
        vocab_size: V.
    """

    def __init__(
        self, *, order: int, vocab_size: int, keys: Sequence[IntArray], counts: Sequence[IntArray]
    ) -> None:
        """Derives probabilities from counts; use ``from_tokens``.

        Args:
            order: n >= 1.
            vocab_size: V.
            keys: per order m = 1 .. n: int64[G_m] sorted ``id(first m-1 tokens) * V + token``,
                where the id is the index in the keys of order m - 1 (the token itself for m = 2).
            counts: per order: int64[G_m], positive.

        Raises:
            ValueError: for an order below 1 or no tokens at all.
        """
        if order < 1 or vocab_size < 1:
            raise ValueError(f"order={order} and vocab_size={vocab_size} must be at least 1")
        if not len(keys[0]):
            raise ValueError("an n-gram model needs at least one token to count")
        self.order = order
        self.vocab_size = vocab_size
        self._keys = list(keys)
        self._counts = list(counts)
        self._levels: list[_Level] = []
        self._derive()
        self._index()

    # ------------------------------------------------------------------ building

    @classmethod
    def from_tokens(
        cls, tokens: IntArray, *, order: int, vocab_size: int, separator: int | None
    ) -> KatzModel:
        """Counts a model.

        Args:
            tokens: int[T], documents one after the other.
            order: longest n-gram, >= 1.
            vocab_size: V; all tokens are below it.
            separator: token between documents, None if there is none. An n-gram may begin with it
                (a document's start) or end with it (its end), but none reaches across it.

        Raises:
            ValueError: for tokens outside the vocabulary, or none.
        """
        tokens = np.asarray(tokens, np.int64).ravel()
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(
                f"tokens {tokens.min()}..{tokens.max()} are outside the vocabulary of {vocab_size};"
                " count with the tokenizer of the model that is to be drafted for"
            )
        unigrams = np.bincount(tokens, minlength=vocab_size)
        seen = np.flatnonzero(unigrams)
        keys, counts = [seen], [unigrams[seen]]
        inner = np.ones(len(tokens), np.bool_) if separator is None else tokens != separator
        ids = tokens  # id of the (m-1)-gram that ends here, -1 where it reaches over a separator
        for m in range(2, order + 1):
            before, new = ids[:-1], tokens[m - 1 :]
            fits = before >= 0
            if m > 2:
                fits &= inner[m - 2 : -1]
            gram_keys, inverse, num = np.unique(
                before[fits] * vocab_size + new[fits], return_inverse=True, return_counts=True
            )
            ids = np.full(len(new), -1, np.int64)
            ids[fits] = inverse
            keys.append(gram_keys)
            counts.append(num)
        return cls(order=order, vocab_size=vocab_size, keys=keys, counts=counts)

    @classmethod
    def from_pair(cls, pair: Any) -> KatzModel:
        """Counts trigrams of the token samples of a pair, once per pair.

        Args:
            pair: has ``token_samples()`` and ``vocab_size``.
        """
        if pair not in _COUNTED:
            _COUNTED[pair] = cls.from_tokens(
                pair.token_samples(), order=3, vocab_size=pair.vocab_size, separator=0
            )
        return _COUNTED[pair]

    def _derive(self) -> None:
        """Discounted probabilities and back-off weights, shortest contexts first."""
        size = self.vocab_size
        root = self._level(self._keys[0], self._counts[0], 1, np.full(len(self._keys[0]), 1 / size))
        self._unigrams = np.full(size, root.alphas[0] / size)
        self._unigrams[root.tokens] = root.probs
        self._levels.append(root)
        lower, below = self._unigrams, np.zeros(size, np.int64)  # of the n-grams one order down
        for m in range(2, self.order + 1):
            keys = self._keys[m - 1]
            context, token = np.divmod(keys, size)
            # The suffix of a seen n-gram was seen too, so its probability is in the table below.
            suffix = token
            if m > 2:
                suffix = np.searchsorted(self._keys[m - 2], below[context] * size + token)
            level = self._level(keys, self._counts[m - 1], len(below), lower[suffix])
            self._levels.append(level)
            lower, below = level.probs, suffix

    def _level(
        self, keys: IntArray, counts: IntArray, num_contexts: int, lower: FloatArray
    ) -> _Level:
        """One order's probabilities; ``lower``[G] is P(token | shorter context) of each n-gram."""
        size = self.vocab_size
        context, token = np.divmod(keys, size)
        total = np.bincount(context, counts, num_contexts)
        seen = np.bincount(context, minlength=num_contexts)
        if not len(keys):
            ones = np.ones(num_contexts)
            return _Level(
                keys=keys,
                tokens=token,
                probs=ones[:0],
                starts=np.zeros(num_contexts + 1, np.int64),
                alphas=ones,
            )
        probs = discounts(counts) * counts / total[context]
        left = 1.0 - np.bincount(context, probs, num_contexts)
        spent = (left < _NOTHING_LEFT)[context]
        probs[spent] = counts[spent] / (total[context[spent]] + 1.0)
        full = (seen == size)[context]
        probs[full] /= np.bincount(context, probs, num_contexts)[context[full]]
        left = 1.0 - np.bincount(context, probs, num_contexts)
        open_mass = 1.0 - np.bincount(context, lower, num_contexts)
        alphas = np.where(seen == size, 0.0, left / np.where(seen == size, 1.0, open_mass))
        alphas[seen == 0] = 1.0
        starts = np.concatenate([[0], np.cumsum(seen)])
        return _Level(keys=keys, tokens=token, probs=probs, starts=starts, alphas=alphas)

    # ------------------------------------------------------------------ lookup

    def probs(self, contexts: Sequence[IntArray] | IntArray) -> FloatArray:
        """Whole distributions.

        Args:
            contexts: W token sequences of any length, or int64[W, >= order - 1] with ``NO_TOKEN``
                on the left where a sequence is shorter; their last ``order - 1`` tokens count.

        Returns:
            float64[W, V], rows sum to 1.
        """
        ids = self._context_ids(self._windows(contexts))
        return np.stack([self._row(ids[:, i]) for i in range(ids.shape[1])])

    def top(self, contexts: Sequence[IntArray] | IntArray, k: int) -> tuple[IntArray, FloatArray]:
        """The ``k`` most probable continuations, best first.

        Args:
            contexts: as for ``probs``.
            k: 1 .. V; above 32 it costs a whole distribution per context.

        Returns:
            (tokens int64[W, k], log-probabilities float64[W, k]).

        Raises:
            ValueError: for a k outside 1 .. V.
        """
        if not 1 <= k <= self.vocab_size:
            raise ValueError(f"k={k} must be between 1 and the vocabulary size {self.vocab_size}")
        ids = self._context_ids(self._windows(contexts))
        if k > _LIST - _LIGHT:
            dense = np.stack([self._row(ids[:, i]) for i in range(ids.shape[1])])
            return _best(np.broadcast_to(np.arange(self.vocab_size), dense.shape), dense, k)
        tokens, scores = self._heavy_lists(ids)
        if self.order > 1:
            tokens, scores = self._with_light(ids, tokens, scores, k)
        return _best(tokens, scores, k)

    def _windows(self, contexts: Sequence[IntArray] | IntArray) -> IntArray:
        """int64[W, order - 1], right-aligned."""
        length = self.order - 1
        if isinstance(contexts, np.ndarray) and contexts.ndim == 2:
            missing = length - contexts.shape[1]
            if missing <= 0:
                return contexts[:, contexts.shape[1] - length :]
            return np.pad(contexts, ((0, 0), (missing, 0)), constant_values=NO_TOKEN)
        windows = np.full((len(contexts), length), NO_TOKEN, np.int64)
        for row, context in zip(windows, contexts, strict=True):
            tail = context[max(0, len(context) - length) :]
            row[length - len(tail) :] = tail
        return windows

    def _context_ids(self, windows: IntArray) -> IntArray:
        """int64[order, W]: global index of the context of each length 0 .. order - 1.

        The index after all contexts means unseen.
        """
        length = self.order - 1
        ids = np.zeros((self.order, len(windows)), np.int64)
        if not length:
            return ids
        newest_first = windows[:, ::-1].T
        local = (
            newest_first.copy()
        )  # row i: first token of the context of length i + 1, then its id
        ids[1] = np.where(local[0] == NO_TOKEN, self._unseen, self._offsets[1] + local[0])
        for step in range(1, length):
            # All contexts longer than ``step`` are extended by one token, in one bisection.
            keys = self._keys[step]
            want = local[step:] * self.vocab_size + newest_first[: length - step]
            at = np.searchsorted(keys, want)
            hit = (keys.take(at, mode="clip") == want) if len(keys) else at < 0
            local[step:] = np.where(hit, at, NO_TOKEN)
            ids[step + 1] = np.where(hit[0], at[0] + self._offsets[step + 1], self._unseen)
        return ids

    def _index(self) -> None:
        """Flat arrays over the contexts of all lengths; the last row is 'unseen'."""
        lengths = [len(level.alphas) for level in self._levels]
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._unseen = int(self._offsets[-1])
        grams = np.concatenate([[0], np.cumsum([len(level.keys) for level in self._levels])])
        begin = [level.starts[:-1] + g for level, g in zip(self._levels, grams[:-1], strict=True)]
        count = [np.diff(level.starts) for level in self._levels]
        self._begin = np.concatenate([*begin, [0]])
        self._count = np.concatenate([*count, [0]])
        self._alpha = np.concatenate([*(level.alphas for level in self._levels), [1.0]])
        self._heavy = self._count > _LIGHT
        self._heavy[0] = True  # the empty context: every chain of back-offs ends in a list
        self._light_count = np.where(self._heavy, 0, self._count)
        self._light_alpha = np.where(self._heavy, 1.0, self._alpha)
        pad = np.zeros(_LIGHT, np.int64)  # so that the window of the last context stays inside
        self._gram_tokens = np.concatenate([*(level.tokens for level in self._levels), pad])
        self._gram_probs = np.concatenate([*(level.probs for level in self._levels), pad])
        self._list_row = np.full(self._unseen + 1, -1, np.int64)
        self._list_tokens = np.zeros((0, 0), np.int64)
        self._list_probs = np.zeros((0, 0))
        self._num_lists = 0

    def _row(self, ids: IntArray) -> FloatArray:
        """float64[V]: the distribution after the contexts ``ids``[order], shortest first."""
        row = self._unigrams.copy()
        for index in ids[1:].tolist():
            grams = slice(self._begin[index], self._begin[index] + self._count[index])
            if self._count[index]:
                row *= self._alpha[index]
                row[self._gram_tokens[grams]] = self._gram_probs[grams]
        return row

    def _heavy_lists(self, ids: IntArray) -> tuple[IntArray, FloatArray]:
        """[W, T]: best continuations of each row's longest context that is heavy.

        A context's continuations were all seen after its suffixes, so heaviness only grows with
        back-off: everything above the longest heavy context is light or unseen.
        """
        longest = self._heavy[ids].sum(axis=0) - 1
        columns = np.arange(ids.shape[1])
        contexts = ids[longest, columns]
        rows = self._list_row[contexts]
        if (rows < 0).any():
            for column in np.flatnonzero(rows < 0).tolist():
                if self._list_row[contexts[column]] < 0:
                    self._make_list(ids[: longest[column] + 1, column])
            rows = self._list_row[contexts]
        return self._list_tokens[rows], self._list_probs[rows]

    def _make_list(self, ids: IntArray) -> None:
        """Stores the list of one heavy context, on first use."""
        probs = self._row(ids)[None]
        everything = np.arange(self.vocab_size)[None]
        tokens, logprobs = _best(everything, probs, min(_LIST, self.vocab_size))
        if self._num_lists == len(self._list_tokens):
            extra = max(64, self._num_lists)
            blank = np.zeros((extra, tokens.shape[1]), np.int64)
            old = self._list_tokens.reshape(-1, tokens.shape[1])
            self._list_tokens = np.concatenate([old, blank])
            self._list_probs = np.concatenate([self._list_probs.reshape(old.shape), blank + 0.0])
        self._list_tokens[self._num_lists] = tokens[0]
        self._list_probs[self._num_lists] = np.exp(logprobs[0])
        self._list_row[ids[-1]] = self._num_lists
        self._num_lists += 1

    def _with_light(
        self, ids: IntArray, tokens: IntArray, probs: FloatArray, k: int
    ) -> tuple[IntArray, FloatArray]:
        """Merges the light contexts' own continuations with the list they back off to.

        Exact for the first ``k``: of a list only those tokens are taken out that follow a light
        context, and these are all among the continuations of the shortest one, at most ``width``.
        """
        contexts = ids[:0:-1]  # longest first
        counts = self._light_count.take(contexts)
        scale = self._light_alpha.take(contexts).cumprod(axis=0)
        width = int(counts.max())
        tokens, probs = tokens[:, : k + width], probs[:, : k + width] * scale[-1][:, None]
        if not width:
            return tokens, probs
        window = np.arange(width)
        at = self._begin.take(contexts)[..., None] + window
        own = window < counts[..., None]  # [L, W, width]
        own_tokens = np.where(own, self._gram_tokens.take(at), NO_TOKEN)
        own_probs = np.where(own, self._gram_probs.take(at), 0.0)
        own_probs[1:] *= scale[:-1, :, None]
        for upper in range(len(contexts) - 1):  # a token counts where its context is longest
            taken = own_tokens[upper + 1 :, :, :, None] == own_tokens[upper, None, :, None, :]
            own_probs[upper + 1 :][taken.any(-1)] = 0.0
        parts_tokens, parts_probs = [*own_tokens, tokens], [*own_probs, probs]
        for part in own_tokens:
            probs[(tokens[:, :, None] == part[:, None, :]).any(-1)] = 0.0
        return np.concatenate(parts_tokens, axis=1), np.concatenate(parts_probs, axis=1)


def _best(tokens: IntArray, probs: FloatArray, k: int) -> tuple[IntArray, FloatArray]:
    """The ``k`` most probable of each row, best first: (tokens, log-probabilities) [W, k]."""
    if probs.shape[1] > 4 * _LIST:
        part = np.argpartition(-probs, min(k, probs.shape[1] - 1), axis=1)[:, :k]
        part.sort(axis=1)  # ties in token order
        tokens, probs = np.take_along_axis(tokens, part, 1), np.take_along_axis(probs, part, 1)
    order = np.argsort(-probs, axis=1, kind="stable")[:, :k]
    order += np.arange(0, probs.size, probs.shape[1])[:, None]
    with np.errstate(divide="ignore"):
        return tokens.ravel().take(order), np.log(probs.ravel().take(order))
