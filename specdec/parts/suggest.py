from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_LISTED = 24


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown word: close matches, and a list of the known words.

    The list is cut after 24 words. It is omitted where it would be cut and there are close matches.
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
