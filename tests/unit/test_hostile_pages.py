"""Text from prompts, outputs, tokens and names is shown by the pages, and never becomes markup.

The pages are parsed: hostile texts add no element and no attribute.
"""

import json
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.trace.files import tree_page
from tests.unit.test_results import comparison  # noqa: F401 - a fixture

MARK = "document.title='INJECTED'"
HOSTILE = [
    f"<script>{MARK}</script>",
    f"</script><script>{MARK}</script>",
    f"</pre></style></title></iframe><img src=x onerror={MARK}>",
    f'"><svg onload="{MARK}"></svg>',
    f"' onmouseover='{MARK}' x='",
    f"<!--<script>{MARK}//--><b>",
    f"{{{{ 7 * 7 }}}}{{% raw %}}<a href=javascript:{MARK}>x</a>",
    f"&lt;script&gt;{MARK}&lt;/script&gt;&#60;script&#62;",
    "\u2028\u2029\u202e\0\ufeff]]>",
]
NAME = f"<img src=x onerror={MARK}>\"'&</title>".replace("/", "|")


class Elements(HTMLParser):
    """Counts elements with their attributes' names; keeps frames, scripts and text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: Counter[tuple[str, ...]] = Counter()
        self.frames: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.found[tag, *sorted(name for name, _ in attrs)] += 1
        for name, value in attrs:
            if name == "srcdoc":
                self.frames.append(value or "")
            elif name in ("src", "href", "action", "style"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        else:
            self.text += data


def trees_of(texts: list[str], request: str = "0") -> dict[str, Any]:
    """Trees of one request whose tokens have these texts."""
    nodes = [[i, i - 1, i, 4 + i, -0.5, 0] for i in range(len(texts))]
    commit = {"kind": "hit", "retired": [0], "root": 1, "next_token": 1, "accepted": []}
    steps = [
        {
            **{"step": 0, "time_s": 0.1, "nodes": nodes, "submitted": [0, 1], "answers": [[0, 1]]},
            "commit": commit,
        }
    ]
    return {
        **{"clock": "measured", "latency": 1, "truncated": False},
        "text": {str(i): text for i, text in enumerate(texts)},
        "requests": [{"id": request, "steps": steps}],
    }


def write_run(folder: Path, source: Path, texts: list[str], name: str) -> Path:
    """A comparison with these texts everywhere that the page shows text."""
    shutil.copytree(source, folder)
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    ends: dict[str, Any] = {}
    for number, line in enumerate(lines):
        line["text"] = texts[number % len(texts)]
        line["prompt"] = name
        size = len(line["output"])
        ends.setdefault(line["strategy"], {})[str(line["id"])] = [len(line["text"])] * size
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "token_ends.json").write_text(json.dumps(ends))
    stored = json.loads((folder / "comparison.json").read_text())
    stored["conditions"] |= {"data": name, "sampling": {name: name}, "clock_profile": name}
    for row in stored["rows"]:
        row["caveat"] = name
        row["disturbed"], row["disturbed_because"] = 1, name
    (folder / "comparison.json").write_text(json.dumps(stored))
    (folder / "provenance.json").write_text(json.dumps({"command": texts, name: name}))
    failed = [{"job": name, "status": "failed", "error": texts[1]}]
    (folder / "sweep.json").write_text(json.dumps(failed))
    (folder / "trees.json").write_text(json.dumps(trees_of(texts, name)))
    return folder


def report_of(folder: Path) -> str:
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_parser_would_see_it() -> None:
    """Control: the same texts without escapes add elements and attributes."""
    found = Elements("<p>" + "".join(HOSTILE) + "</p>").found
    assert found["script",]
    assert found["img", "onerror", "src"]
    assert found["svg", "onload"]


@pytest.mark.slow
def test_hostile_text_adds_no_element_and_no_attribute(
    comparison: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Reports of harmless and of hostile texts have the same elements, trees included."""
    harmless = ["harmless"] * len(HOSTILE)
    plain, hostile = (
        Elements(report_of(write_run(tmp_path / name, comparison, texts, name)))
        for name, texts in (("name", harmless), (NAME, HOSTILE))
    )
    assert hostile.found == plain.found
    assert hostile.scripts == []
    assert all(link.startswith("data:image/png;base64,") for link in hostile.links)
    assert not any(n.startswith("on") for _, *names in hostile.found for n in names)
    for text in (NAME, HOSTILE[1]):
        assert text in hostile.text
    (frame,), (hostile_frame,) = plain.frames, hostile.frames
    assert Elements(hostile_frame).found == Elements(frame).found
    assert len(Elements(hostile_frame).scripts) == 1


def test_tokens_stay_in_the_data_of_the_script() -> None:
    plain = Elements(tree_page(trees_of(["x"] * 9), title=""))
    hostile = Elements(tree_page(trees_of(HOSTILE, NAME), title=NAME))
    assert hostile.found == plain.found
    (script,) = hostile.scripts
    start = script.index("const data = ") + len("const data = ")
    data, _ = json.JSONDecoder().raw_decode(script[start:])
    assert list(data["text"].values()) == HOSTILE
    assert "<" not in script[start : script.index("\n", start)]
