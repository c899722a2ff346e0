"""The tree step by step as one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

_DATA, _TITLE = "/*DATA*/", "<!--TITLE-->"


def tree_page(trees: Mapping[str, Any], *, title: str = "") -> str:
    """The page: data, script and style in one file.

    Args:
        trees: content of ``trees.json``.
        title: what ran, in one line.

    Raises:
        KeyError: it is not one of ours.
        ValueError: no step is on record.
    """
    if not any(request["steps"] for request in trees["requests"]):
        raise ValueError("no step is on record: the run had no prompts left to decode")
    keys = ("clock", "latency", "truncated", "text", "requests")
    data = json.dumps({key: trees[key] for key in keys}, separators=(",", ":"))
    template = resources.files("specdec.trace").joinpath("tree_page.html").read_text("utf-8")
    assert template.count(_DATA) == 1, "the page has one place for the data"
    # "</script>" inside a token's text must not end the script.
    filled = template.replace(_TITLE, escape(title or "Token trees"))
    return filled.replace(_DATA, data.replace("</", "<\\/").replace("<!--", "<\\u0021--"))


def commit_kinds(trees: Mapping[str, Any]) -> dict[int, str]:
    """Step -> hit or miss; a miss of any request makes the step one."""
    kinds: dict[int, str] = {}
    for request in trees["requests"]:
        for step in request["steps"]:
            if step["commit"] and kinds.get(step["step"]) != "miss":
                kinds[step["step"]] = step["commit"]["kind"]
    return kinds
