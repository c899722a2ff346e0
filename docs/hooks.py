"""Hooks of mkdocs: order of the pages, page of configuration keys, check of shown examples."""

from __future__ import annotations

import re
from html import escape, unescape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from specdec.config.options import CONFIG_DIR, GROUPS, first_comment, options

NAV: dict[str, list[str]] = {
    "Start": [
        "index.md",
        "models_and_data.md",
        "real_model.md",
        "python.md",
        "transformers.md",
        "adding.md",
    ],
    "How it works": [
        "strategies.md",
        "architecture.md",
        "specpipe.md",
        "swiftspec.md",
        "asynchronous.md",
        "early_exit.md",
        "medusa.md",
        "eagle.md",
        "suffix.md",
        "translated.md",
        "staged.md",
        "adaptive.md",
        "training.md",
        "serving.md",
    ],
    "Where it runs": [
        "plan.md",
        "backends.md",
        "distributed.md",
        "gpu.md",
        "sizes.md",
        "clocks.md",
        "replay.md",
        "calibration.md",
    ],
    "Looking at results": [
        "results.md",
        "metrics.md",
        "trace.md",
        "verify.md",
        "exact.md",
        "reproduction.md",
    ],
    "Reference": ["configuration.md", "support.md", "api.md", "glossary.md", "limits.md"],
}
"""Section -> pages; a page that is not listed is a warning of mkdocs (``omitted_files``)."""

CONFIGURATION = "configuration.md"
ROOTS = ("config", "compare", "profiling")
_OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./([^)#]+)\)")  # links to files of the repository
_TITLED = re.compile(r'^```\w+ title="([^"]+)"$', re.MULTILINE)
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w.]+): *(?P<value>[^#]*?)(?: +# (?P<about>.*))?$")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = [{section: pages} for section, pages in NAV.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page of configuration keys, generated from the YAML files' comments."""
    files.append(File.generated(config, CONFIGURATION, content=configuration_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files beside docs/, which work in the repository, name the file in the site."""

    def named(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        if path == "conf/":
            return f"[{text}]({CONFIGURATION})"
        return text if path in text else f"{text} (`{path}`)"

    return _OUTSIDE.sub(named, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Checks that every example shown by a page is in its HTML, as it is in docs/examples.

    Raises:
        PluginError: the code differs from the file or was lost in the conversion.
    """
    shown = unescape(re.sub(r"<[^>]*>", "", output))
    for name in _TITLED.findall(page.markdown or ""):
        code = (Path(config.docs_dir) / "examples" / name).read_text(encoding="utf-8")
        if code.strip() not in shown:
            raise PluginError(f"{page.file.src_uri}: the built page lacks docs/examples/{name}")
    return output


def configuration_page() -> str:
    """Every key of every file of the configuration tree, with its default and its comment."""
    lines = [
        "# Configuration",
        "",
        "Every key, with its default and what its YAML says about it. `group=option` chooses a"
        " file, `group.key=value` sets a key of it; `specdec run --cfg ...` prints what a command"
        " line composes. Options of your own: [Adding a part](adding.md).",
        "",
    ]
    for root in ROOTS:
        path = CONFIG_DIR / f"{root}.yaml"
        lines += _section(f"`{root}.yaml`", first_comment(path), path, level=2)
    for group in (*GROUPS, "profile"):
        lines += [f"## `{group}=`" if group != "profile" else "## `clock.profile=`", ""]
        shared = CONFIG_DIR / group / "_keys.yaml"
        if shared.is_file():
            lines += _section("Keys of every option", "", shared, level=3)
        for name, path in options(group).items():
            lines += _section(f"`{group}={name}`", first_comment(path), path, level=3)
    for path in sorted((CONFIG_DIR / "train").glob("*.yaml")):
        what = "" if path.stem.startswith("_") else f" {path.stem}"
        lines += _section(f"`specdec train{what}`", first_comment(path), path, level=2)
    return "\n".join(lines) + "\n"


def _section(title: str, about: str, path: Path, *, level: int) -> list[str]:
    rows = _rows(path.read_text(encoding="utf-8"))
    lines = [f"{'#' * level} {title}", "", escape(about, quote=False), ""]
    if rows:
        lines += ["| key | default | |", "| --- | --- | --- |"]
        lines += [f"| `{key}` | {_code(value)} | {about} |" for key, value, about in rows]
        lines.append("")
    return lines


def _rows(text: str) -> list[tuple[str, str, str]]:
    """(dotted key, value, comment) of a YAML file; lists of mappings are left out."""
    rows: list[tuple[str, str, str]] = []
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _KEY.match(line)
        if match is None or match["key"] in ("defaults", "hydra"):
            if match is not None:
                above = [(len(match["indent"]), "")]
            continue
        indent = len(match["indent"])
        above = [entry for entry in above if entry[0] < indent]
        if any(not key for _, key in above):  # below defaults or hydra
            continue
        key = ".".join([*(key for _, key in above), match["key"]])
        if not match["value"].strip():
            above.append((indent, match["key"]))
            continue
        rows.append((key, match["value"].strip(), escape(match["about"] or "", quote=False)))
    return [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]  # type: ignore[misc]


def _code(value: str) -> str:
    return f"`{value}`" if len(value) <= 60 else f"`{value[:57]}...`"
