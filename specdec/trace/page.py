"""Renders each step's tree as one self-contained HTML page, for one run or two side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


@dataclass(frozen=True, slots=True)
class Track:
    """One run on the page."""

    title: str  # one line
    trees: Mapping[str, Any]  # content of ``trees.json``
    color: str = "#555555"  # of the strategy, as "#rrggbb"


def html_template(package: str, name: str) -> Template:
    """Loads an HTML template of a package, which escapes every inserted value."""
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(name)


def tree_page(trees: Mapping[str, Any], *, title: str = "") -> str:
    """Renders the page of one run from the content of its ``trees.json``.

    Raises:
        KeyError: ``trees`` has another format.
        ValueError: no step was recorded.
    """
    return tracks_page([Track(title, trees)], title=title or "Token trees")


def tracks_page(tracks: Sequence[Track], *, title: str) -> str:
    """Renders runs side by side; they must decode the same prompts with the same tokenizer.

    Steps are aligned by the number of tokens emitted before them.

    Raises:
        KeyError: the trees have another format.
        ValueError: no prompt has recorded steps in all of them, or a prompt differs in length.
    """
    prompts = [
        {r["id"]: r.get("prefix_len") for r in track.trees["requests"] if r["steps"]}
        for track in tracks
    ]
    common = set(prompts[0]).intersection(*prompts[1:])
    if not common:
        raise ValueError(
            "no step is on record: the run had no prompts left to decode"
            if len(tracks) == 1
            else "the runs have no prompt in common whose steps are on record"
        )
    for prompt in sorted(common, key=str):
        lengths = [own[prompt] for own in prompts]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"prompt {prompt} has {' and '.join(map(str, lengths))} tokens: run both on the"
                " same data with the same models"
            )
    data = {
        "text": {token: word for track in tracks for token, word in track.trees["text"].items()},
        "tracks": [
            {"title": track.title}
            | {key: track.trees[key] for key in ("clock", "latency", "truncated", "requests")}
            for track in tracks
        ],
    }
    # The filter ``tojson`` escapes <, >, & and ': a token cannot end the script.
    template = html_template("specdec.trace", "tree_page.html")
    return template.render(title=title, data=data, colors=[track.color for track in tracks])


def commit_kinds(trees: Mapping[str, Any]) -> dict[int, str]:
    """Maps each step to "hit", or to "miss" if any request missed."""
    steps = (step for request in trees["requests"] for step in request["steps"])
    # A miss comes after the hits of its step, and replaces them.
    return dict(sorted((s["step"], s["commit"]["kind"]) for s in steps if s["commit"]))
