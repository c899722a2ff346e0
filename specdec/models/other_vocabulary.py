"""Gives a model another tokenizer: renumbered, with fewer merges and with new tokens.

This makes pairs with two tokenizers without training, for ``model=random`` and for tests and
measurements of ``source=translated``.

Shape letters: U tokens of the new vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import product
from math import isqrt
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_SPACE = "\u0120"  # the space of byte-level BPE
_LETTERS = [_SPACE, *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789."]


def simple_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Returns tokenizer.json of a byte-level BPE tokenizer: letters, then pairs of letters.

    There are at most 64 letters, so that a text can be cut into tokens in many ways. Tokens beyond
    all pairs have no text.
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
    """Returns (distance, number, letter) of all pairs of letters, near ones first."""
    numbers = range(1, len(letters) + 1), range(len(letters))
    return [(d, n, letters[n]) for d, n in product(*numbers)]


def other_tokenizer(
    described: dict[str, Any], *, merges: int, joined: int = 0, seed: int = 0
) -> tuple[dict[str, Any], list[list[int]]]:
    """Derives another byte-level BPE tokenizer from the tokenizer.json ``described``.

    It keeps the first ``merges`` merges, so that tokens of the others are dropped, and adds
    ``joined`` tokens, each joined from two kept ones. Returns its tokenizer.json, and the old
    tokens that each new token's text consists of. ``seed`` determines the numbers of tokens and the
    pairs.
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
    """Creates transformers' tokenizer from tokenizer.json; ``special`` may be ``eos_token`` etc."""
    backend = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def with_vocabulary(model: PreTrainedModel, parts: Sequence[Sequence[int]]) -> PreTrainedModel:
    """Returns a copy of a model with other tokens; ``parts`` lists the old tokens of each new one.

    The rows of a new token are the means of those of its old tokens.
    """
    changed = copy.deepcopy(model)
    inputs, outputs = changed.get_input_embeddings(), changed.get_output_embeddings()
    tied = inputs.weight is outputs.weight
    inputs.weight = _rows(inputs.weight, parts)
    inputs.num_embeddings = len(parts)
    outputs.weight = inputs.weight if tied else _rows(outputs.weight, parts)
    outputs.out_features = len(parts)
    if getattr(outputs, "bias", None) is not None:
        outputs.bias = _rows(outputs.bias, parts)
    changed.config.get_text_config().vocab_size = len(parts)
    return changed


def _rows(weight: nn.Parameter, parts: Sequence[Sequence[int]]) -> nn.Parameter:
    rows = [weight[torch.tensor(tokens).to(weight.device)].mean(dim=0) for tokens in parts]
    return nn.Parameter(torch.stack(rows), requires_grad=False)
