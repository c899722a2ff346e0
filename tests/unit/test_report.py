"""Result files survive crashes, tables are complete, provenance contains no secrets."""

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from specdec.files import plain, write_json
from specdec.metrics import Run, RunTotals, comparison_row
from specdec.report.plots import comparison_png
from specdec.report.provenance import provenance, redact
from specdec.report.results import RequestRecord, RequestWriter, read_requests
from specdec.report.styles import row_styles
from specdec.report.tables import advice_of, best_row, markdown_table, notes_of, print_table
from specdec.types import Lossless
from tests.unit.test_metrics import make_result, timed_run


def test_requests_are_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "requests.jsonl"
    result = make_result([[1, 2, 3], [4]], prompt_id=4, cut=1, proposed=5)
    totals = RunTotals(steps=2, stage_busy_s={1: 0.25}, model_s={"target": 1.0})
    with RequestWriter(path) as writer:
        writer.write(RequestRecord("specpipe", 1, result, totals, "stdlib/4"))
        # A reader sees the line during the run.
        (record,) = read_requests(path)
    assert record.result == result
    assert record.totals == totals
    assert record.prompt == "stdlib/4"
    with RequestWriter(path) as again:
        assert again.records == {("specpipe", 1, 4): record}
    assert read_requests(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("torn", ['{"strategy": "ar", "rep', "\x00\x00", '{"a": 1}'])
def test_torn_last_line_is_ignored_and_removed_on_resume(tmp_path: Path, torn: str) -> None:
    """Appending to an incomplete line would merge two records and lose both."""
    path = tmp_path / "requests.jsonl"
    with RequestWriter(path) as writer:
        writer.write(RequestRecord("ar", 0, make_result([[1]], prompt_id=0), RunTotals()))
    with path.open("a", encoding="utf-8") as stream:
        stream.write(torn)
    with RequestWriter(path) as writer:
        assert list(writer.records) == [("ar", 0, 0)]
        writer.write(RequestRecord("ar", 0, make_result([[1]], prompt_id=1), RunTotals()))
        writer.write(RequestRecord("ar", 0, make_result([[1]], prompt_id=2)))  # without totals
    assert [record.result.id for record in read_requests(path)] == [0, 1, 2]
    with RequestWriter(path) as writer:
        assert list(writer.records) == [("ar", 0, 0), ("ar", 0, 1)]


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with RequestWriter(path) as writer:
        writer.write(RequestRecord("ar", 0, make_result([[1]])))
    path.write_text("{broken\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ValueError, match="line 1"):
        read_requests(path)


def test_json_is_strict_and_atomic(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {"x": np.float32(0.5), 3: np.arange(2), "l": Lossless.TOKEN, "p": Path("a/b"), "s": {2}}
    write_json(path, value)
    expected = {"x": 0.5, "3": [0, 1], "l": "token", "p": "a/b", "s": [2]}
    assert json.loads(path.read_text(encoding="utf-8")) == expected
    with pytest.raises(ValueError, match="None"):
        write_json(path, {"x": float("nan")})
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == expected  # the old file is untouched
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert plain(True) is True


def make_rows() -> tuple[list[dict[str, object]], dict[str, list[Run]]]:
    runs = {
        "ar": [timed_run(0.1), timed_run(0.1)],
        "speculative": [timed_run(0.1, chunk=2), timed_run(0.1, chunk=2)],
        "broken": [timed_run(0.02, tokens=9), timed_run(0.02, tokens=9)],
        "relaxed": [timed_run(0.01), timed_run(0.01)],
        "hf_generate": [timed_run(0.11), timed_run(0.11)],
    }
    claims = {"relaxed": "lossy"}
    rows = [
        comparison_row(name, found, runs["ar"], claims=claims.get(name, "token"))
        for name, found in runs.items()
    ]
    return rows, runs


def test_table_shows_every_column_and_marks_the_best_lossless_row() -> None:
    rows, _ = make_rows()
    best = best_row(rows)
    assert best is not None
    assert best["strategy"] == "speculative"  # not the lossy one, not the one that differs
    for terminal, width in ((False, 80), (True, 60), (True, 200)):
        stream = StringIO()
        console = Console(file=stream, width=width, force_terminal=terminal, color_system=None)
        held = {"clock": "simulated", "clock_profile": "uniform_30ms", "clock_scale": 2.0}
        advice = ["specdec compare 'strategies=[ar,x]'"]  # no markup of rich
        print_table(rows, {**held, "data": "stdlib"}, console, advice=advice)
        text = stream.getvalue()
        assert text.startswith("simulated time on uniform_30ms x 2, data=stdlib")
        headings = ("lossless", "tokens/s", "vs ar", "TBT ms", "accept len", "target", "loops")
        assert all(heading in text for heading in headings)
        assert "\u2026" not in text, "a cell was cut"
        assert "speculative *" in text
        assert advice[0] in text
        assert "NO (4 differ)" in text
        assert "LOSSY" in text
        assert "prompt 0, token 9: None instead of 9" in text


def test_few_prompts_are_noted_with_their_intervals() -> None:
    """Regression: a speed-up from two prompts was marked best without a note."""
    row = {"strategy": "mine", "num_prompts": 2, "speedup_wall_interval": [0.9, 1.75]}
    yardstick = {"strategy": "ar", "num_prompts": 2, "speedup_wall_interval": [1.0, 1.0]}
    (note,) = notes_of([yardstick, row])
    assert note.startswith("Only 2 prompts.")
    assert "mine 0.90-1.75x" in note
    assert "ar 1" not in note
    assert notes_of([yardstick, {**row, "num_prompts": 40}]) == []
    assert notes_of([{**row, "num_prompts": 1, "speedup_wall_interval": None}]) == []


def test_a_comparison_as_markdown_and_picture() -> None:
    rows, runs = make_rows()
    page = markdown_table(rows, {"clock": "measured"})
    assert "| speculative * |" in page
    assert "- *: the fastest lossless row." in page
    assert "| TTFT ms |" in page
    assert all(f"| {name} " in page for name in runs)
    styles, points = [*row_styles([*runs]).values()], [np.ones(3)] * len(runs)
    assert comparison_png(rows, {"clock": "measured"}, styles, points).startswith(b"\x89PNG")


@pytest.mark.parametrize(("quantization", "label"), [("int4", "ties?"), ("draft_int4", "NO")])
def test_differing_tokens_of_a_quantised_target_may_be_ties(quantization: str, label: str) -> None:
    """The column said NO of tokens that ``specdec verify`` calls ties."""
    rows, _ = make_rows()
    page = markdown_table(rows, {"quantization": quantization})
    assert f"| {label} (4 differ) |" in page
    assert ("`specdec verify` tells ties from faults" in page) == (label == "ties?")


def chain_row(strategy: str, passes: int, target_s: float, **keys: object) -> dict[str, object]:
    """One prompt of 41 tokens, whose first one took a second."""
    row = {"strategy": strategy, "clock": "measured", "latency": 1, "num_prompts": 1}
    row |= {"ttft_ms": 1e3, "target_passes": passes + 1, "model_s": {"target": 1.0 + target_s}}
    return row | {"model_calls": {}, "lossless": True, **keys}


def test_advice_follows_from_the_cost_of_passes() -> None:
    """Twelve rows at 2.1 passes of one, of which 40 % are accepted: Theorem 3.8 says two drafts."""
    plain = chain_row("ar", 40, 40.0, rows_per_target_pass=1.0)
    row = chain_row("speculative", 25, 25 * 2.1, rows_per_target_pass=12.0, acceptance_length=1.6)
    row["acceptance_rate_verified"] = 0.4
    configs: list[dict[str, object]] = [{}, {"policy": {"gamma": 11}}]
    size, following = advice_of([plain, row], configs, Path("out/c"))
    assert size == (
        "speculative: a pass of 12 rows costs 2.1 passes of one row and emits 1.6 tokens: shorter"
        " drafts may help: policy.gamma=2."
    )
    assert following.startswith("Next: specdec report out/c")
    configs[1] = {"policy": {"bs": 12}}
    assert "policy.bs=6." in advice_of([plain, row], configs, None)[0]
    cheap = {**row, "model_s": {"target": 26.0}}
    assert advice_of([plain, cheap], configs, None) == [], "its passes cost what one row does"
    (missing,) = advice_of([row], [{}], None)
    assert "'strategies=[ar,speculative]'" in missing
    wrong = {**row, "lossless": False}
    verify = advice_of([plain, wrong], [{}, {"choices": {"model": "hf"}}], Path("c"))[-1]
    assert verify == "Next: specdec verify strategy=speculative model=hf, same options."


def test_provenance_leaks_neither_secrets_nor_folders() -> None:
    secret = "hf_" + "a" * 34
    command = [f"hub.token={secret}", secret, f"model.target={Path.home()}/m", "max_new_tokens=8"]
    found = provenance(command=command, config={}, extra={"logger": {"api_key": "k", "x": secret}})
    text = json.dumps(plain(found))
    assert secret not in text
    assert str(Path.cwd()) not in text
    assert found["command"][2:] == ["model.target=~/m", "max_new_tokens=8"]
    assert found["logger"]["api_key"] == "<redacted>"
    assert redact(str(Path.cwd())) == "."
    assert redact(f"{Path.home()}ed/x") == f"{Path.home()}ed/x"  # another folder
