"""The tree viewer: where it opens, its keys, and two runs side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specdec.trace.page import Track, tracks_page, tree_page
from tests.browser import browser, opened


def trees(*paths: int, prompt: int = 0, prefix_len: int = 5) -> dict[str, Any]:
    """A run that accepts so many draft tokens in each step, and then the target's own.

    Every tree is a root, the accepted chain and one sibling; accepted tokens are their positions.
    """
    steps: list[dict[str, Any]] = []
    position = prefix_len - 1
    for number, accepted in enumerate(paths):
        root = 100 * number
        chain = [
            [root + depth, root + depth - 1, position + depth, position + depth, -0.1, 0]
            for depth in range(1, accepted + 1)
        ]
        sibling = [root + 50, root, 900 + number, position + 1, -2.0, 0]
        ids = list(range(root, root + accepted + 1))
        position += accepted + 1
        commit = {"kind": "miss", "retired": ids, "next_token": position, "root": root + 100}
        steps.append(
            {
                **{"step": number, "time_s": 0.01 * number, "submitted": ids},
                "nodes": [[root, -1, position - accepted - 1, position - accepted - 1, 0.0, 0]]
                + [*chain, sibling],
                **{"answers": [[i, 0] for i in ids], "commit": commit},
            }
        )
    return {
        **{"clock": "simulated", "latency": 1, "truncated": False, "text": {}},
        "requests": [{"id": prompt, "prefix_len": prefix_len, "steps": steps}],
    }


def data_of(page: str) -> dict[str, Any]:
    start = page.index("const data = ") + len("const data = ")
    return dict(json.JSONDecoder().raw_decode(page[start:])[0])


def test_two_runs_are_on_one_page() -> None:
    page = tracks_page(
        [Track("one <b>", trees(1, 2), "#123456"), Track("two", trees(0, 0, 0))], title="a & b"
    )
    assert [track["title"] for track in data_of(page)["tracks"]] == ["one <b>", "two"]
    assert ".t0 { background: #123456; }" in page
    assert "one <b>" not in page


def test_runs_that_cannot_be_aligned_are_refused() -> None:
    with pytest.raises(ValueError, match="no prompt in common"):
        tracks_page([Track("a", trees(1)), Track("b", trees(1, prompt=1))], title="")
    with pytest.raises(ValueError, match="5 and 6 tokens"):
        tracks_page([Track("a", trees(1)), Track("b", trees(1, prefix_len=6))], title="")
    with pytest.raises(ValueError, match="no step is on record"):
        tree_page(trees())


_REPORT = """
<script>
const seen = [];
const note = () => seen.push([at, panes.map(p => p.frames[stops[at][panes.indexOf(p)]].old)]);
const press = key => { document.body.dispatchEvent(
  new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true})); note(); };
note();
for (const key of KEYS_PRESSED) press(key);
const pane = panes[0], box = pane.output.getBoundingClientRect();
document.title = JSON.stringify({
  seen, stops, playing: $("play").textContent, differ: $("differ").textContent,
  outputSeen: box.top >= 0 && box.bottom <= innerHeight + 1 && box.height > 20,
  scrolls: document.documentElement.scrollHeight > innerHeight + 1,
  across: document.documentElement.scrollWidth > innerWidth + 1,
  svg: pane.stage.querySelector("svg").getBoundingClientRect().width, stage: pane.stage.clientWidth,
});
</script>
"""


def driven(page: str, folder: Path, *keys: str, width: int = 1280) -> dict[str, Any]:
    """What a page shows after key presses."""
    script = _REPORT.replace("KEYS_PRESSED", json.dumps(list(keys)))
    path = folder / "driven.html"
    path.write_text(page.replace("</body>", script + "</body>"), encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", opened(path, width=width, height=700))
    assert title is not None
    return dict(json.loads(title[1].replace("&amp;", "&").replace("&gt;", ">")))


@pytest.mark.slow
@pytest.mark.skipif(browser() is None, reason="no browser: set SPECDEC_BROWSER to a Chromium")
class TestInABrowser:
    def test_opens_where_several_tokens_are_accepted_and_obeys_keys(self, tmp_path: Path) -> None:
        page = tree_page(trees(0, 1, 3, 0, 2))
        keys = ("ArrowRight", "ArrowLeft", "Home", "ArrowLeft", "End", "Home", "m", " ")
        found = driven(page, tmp_path, *keys)
        assert [at for at, _ in found["seen"]] == [2, 3, 2, 0, 0, 4, 0, 1, 1]
        assert found["playing"] == "pause"

    def test_steps_are_aligned_by_emitted_tokens(self, tmp_path: Path) -> None:
        """The second run emits one token a step: at every stop it has as many as the first."""
        page = tracks_page([Track("a", trees(1, 2, 0)), Track("b", trees(*[0] * 6))], title="t")
        found = driven(page, tmp_path, "Home", *["ArrowRight"] * 5)
        assert found["stops"] == [[0, 0], [0, 1], [1, 2], [1, 3], [1, 4], [2, 5]]
        assert found["seen"][-1] == [5, [5, 5]]
        assert found["differ"] == ""
