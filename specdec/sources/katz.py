"""Katz back-off n-gram model (Katz 1987) with Good-Turing discounts.

For a context h with continuations w counted c(hw), and h' = h without its first token:

    P(w | h) = d(c) c(hw) / c(h)          if c(hw) > 0
             = alpha(h) P(w | h')         otherwise,

where alpha(h) makes the row sum to 1; an unseen h is replaced by h'. The empty context backs off to
the uniform distribution. N-grams form a trie: an m-gram has the key ``id(first m-1 tokens) * V +
w`` in a sorted array, so keys are exact for any order and vocabulary, and the id of a context takes
one bisection per token.

Shape letters: W contexts, V vocabulary, G n-grams of one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from specdec.executors.models import ModelPair
from specdec.interfaces import TokenSource
from specdec.sources.sampled import sampled_candidates
from specdec.state import DecodeState
from specdec.types import Candidates, FloatArray, IntArray, Nodes

_MAX_DISCOUNTED = 5  # Katz 1987: counts above 5 are taken as reliable
_COUNTED: WeakKeyDictionary[Any, KatzModel] = WeakKeyDictionary()
_NOTHING_LEFT = 1e-9  # discounted mass below this is taken as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """The continuations of all contexts of one length.

    Attributes:
        keys: int64[G], sorted ``context id * V + token``; only seen n-grams. The id of a context is
            its index in the keys of the order below (the token itself for bigrams).
        tokens: int64[G], the last token of each n-gram.
        probs: float64[G], discounted probability of that token after its context.
        starts: int64[C + 1], index of the first continuation of each of C contexts.
        alphas: float64[C], back-off weights; 1 for a context without continuations.
    """

    keys: IntArray
    tokens: IntArray
    probs: FloatArray
    starts: IntArray
    alphas: FloatArray


class KatzModel:
    """A Katz back-off model of token ids, counted from ``tokens``, the concatenated documents.

    Every distribution sums to 1 and gives every token a positive probability. Where discounting
    leaves no mass (all counts above the threshold), the context is treated as if one unseen
    continuation had been counted once, unless all V tokens were seen after it.

    Args:
        order: n >= 1, the longest n-gram.
        separator: the token between documents; None if there is one document. An n-gram may begin
            with it (a document's start) or end with it (its end), but none reaches across it.
    """

    def __init__(
        self, tokens: IntArray, *, order: int, vocab_size: int, separator: int | None
    ) -> None:
        tokens, size = np.asarray(tokens, np.int64).ravel(), vocab_size
        if order < 1 or size < 1:
            raise ValueError(f"order={order} and vocab_size={size} must be at least 1")
        if not len(tokens):
            raise ValueError("an n-gram model needs at least one token to count")
        if not 0 <= tokens.min() <= tokens.max() < size:
            raise ValueError(
                f"tokens {tokens.min()}..{tokens.max()} are outside the vocabulary of {size};"
                " count with the tokenizer of the model that is to be drafted for"
            )
        self.order, self.vocab_size = order, size
        seen, num = np.unique(tokens, return_counts=True)
        root = self._level(seen, num, 1, np.full(len(seen), 1 / size))
        self._levels = [root]
        self._unigrams = np.full(size, root.alphas[0] / size)
        self._unigrams[root.tokens] = root.probs
        self._ranking = np.argsort(-self._unigrams, kind="stable")
        inner = np.ones(len(tokens), np.bool_) if separator is None else tokens != separator
        ids = tokens  # id of the (m-1)-gram that ends here, -1 where it reaches over a separator
        lower, below = self._unigrams, np.zeros(size, np.int64)  # of the n-grams one order down
        for m in range(2, order + 1):
            before, new = ids[:-1], tokens[m - 1 :]
            fits = before >= 0
            if m > 2:
                fits &= inner[m - 2 : -1]
            keys, inverse, num = np.unique(
                before[fits] * size + new[fits], return_inverse=True, return_counts=True
            )
            ids = np.full(len(new), -1, np.int64)
            ids[fits] = inverse
            context, suffix = np.divmod(keys, size)
            # The suffix of a seen n-gram was seen too, so its probability is in the table below.
            if m > 2:
                suffix = np.searchsorted(self._levels[-1].keys, below[context] * size + suffix)
            level = self._level(keys, num, len(below), lower[suffix])
            self._levels.append(level)
            lower, below = level.probs, suffix

    @classmethod
    def from_pair(cls, pair: Any) -> KatzModel:
        """Returns a trigram model of the pair's ``token_samples()``, built once per model pair."""
        if pair not in _COUNTED:
            _COUNTED[pair] = cls(
                pair.token_samples(), order=3, vocab_size=pair.vocab_size, separator=0
            )
        return _COUNTED[pair]

    def _level(
        self, keys: IntArray, counts: IntArray, num_contexts: int, lower: FloatArray
    ) -> _Level:
        """Computes one order's table; ``lower``[G] has P(last token | context less its first)."""
        size = self.vocab_size
        context, token = np.divmod(keys, size)
        total = np.bincount(context, counts, num_contexts)
        seen = np.bincount(context, minlength=num_contexts)
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

    # Lookup.

    def probs(self, contexts: Sequence[IntArray] | IntArray) -> FloatArray:
        """Returns the distributions after W contexts of any length, float64[W, V]."""
        rows = np.tile(self._unigrams, (len(contexts), 1))
        for row, context in zip(rows, contexts, strict=True):
            for level, grams, alpha in self._chain(context):
                row *= alpha
                row[level.tokens[grams]] = level.probs[grams]
        return rows

    def top(self, contexts: Sequence[IntArray] | IntArray, k: int) -> tuple[IntArray, FloatArray]:
        """Returns tokens int64[W, k] and log probabilities float64[W, k], best first; k <= V.

        Of equally probable tokens, those seen after a longer context come first, then lower ids.
        """
        if not 1 <= k <= self.vocab_size:
            raise ValueError(f"k={k} must be between 1 and the vocabulary size {self.vocab_size}")
        tokens, probs = np.zeros((len(contexts), k), np.int64), np.zeros((len(contexts), k))
        for row, context in enumerate(contexts):
            tokens[row], probs[row] = self._best(context, k)
        with np.errstate(divide="ignore"):
            return tokens, np.log(probs)

    def _best(self, context: IntArray, k: int) -> tuple[IntArray, FloatArray]:
        """Returns the ``k`` best continuations of one context and their probabilities, [k] each."""
        tokens, probs, scale = np.zeros(0, np.int64), np.zeros(0), 1.0
        chain = self._chain(context)
        parts = [(level.tokens[g], level.probs[g], alpha) for level, g, alpha in reversed(chain)]
        best = self._ranking[: k + sum(len(part[0]) for part in parts)]
        for own_tokens, own_probs, alpha in [*parts, (best, self._unigrams[best], 1.0)]:
            new = ~np.isin(own_tokens, tokens)  # a token counts where its context is longest
            tokens = np.concatenate([tokens, own_tokens[new]])
            probs = np.concatenate([probs, own_probs[new] * scale])
            scale *= alpha
        order = np.argsort(-probs, kind="stable")[:k]
        return tokens[order], probs[order]

    def _chain(self, context: IntArray) -> list[tuple[_Level, slice, float]]:
        """Returns (level, rows in it, back-off weight) per seen context suffix, shortest first."""
        tail = context[max(0, len(context) - self.order + 1) :].tolist()
        chain: list[tuple[_Level, slice, float]] = []
        for length in range(1, len(tail) + 1):
            index, *following = tail[-length:]
            for level, token in zip(self._levels[1:], following, strict=False):
                keys = level.keys
                key = index * self.vocab_size + token
                index = int(keys.searchsorted(key))
                if index == len(keys) or keys[index] != key:
                    return chain  # longer ones were not seen either
            level = self._levels[length]
            grams = slice(int(level.starts[index]), int(level.starts[index + 1]))
            if grams.start < grams.stop:
                chain.append((level, grams, float(level.alphas[index])))
        return chain


def discounts(counts: IntArray) -> FloatArray:
    """Returns the Good-Turing discount factors, in Katz's form, of counts int64[G >= 1].

    With n_r n-grams counted r times, k = 5 and r* = (r+1) n_{r+1}/n_r: d_r = (r*/r - (k+1)
    n_{k+1}/n_1) / (1 - (k+1) n_{k+1}/n_1) for r <= k, and 1 above. Where a count-of-counts is
    missing or a factor leaves (0, 1), k is lowered until none does. If no k >= 2 is left, absolute
    discounting takes its place: d_r = 1 - D/r for all r, with D = n_1 / (n_1 + 2 n_2), or 1/2 where
    n_1 or n_2 is 0.
    """
    num = np.bincount(np.minimum(counts, _MAX_DISCOUNTED + 2), minlength=_MAX_DISCOUNTED + 3)
    for k in range(_MAX_DISCOUNTED, 1, -1):
        if not num[1 : k + 2].all():
            continue
        r = np.arange(1, k + 1)
        rest = (k + 1) * num[k + 1] / num[1]
        if rest >= 1.0:
            continue
        factors = ((r + 1) * num[2 : k + 2] / (num[1 : k + 1] * r) - rest) / (1.0 - rest)
        if (factors > 0.0).all() and (factors < 1.0).all():
            table = np.concatenate([[1.0], factors, [1.0]])
            return table[np.minimum(counts, k + 1)]
    absolute = num[1] / (num[1] + 2 * num[2]) if num[1] and num[2] else 0.5
    return 1.0 - absolute / counts


class NGramSource(TokenSource):
    """Proposes continuations of each node's last ``order - 1`` tokens by a Katz n-gram model.

    This is the second-stage draft of Staged Speculative Decoding, section 3.2. Without ``katz``,
    trigrams of ``pair.token_samples()`` are counted. With ``sample``, candidates are sampled and
    come with their distribution, for verifiers that need ``draft_probs``.
    """

    def __init__(
        self,
        *,
        katz: KatzModel | None = None,
        pair: ModelPair | None = None,
        sample: bool = False,
    ) -> None:
        if katz is None:
            assert pair is not None, "either katz or pair is required"
            katz = pair.artefact(KatzModel)
        self.katz = katz
        self.gives_probs = sample
        self.vocab_size = katz.vocab_size

    def expand(self, state: DecodeState, nodes: Nodes, k: int) -> Candidates:
        requests = [(state.requests[request_id], ids) for request_id, ids in nodes.items]
        contexts = [r.path_tokens(slot) for r, ids in requests for slot in r.tree.slots(ids)]
        if self.gives_probs:
            return sampled_candidates(state, nodes, self.katz.probs(contexts), k)
        tokens, logprobs = self.katz.top(contexts, min(k, self.katz.vocab_size))
        counts = (logprobs > -np.inf).sum(axis=1)  # fewer after a context with all V tokens seen
        return Candidates(tokens=tokens, logprobs=logprobs, counts=counts)
