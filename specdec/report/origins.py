"""Which source proposed which token: names, texts per token, and the text in colours.

Staged Speculative Decoding (2308.04623), Figure 3: the output with every token in the colour of the
model that it came from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from specdec.files import write_json
from specdec.metrics.results import RequestResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDS_FILE = "token_ends.json"
"""In a run folder: strategy -> prompt id -> where each token's text ends within the output's."""

TARGET = -1
TARGET_NAME = "target"

PALETTE = ("#d9e7f7", "#fbdfae", "#cfe8c6", "#f3cfe3", "#d8d0f0", "#c9e6e6")
"""Background colours of sources 0, 1, ...; the target's tokens have none."""

_TERMINAL = ("blue", "yellow", "green", "magenta", "cyan", "bright_black")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # an unfinished character of several bytes

_POINTS = 8.0  # of the picture's face; DejaVu Sans Mono advances 0.602 em
_WIDE, _HIGH = 0.602 * _POINTS / 72, 1.35 * _POINTS / 72  # a character, inches
_MARGIN, _HEAD = 0.15, 0.55  # inches

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of output from one source: its text, and the source's index (-1 the target)."""

    text: str
    origin: int


def token_ends(tokens: Sequence[int], decode: Decode) -> list[int]:
    """Where each token's text ends in the whole text, by decoding as it would be streamed.

    A token that leaves a character unfinished ends where the one before ends; the token that
    completes it gets the character.

    Args:
        tokens: one output.
        decode: token ids -> text. Tokenizers may drop a leading space, so tokens are never decoded
            alone, but behind the last ones that ended with a whole character.
    """
    ends: list[int] = []
    begin, seen, end = 0, 0, 0  # window [begin, i]; text of [begin, seen) has been given out
    for i in range(len(tokens)):
        before, now = decode(tokens[begin:seen]), decode(tokens[begin : i + 1])
        if len(now) > len(before) and not now.endswith(_REPLACEMENT):
            end += len(now) - len(before)
            begin, seen = seen, i + 1
        ends.append(end)
    return ends


def write_token_ends(
    folder: str | Path, results: Mapping[str, Iterable[RequestResult]], tokenizer: Any
) -> Path | None:
    """Writes what a report needs to lay texts over tokens; nothing without a tokenizer.

    Args:
        folder: the run folder.
        results: strategy -> finished prompts (of one repeat).
        tokenizer: of the models, as transformers makes them, or None.
    """
    if tokenizer is None:
        return None

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    found = {
        strategy: {str(r.id): token_ends(r.output, decode) for r in outputs}
        for strategy, outputs in results.items()
    }
    return write_json(Path(folder) / ENDS_FILE, found)


def pieces(result: RequestResult, ends: Sequence[int] | None) -> list[Piece]:
    """The output in order, neighbours of one source joined.

    Without ``ends`` (no tokenizer, or an interrupted run) tokens are shown by their numbers.
    """
    if ends is None or len(ends) != len(result.output):
        texts = [f"#{token} " for token in result.output]
    else:
        marks = [0, *(min(end, len(result.text)) for end in ends)]
        marks[-1] = len(result.text)
        texts = [result.text[a:b] for a, b in pairwise(marks)]
    found: list[Piece] = []
    for text, origin in zip(texts, result.origins, strict=True):
        if found and found[-1].origin == origin:
            found[-1] = Piece(found[-1].text + text, origin)
        else:
            found.append(Piece(text, origin))
    return found


def origin_names(config: Mapping[str, Any]) -> dict[int, str]:
    """Index of a source -> its name, as a resolved configuration composes them; -1 the target."""
    names = {TARGET: TARGET_NAME}
    source, policy = config.get("source"), config.get("policy")
    if not source:  # transformers' own
        method = str(config["strategy"].get("method", ""))
        return {**names, 0: "prompt lookup" if "lookup" in method else "draft model"}
    nested = source.get("sources")
    if isinstance(nested, list):
        return names | {i: _name(node) for i, node in enumerate(nested)}
    # A tree that a cheaper source extends counts the cheaper one as 1 (policies.staged).
    if policy and "inner" in policy and isinstance(source.get("cheap"), Mapping):
        return {**names, 0: _name(source["draft"]), 1: _name(source["cheap"])}
    inside = source.get("draft")
    return {**names, 0: _name(inside if isinstance(inside, Mapping) else source)}


def shares(results: Iterable[RequestResult]) -> dict[int, float]:
    """Origin -> share of the generated tokens, in order of the origins."""
    counts: Counter[int] = Counter()
    for result in results:
        counts.update(result.origins)
    total = sum(counts.values())
    return {origin: counts[origin] / total for origin in sorted(counts)} if total else {}


def terminal_text(result: RequestResult, ends: Sequence[int] | None) -> Text:
    """The output for a terminal, sources by background colour."""
    text = Text()
    for piece in pieces(result, ends):
        text.append(piece.text, style=terminal_style(piece.origin))
    return text


def terminal_style(origin: int) -> str:
    """rich's style of a source."""
    return "" if origin < 0 else f"black on {_TERMINAL[origin % len(_TERMINAL)]}"


def html_text(result: RequestResult, ends: Sequence[int] | None) -> str:
    """The output as HTML spans of the classes ``o0``, ``o1``, ...; the target's text is bare."""
    return "".join(
        escape(p.text)
        if p.origin < 0
        else f'<span class="o{p.origin % len(PALETTE)}">{escape(p.text)}</span>'
        for p in pieces(result, ends)
    )


def origins_png(
    result: RequestResult,
    ends: Sequence[int] | None,
    names: Mapping[int, str],
    *,
    title: str = "",
    columns: int = 100,
    max_lines: int = 60,
) -> bytes:
    """The output as a picture, set in a fixed-width face on the colours of its sources.

    Args:
        result: a finished prompt.
        ends: its ``token_ends``.
        names: origin -> name, for the legend.
        title: one line above.
        columns: characters per line; longer lines are broken.
        max_lines: lines shown; what follows is left out, which the picture says.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = _lines(pieces(result, ends), columns)
    shown = lines[:max_lines]
    width, height = columns * _WIDE + 2 * _MARGIN, len(shown) * _HIGH + _HEAD + _MARGIN
    figure = Figure((width, height), dpi=150)
    FigureCanvasAgg(figure)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    for row, line in enumerate(shown):
        _draw_line(ax, line, _HEAD + row * _HIGH)
    left_out = len(lines) - len(shown)
    more = f"  ({left_out} more line{'s' if left_out > 1 else ''})" if left_out else ""
    ax.text(_MARGIN, 0.17, f"{title}{more}", fontsize=9, va="center", parse_math=False)
    _draw_legend(figure, shares([result]), names)
    stream = BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _draw_line(ax: Axes, line: Iterable[Piece], top: float) -> None:
    """One line of text on the colours of its sources; ``top`` in inches."""
    from matplotlib.patches import Rectangle

    face: dict[str, Any] = {"family": "DejaVu Sans Mono", "fontsize": _POINTS, "va": "center"}
    left = _MARGIN
    for piece in line:
        width = len(piece.text) * _WIDE
        if piece.origin >= 0:
            color = PALETTE[piece.origin % len(PALETTE)]
            ax.add_patch(Rectangle((left, top), width, _HIGH, color=color, lw=0))
        ax.text(left, top + 0.52 * _HIGH, piece.text, parse_math=False, **face)
        left += width


def _draw_legend(figure: Figure, used: Mapping[int, float], names: Mapping[int, str]) -> None:
    from matplotlib.patches import Patch

    width, height = figure.get_size_inches()
    handles = [
        Patch(
            facecolor="white" if o < 0 else PALETTE[o % len(PALETTE)],
            edgecolor="#999999",
            lw=0.5,
            label=f"{names.get(o, f'source {o}')} {100 * share:.0f} %",
        )
        for o, share in used.items()
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(_MARGIN / width, 1 - 0.25 / height),
        ncols=max(1, len(handles)),
        fontsize=7.5,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
    )


def _lines(found: Iterable[Piece], columns: int) -> list[list[Piece]]:
    """Pieces broken at line ends and at the right edge; tabs are four spaces."""
    lines: list[list[Piece]] = [[]]
    room = columns
    for piece in found:
        for part in re.split(r"(\n)", piece.text.replace("\t", "    ").replace("\r", "")):
            if part == "\n":
                lines.append([])
                room = columns
                continue
            while part:
                if not room:
                    lines.append([])
                    room = columns
                lines[-1].append(Piece(part[:room], piece.origin))
                part, room = part[room:], room - len(part[:room])
    return lines


def _name(node: Mapping[str, Any]) -> str:
    """A part's class in words: DraftModelSource is "draft model"."""
    cls = str(node["_target_"]).rpartition(".")[2].removesuffix("Source")
    known = {"NGram": "n-gram"}
    return known.get(cls) or " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]*", cls)).lower()
