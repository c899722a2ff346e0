"""Stated values, verdicts and formula checks of ``specdec reproduce``."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

from experiments.pipelines.memory_and_features import memory
from experiments.ppsd.baseline_comparisons import cells_off
from experiments.ppsd.laws import (
    alpha_of_overall,
    alpha_of_speedup,
    eq4_speedup,
    eq5_acceptance,
    eq6_speedup,
)
from experiments.reproduce import results
from experiments.reproduce.arithmetic import evaluate
from experiments.reproduce.document import contradictions, page_text
from experiments.reproduce.drafts import known_drafts
from experiments.reproduce.findings import (
    Findings,
    Measure,
    claim_verdict,
    kind_of,
    ratio_to_stated,
    verdict,
)
from experiments.reproduce.items import all_items
from experiments.reproduce.lab import Lab
from experiments.reproduce.stated import COUNTED, KINDS, Claim, Window, read_paper
from specdec.errors import UserError

ITEMS = all_items()
SIMPLE = [
    name
    for name, item in ITEMS.items()
    if item.paper.name == "ppsd" and not item.needs and "runs" not in item.config
]


def claim(low: float | None = None, high: float | None = None, kind: str = "") -> Claim:
    slack = 0.0 if low is None or low != high else 0.05 * low
    ends = (None, None) if low is None or high is None else (low - slack, high + slack)
    return Claim(
        id="c",
        text="t",
        low=low,
        high=high,
        sentence="" if low is not None else "holds",
        unit="x",
        section="1",
        mark="original",
        window=Window(*ends, "a reason"),
        kind=kind,
    )


def measure(
    value: float | bool | None,
    kind: str = "calibrated",
    ends: tuple[float | None, float | None] = (None, None),
) -> Measure:
    origin = "formula" if kind == "formula" else "simulated"
    low, high = ends
    return Measure(
        claim="c", value=value, origin=origin, conditions="here", kind=kind, low=low, high=high
    )


@pytest.mark.parametrize(
    ("value", "ends", "said"),
    [
        (1.9, None, "below"),
        (2.0, None, "inside"),
        (3.0, None, "inside"),
        (3.1, None, "above"),
        (2.5, (2.0, 3.0), "inside"),
        (2.5, (1.9, 2.9), "undecided"),
        (2.5, (2.5, 3.1), "undecided"),
        (2.5, (3.1, 3.2), "above"),
        (2.5, (1.0, 1.9), "below"),
    ],
)
def test_a_range_holds_its_ends_and_an_interval_that_crosses_one_decides_nothing(
    value: float, ends: tuple[float, float] | None, said: str
) -> None:
    assert verdict(claim(2.0, 3.0), measure(value, ends=ends or (None, None))) == said


def test_other_verdicts() -> None:
    assert verdict(claim(), measure(False)) == "does not hold"
    assert verdict(claim(), measure(True, "formula")) == "holds"
    assert verdict(claim(), measure(None)) == "undecided"
    assert verdict(claim(1.0, 2.0), None) == "missing"
    assert ratio_to_stated(claim(2.0, 4.0), measure(3.0)) == "0.75-1.50"


def test_a_claim_is_decided_by_the_counted_kinds_and_only_if_they_agree() -> None:
    """A stand-in or an input inside the window adds nothing, and two sides of it do not agree."""
    of = claim(2.0, 3.0)
    inside, below, above = (measure(value) for value in (2.5, 1.0, 4.0))
    assert claim_verdict(of, [inside, measure(9.0, "stand-in")])[:2] == ("inside", "calibrated")
    assert claim_verdict(of, [below, measure(2.5, "stand-in")])[0] == "outside"
    assert claim_verdict(of, [below, above])[0] == "undecided"
    assert claim_verdict(of, [inside, below])[0] == "undecided"
    assert claim_verdict(of, [])[0] == "missing"
    for kind in ("input", "construction"):
        fixed = claim(2.0, 3.0, kind=kind)
        assert claim_verdict(fixed, [inside])[:2] == ("inside", kind)
        assert kind_of(fixed, inside) not in COUNTED
    assert kind_of(claim(2.0, 3.0, kind="measured"), measure(2.5, "formula")) == "formula"


def test_every_verdict_has_a_kind_a_window_and_its_reason(tmp_path: Path) -> None:
    """Every claim of the papers, every stored figure; a claim without them is refused."""
    for name, item in ITEMS.items():
        for stated in item.stated.claims.values():
            window = stated.window
            assert window.reason, f"{name} {stated.id}"
            assert (window.low is None) == bool(stated.sentence), f"{name} {stated.id}"
            if window.low is not None and window.high is not None:
                assert window.low <= window.high, f"{name} {stated.id}"
        read = results.read_item(item)
        for found in read[0].measures if read else ():
            assert kind_of(item.stated.claims[found.claim], found) in KINDS, name
    with pytest.raises(AssertionError):
        measure(1.0, kind="")
    (tmp_path / "p").mkdir()
    path = tmp_path / "p" / "stated.yaml"
    for wrong in (
        {"stated": "it is fast"},
        {"stated": 1, "window": {"within": 0.5}},
        {"stated": 1, "window": "wide"},
        {"stated": 1, "kind": "certain"},
    ):
        found = {"title": "P", "reference": "r", "items": {"a": {"title": "A", "section": "1"}}}
        found["items"]["a"]["claims"] = {"c": {"text": "t", **wrong}}
        path.write_text(yaml.safe_dump(found), encoding="utf-8")
        with pytest.raises(UserError, match=r"yaml a c: (window|kind)"):
            read_paper("p", tmp_path)


def test_sentences_on_the_papers_follow_their_claims_verdicts() -> None:
    """The first page of docs/reproduction.md; stored results decide, and a turned one is seen."""
    stored = {name: results.read_item(item) for name, item in ITEMS.items()}
    assert contradictions(ITEMS, stored) == []
    page = Path(__file__).parents[2] / "docs/reproduction.md"
    now = page_text(ITEMS, stored).rstrip()
    assert page.read_text(encoding="utf-8").rstrip() == now, "specdec reproduce --document"
    planted = 0
    for name, item in ITEMS.items():
        named = {
            claim.partition("/")[2]
            for group in ("holds", "fails")
            for sentence in item.paper.summary.get(group, ())
            for claim in sentence.claims
            if claim.partition("/")[0] == item.name
        }
        if not named or not all(named):
            continue
        read = stored[name]
        assert read is not None
        other = Findings(measures=[m for m in read[0].measures if m.claim not in named])
        found = contradictions(ITEMS, {**stored, name: (other, read[1])})
        assert {line.split(" ")[-4].partition("/")[2] for line in found} >= named, name
        planted += 1
    assert planted >= 3


def test_every_item_says_what_it_can() -> None:
    """A builder that can be imported, or a reason; claims that its config names exist."""
    assert len(ITEMS) >= 50
    for name, item in ITEMS.items():
        assert bool(item.builder) != bool(item.reason), name
        if item.builder:
            module, _, function = item.builder.partition(":")
            assert callable(getattr(importlib.import_module(module), function)), name
        named = {
            c for key in ("ratios", "long", "also", "values") for c in item.config.get(key, {})
        }
        named |= {*item.config.get("computed", {}), *item.config.get("changes", {})}
        assert named <= set(item.stated.claims), name
        assert set(item.config.get("drafts", ())) <= set(known_drafts()), name
        assert item.size["quick"] <= item.size["full"], name


def test_counted_simulations_are_of_drafts_and_data_fixed_beforehand() -> None:
    """A figure counts only if the YAML names its data and drafts; changes are dated."""
    for name, item in ITEMS.items():
        for change in item.fixed.get("changes", ()):
            assert re.match(r"20\d\d-\d\d-\d\d: .{10}", change), f"{name}: {change}"
        assert set(item.fixed.get("counts", ())) <= set(known_drafts()), name
        read = results.read_item(item)
        kinds = {kind_of(item.stated.claims[m.claim], m) for m in read[0].measures} if read else ()
        if "calibrated" in kinds and item.paper.name != "open":
            assert item.fixed.get("data"), name
            assert item.fixed.get("counts"), name


def test_what_has_no_run_says_why_and_all_else_has_a_result() -> None:
    """Checked-in results: one of every item; a claim without a figure only where that is said."""
    for name, item in ITEMS.items():
        read = results.read_item(item)
        assert read is not None, f"specdec reproduce {name} output_dir=experiments"
        findings, _ = read
        figured = {measure.claim for measure in findings.measures}
        assert figured <= set(item.stated.claims), name
        if set(item.stated.claims) - figured:
            assert findings.missing or item.reason, name


def test_arithmetic_is_all_that_a_config_may_compute() -> None:
    assert evaluate("100 * (1 - 3.25 / 3.5)") == pytest.approx(50 / 7)
    assert evaluate("max(1, 2) >= 2") is True
    for text in ("__import__('os')", "a + 1", "(1).real", "[1][0]"):
        with pytest.raises(UserError, match="arithmetic"):
            evaluate(text)


def test_ppsd_laws_by_hand() -> None:
    """The text's own example: alpha 0.3226 at E = 8 of 32 gives 1.31x in theory."""
    assert eq6_speedup(0.3226, 8, 32) == pytest.approx(1.31, abs=0.01)
    assert eq6_speedup(1.0, 8, 32) == 4.0
    assert eq6_speedup(0.0, 8, 32) == 1.0
    assert eq6_speedup(0.0, 24, 32) == pytest.approx(32 / 48)  # E does not divide N
    assert eq4_speedup(1.0, 4, 8, 32) == pytest.approx(5 * 32 / 64)
    assert eq5_acceptance(0.5, 2) == pytest.approx((0.5 + 0.25) / 2)
    assert alpha_of_overall(eq5_acceptance(0.7, 5), 5) == pytest.approx(0.7)
    assert alpha_of_speedup(eq6_speedup(0.6, 4, 32), 4, 32) == pytest.approx(0.6)


@pytest.mark.parametrize("name", SIMPLE)
def test_formula_checks_need_no_run(name: str, tmp_path: Path) -> None:
    """Every claim of a formula item has its figure, and the files are written and read again."""
    item = ITEMS[name]
    if item.reason:
        pytest.skip(item.reason)
    findings = item.build(None)  # type: ignore[arg-type]
    found = {m.claim for m in findings.measures}
    assert found <= set(item.stated.claims)
    assert {m.origin for m in findings.measures} == {"formula"}
    results.write_item(item, findings, tmp_path, {"revision": "x"})
    read = results.read_item(item, tmp_path)
    assert read is not None
    assert read[0].measures == findings.measures
    text = (tmp_path / "ppsd" / "results" / f"{item.name}.md").read_text(encoding="utf-8")
    for stated in item.stated.claims.values():
        assert stated.text in text


def test_a_tree_s_keys_lie_in_the_context_budget_and_are_not_counted_twice(tmp_path: Path) -> None:
    """SpecPipe 4.5: KV is "shared by both the speculative tree nodes and the tokens generated"."""
    item = ITEMS["specpipe/table1"]
    found = memory(item, Lab(folder=tmp_path, quick=True))
    values = {measure.claim: measure.value for measure in found.measures}
    nodes, hidden_bytes = 1 + 8 * 64, 8192 * 2
    assert values["tree"] == pytest.approx((2 * 64 * hidden_bytes + nodes**2) / 2**20)
    key_value_bytes = 2 * 8 * 128 * 2 * 10  # of a token on a device of ten layers
    assert values["tree"] < nodes * key_value_bytes / 2**20


def test_ppsd_table2_divides_by_rows_of_other_models_and_sets() -> None:
    """Its GSM8K speed-ups are over V-7B's GSM8K and L-13B's HumanEval row of Table 1."""
    config = ITEMS["ppsd/table2"].config
    cells, stated = config["tokens_per_s"], config["speedups"]
    off = cells_off(cells, stated)
    assert [cell.split(" (")[0] for cell in off] == [
        *("V-13B medusa GSM8K", "V-13B ts GSM8K"),
        *("L-13B medusa GSM8K", "L-13B ts GSM8K", "L-13B ppsd GSM8K"),
    ]
    plain = ITEMS["ppsd/table1"].config["plain"]
    others = {
        "V-13B": {**cells["V-13B"], "plain": [plain["V-13B"][0], plain["V-7B"][1]]},
        "L-13B": {**cells["L-13B"], "plain": [plain["L-13B"][0], plain["L-13B"][2]]},
    }
    assert cells_off(others, {"L-13B": stated["L-13B"]}) == []
    assert len(cells_off(others, {"V-13B": stated["V-13B"]})) == 1  # PPSD's own is over its own row
