"""Suggestions for unknown words in error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_LISTED = 24


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggests a replacement for ``word``, which is not in ``known``.

    Returns:
        The closest known words as a question, then all known words if they are at most 24.
    """
    words = sorted(set(known))
    # A long dotted key is close to many others; its last part decides.
    near = get_close_matches(word, words, n=3, cutoff=0.6)
    near = near or [w for w in words if w.rpartition(".")[2] == word.rpartition(".")[2]][:3]
    question = f"did you mean {' or '.join(near)}?" if near else ""
    if not words or (near and len(words) > _MAX_LISTED):
        return question
    shown = words if len(words) <= _MAX_LISTED else [*words[:_MAX_LISTED], "..."]
    listed = f"choose one of {', '.join(shown)}"
    return f"{question} {listed[0].upper()}{listed[1:]}" if question else listed
