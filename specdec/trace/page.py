"""The tree of each step as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def html_template(package: str, name: str) -> Template:
    """An HTML template of a package; every value that it inserts is escaped."""
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
    """The page: data, script and style in one file.

    Args:
        trees, title: content of ``trees.json``, and a description of the run in one line.

    Raises:
        KeyError: ``trees`` has another format.
        ValueError: no step was recorded.
    """
    if not any(request["steps"] for request in trees["requests"]):
        raise ValueError("no step is on record: the run had no prompts left to decode")
    data = {key: trees[key] for key in ("clock", "latency", "truncated", "text", "requests")}
    # The filter ``tojson`` escapes <, >, & and ': a token cannot end the script.
    template = html_template("specdec.trace", "tree_page.html")
    return template.render(title=title or "Token trees", data=data)


def commit_kinds(trees: Mapping[str, Any]) -> dict[int, str]:
    """Step -> "hit" or "miss"; "miss" if any request missed."""
    steps = (step for request in trees["requests"] for step in request["steps"])
    # A miss comes after the hits of its step, and replaces them.
    return dict(sorted((s["step"], s["commit"]["kind"]) for s in steps if s["commit"]))
