"""Gives each strategy the same colour and form (marker, line, hatch) in every picture.

There are ten colours, and grey for plain decoding. Readers with protanopia or deuteranopia can
tell them apart (tests/unit/test_styles.py computes the distances). Presets that share a colour
differ in their form.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any
from zlib import crc32

GREY = "#555555"
COLORS = (  # blue, orange, vermilion, green, violet, lavender, light blue, brown, olive, navy
    *("#0070a8", "#f0a007", "#d05002", "#00a26d", "#5917b2", "#a99dc5", "#649cfe", "#553113"),
    *("#87a448", "#2d2e6b"),
)
_PRESETS: Mapping[str, tuple[str, ...]] = {
    GREY: (
        *("ar", "hf_generate", "ort_generate", "openvino_generate", "endpoint"),
        "llamacpp_generate",
    ),
    COLORS[0]: ("specpipe", "eagle", "ppsd", "hf_prompt_lookup", "translated"),
    COLORS[1]: ("specinfer", "pearl", "medusa", "eesd", "openvino_draft"),
    COLORS[2]: ("speculative", "eagle2", "specpipe_db", "ort_lookup", "openvino_lookup"),
    COLORS[3]: ("best_first", "specpipe_bf", "ssd", "ppsd_tree", "dspark"),
    COLORS[4]: ("pipedec", "hf_assisted", "flowspec", "ddtree", "eesd_ts"),
    COLORS[5]: ("staged", "pipeinfer", "swiftspec_base", "ppsd_multi"),
    COLORS[6]: ("prompt_lookup", "amusd", "fixed_width", "ort_draft", "dflash"),
    COLORS[7]: ("swiftspec", "mixture", "specpipe_db_adaptive", "eesd_multi"),
    COLORS[8]: ("suffix", "pipespec", "llamacpp_draft", "mtp"),
    COLORS[9]: ("eagle3", "dsi", "adaptive", "llamacpp_ngram"),
}
"""Colour -> presets, in the order of their forms. Presets often compared differ in colour."""

_FORMS = (  # marker, line and hatch
    *(("o", "-", ""), ("s", "--", "//"), ("^", "-.", ".."), ("D", ":", "xx")),
    *(("v", (0, (5, 1)), "\\\\"), ("P", (0, (3, 1, 1, 1)), "++")),
)


@dataclass(frozen=True, slots=True)
class Style:
    """Style of a strategy in plots: a colour and an index into ``_FORMS`` (marker, line, hatch)."""

    color: str
    form: int = 0

    def line(self) -> dict[str, Any]:
        marker, line, _ = _FORMS[self.form % len(_FORMS)]
        return {"color": self.color, "marker": marker, "ls": line}

    def bar(self) -> dict[str, Any]:
        *_, hatch = _FORMS[self.form % len(_FORMS)]
        return {"color": self.color, "hatch": hatch, "edgecolor": "white", "lw": 0.0}


PRESETS: Mapping[str, Style] = {
    name: Style(color, form) for color, names in _PRESETS.items() for form, name in enumerate(names)
}


def row_styles(rows: Mapping[str, str] | Iterable[str]) -> dict[str, Style]:
    """Assigns distinct styles to a figure's rows (names, or name -> strategy). The first row of a
    preset gets the preset's style. Any other gets a free colour, the first one from a starting
    colour that depends on the row's name alone.
    """
    named = dict(rows) if isinstance(rows, Mapping) else {name: name for name in rows}
    styles: dict[str, Style] = {}
    for row, strategy in named.items():
        own = PRESETS.get(strategy)
        if own is not None and own not in styles.values():
            styles[row] = own
    for row in named:
        if row not in styles:
            styles[row] = _free(row, styles.values())
    return {row: styles[row] for row in named}


def _free(name: str, taken: Collection[Style]) -> Style:
    """Returns the first style with a free colour; if there is none, the first free style."""
    start, used = crc32(name.encode()) % len(COLORS), {style.color for style in taken}
    turned = (*COLORS[start:], *COLORS[:start])
    fresh = (Style(color) for color in turned if color not in used)
    others = (Style(color, form) for form in count() for color in turned)
    return next(style for style in chain(fresh, others) if style not in taken)
