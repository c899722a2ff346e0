"""Shows which source proposed each token, by colour (Staged Speculative Decoding, Fig. 3)."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from markupsafe import Markup

from specdec.metrics.results import RequestResult

PALETTE = ("#d9e7f7", "#fbdfae", "#cfe8c6", "#f3cfe3", "#d8d0f0", "#c9e6e6")
"""Background colours of sources 0, 1, ...; tokens of the target have none."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoding of an incomplete character


class TextPiece(NamedTuple):
    text: str
    origin: int


def token_ends(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Finds the end index of each token's text within the whole text, by incremental decoding.

    Tokenizers may drop a leading space, so each token is decoded with the preceding ones up to the
    last complete character. A character belongs to the token that completes it.
    """
    ends: list[int] = []
    begin, seen, end = 0, 0, 0  # window [begin, i]; the text of [begin, seen) ends at ``end``
    for i in range(len(tokens)):
        before, now = decode(tokens[begin:seen]), decode(tokens[begin : i + 1])
        if len(now) > len(before) and not now.endswith(_REPLACEMENT):
            end += len(now) - len(before)
            begin, seen = seen, i + 1
        ends.append(end)
    return ends


def pieces(result: RequestResult, ends: Sequence[int] | None) -> list[TextPiece]:
    """Splits the output text into runs of tokens that the same source proposed. ``ends`` has the
    end of each token's text (``token_ends``); without it, each token is printed as ``#<id>``.
    """
    if ends is None or len(ends) != len(result.output):
        texts = [f"#{token} " for token in result.output]
    else:
        bounds = [0, *(min(end, len(result.text)) for end in ends)]
        bounds[-1] = len(result.text)
        texts = [result.text[a:b] for a, b in pairwise(bounds)]
    runs = groupby(map(TextPiece, texts, result.origins), key=lambda piece: piece.origin)
    return [TextPiece("".join(piece.text for piece in run), origin) for origin, run in runs]


def origin_names(config: Mapping[str, Any]) -> dict[int, str]:
    """Maps each source index in a resolved configuration to a name; -1 is the target."""
    source = config.get("source")
    if not source:  # decoding by transformers
        method = str(config["strategy"].get("method", ""))
        return {-1: "target", 0: "prompt lookup" if "lookup" in method else "draft model"}
    draft, nodes = source.get("draft"), source.get("sources")
    if not isinstance(nodes, list):
        nodes = [draft if isinstance(draft, Mapping) else source]
    return {-1: "target"} | {i: _name(node) for i, node in enumerate(nodes)}


def _name(node: Mapping[str, Any]) -> str:
    cls = str(node["_target_"]).rpartition(".")[2].removesuffix("Source")
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]*", cls)
    return "n-gram" if cls == "NGram" else " ".join(words).lower()


def shares(results: Iterable[RequestResult]) -> dict[int, float]:
    counts = Counter(origin for result in results for origin in result.origins)
    return {origin: counts[origin] / counts.total() for origin in sorted(counts)}


def html_text(result: RequestResult, ends: Sequence[int] | None) -> Markup:
    """Renders the output as escaped HTML, with a span of class ``o<i>`` for text of source i."""
    span = Markup('<span class="o{}">{}</span>')
    return Markup("").join(
        p.text if p.origin < 0 else span.format(p.origin % len(PALETTE), p.text)
        for p in pieces(result, ends)
    )
