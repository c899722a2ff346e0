"""Pictures and the report page agree with the counts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from specdec.cli.main import main
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.metrics.rates import drafted_by_context, drafted_by_position
from specdec.report.origins import (
    TextPiece,
    html_text,
    origin_names,
    pieces,
    shares,
    token_ends,
)
from specdec.report.page import load_report, write_leaderboard
from specdec.report.plots import mean_emission, rate_by_position
from specdec.report.tables import title_of
from tests.unit.test_metrics import make_result
from tests.unit.test_results import sweep  # noqa: F401 - a fixture

BYTES = [b" caf", b"\xc3", b"\xa9", b" <b>", b"\xe2\x82", b"\xac", b"\n  x"]


def decode(tokens: list[int]) -> str:
    """Decodes byte tokens; like Llama's tokenizer, drops a leading space."""
    text = b"".join(BYTES[t] for t in tokens).decode("utf-8", errors="replace")
    return text.removeprefix(" ")


def colored() -> tuple[object, list[int]]:
    tokens = list(range(len(BYTES)))
    result = make_result([tokens])
    origins = (0, 0, -1, 1, 1, 1, -1)
    return replace(result, origins=origins, text=decode(tokens)), token_ends(tokens, decode)


def test_token_texts_add_up_to_the_text() -> None:
    """Characters of several tokens and dropped leading spaces are each assigned once."""
    result, ends = colored()
    assert result.text == "caf\u00e9 <b>\u20ac\n  x"
    assert ends[-1] == len(result.text)
    assert ends == sorted(ends)
    found = pieces(result, ends)
    assert "".join(p.text for p in found) == result.text
    assert found == [
        TextPiece("caf", 0),
        TextPiece("\u00e9", -1),  # completed by the target's token
        TextPiece(" <b>\u20ac", 1),
        TextPiece("\n  x", -1),
    ]


def test_html_shows_the_sources() -> None:
    result, ends = colored()
    page = html_text(result, ends)
    assert page == (
        '<span class="o0">caf</span>\u00e9<span class="o1"> &lt;b&gt;\u20ac</span>\n  x'
    )


def test_origins_are_named() -> None:
    mixture = origin_names(run_job_of(["strategy=mixture"]).config)
    assert mixture == {-1: "target", 0: "prompt lookup", 1: "draft model"}


def test_curves_agree_with_the_times() -> None:
    # Tokens of one chunk share a time. Only one of three prompts reaches the fourth token.
    a = make_result([[1], [2, 3]], times=[1.0, 2.0], admitted=0.5)
    b = make_result([[1], [2], [3], [4]], times=[1.0, 3.0, 5.0, 9.0], admitted=0.0)
    c = make_result([[1], [2], [3]], times=[1.0, 3.0, 5.0], admitted=0.0)
    np.testing.assert_allclose(mean_emission([a, b, c]), [2.5 / 3, 7.5 / 3, 11.5 / 3])
    positions, speeds = rate_by_position([a, b])
    np.testing.assert_allclose(positions, [8.0])
    np.testing.assert_allclose(speeds, [(2 + 3) / (1.0 + 8.0)])
    mixed = replace(a, origins=(-1, 0, 0))
    assert drafted_by_position([mixed]) == {0: pytest.approx(2 / 3)}
    at_the_border = replace(mixed, num_prompt=126)  # contexts of 126, 127 and 128 tokens
    by_context = drafted_by_context([at_the_border])
    assert by_context == {128: 0.5, 256: 1.0}
    assert shares([mixed]) == {-1: pytest.approx(1 / 3), 0: pytest.approx(2 / 3)}


@pytest.mark.slow
def test_a_sweeps_page_compares_jobs_with_their_baseline(
    sweep: Path,  # noqa: F811
) -> None:
    rows = {row["strategy"]: row for row in load_report(sweep).rows}
    assert rows["speculative, seed=0"]["speedup_wall"] == pytest.approx(2.0)
    assert rows["speculative, seed=0"]["lossless"] is True
    assert main(["report", str(sweep)]) == 0
    page = (sweep / "report.html").read_text(encoding="utf-8")
    assert "Not complete, not in the table: speculative, seed=1" in page
    assert "2.00x" in page
    for name in ("prompts", "throughput", "acceptance"):
        assert (sweep / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_leaderboard_ranks_runs_of_several_folders(sweep: Path) -> None:  # noqa: F811
    """A table per condition, the fastest first; each row links its run."""
    page = write_leaderboard([sweep, sweep / "strategy=ar,seed=0"], sweep.parent / "board.html")
    text = page.read_text(encoding="utf-8")
    links = re.findall(r'<a href="([^"]+)/">([^<]+)</a>', text)
    assert all((page.parent / unquote(link) / "summary.json").is_file() for link, _ in links)
    names = [name for _, name in links]
    assert names.index("speculative, seed=0 *") < names.index("ar, seed=0")
    with pytest.raises(UserError, match="nothing to"):
        write_leaderboard([sweep / "strategy=speculative,seed=1"], page)


def test_a_sweeps_header_states_what_varies(sweep: Path) -> None:  # noqa: F811
    """It stated the first run's conditions as those of all."""
    file = sweep / "strategy=ar,seed=1" / "summary.json"
    summary = json.loads(file.read_text())
    assert title_of(load_report(sweep).conditions).endswith("data=stdlib (2 prompts)")
    summary["conditions"] |= {"sampling": "t06", "num_prompts": 3}
    file.write_text(json.dumps(summary))
    for folder in sweep.iterdir():
        path = folder / "summary.json"
        if path.is_file() and path != file:
            other = json.loads(path.read_text())
            other["conditions"]["sampling"] = "greedy"
            path.write_text(json.dumps(other))
    title = title_of(load_report(sweep).conditions)
    assert "data=stdlib (2 or 3 prompts)" in title
    assert "sampling=greedy or t06" in title
