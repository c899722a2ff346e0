"""README, and the layout in docs/architecture.md: complete, and as the code is."""

import re

from specdec.config.options import options
from specdec.metrics import RunTotals, comparison_row
from specdec.metrics.counters import RequestCounters
from specdec.metrics.results import Run
from specdec.report.tables import COLUMNS
from tests.docs.blocks import ROOT
from tests.states import new_result

README = (ROOT / "README.md").read_text(encoding="utf-8")


ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
LAYOUT = ARCHITECTURE.split("## Layout")[1].split("\n## ")[0]
LISTED = re.findall(r"^\| `(\S+)` \|", LAYOUT, re.MULTILINE)


def test_every_file_of_the_layout_exists() -> None:
    assert len(LISTED) > 30
    assert not [path for path in LISTED if not (ROOT / path).exists()]


def test_the_layout_is_complete() -> None:
    listed = {path.rstrip("/") for path in LISTED}
    there = {
        f"specdec/{entry.name}"
        for entry in (ROOT / "specdec").iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").is_file()
    }
    assert there - listed == {"specdec/__init__.py", "specdec/conf"}


def test_readme_is_short_and_says_where_to_look() -> None:
    assert len(README.splitlines()) <= 150
    for path in re.findall(r"`((?:specdec|strategies|experiments)/\S*)`", README):
        assert (ROOT / path).exists(), path


def test_every_preset_is_in_the_table() -> None:
    page = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    missing = [name for name in options("strategy") if f"`{name}`" not in page]
    assert not missing, f"add them to the table of docs/strategies.md: {missing}"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert "docs/images/pipeline_fills.png" in links
    assert not [link for link in links if not (ROOT / link).exists()]
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"api.md", "index.md"}
    start = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    links += re.findall(r"\]\(([^)#]+\.md)\)", start)
    assert pages <= {link.removeprefix("docs/") for link in links}, "README or the start links it"


def test_the_claims_are_the_results() -> None:
    """README's table is that of docs/reproduction.md, which is filled in from the result files."""
    page = (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")
    table = page.split("## One claim per paper")[1].split("\n## ")[0].strip()
    assert table.replace("](../experiments/", "](experiments/") in README


def test_the_demo_shows_what_the_demo_prints() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (asked,) = re.findall(r"^DEMO_METHODS \?= (\S+)", makefile, re.MULTILINE)
    demo = README.split("What `make demo` printed")[1].split("## ")[0]
    rows = re.findall(
        r"^    +(\w+)(?: \*)? +(?:reference|yes|in distribution|LOSSY|NO)", demo, re.M
    )
    assert rows == asked.split(",")
    heading = next(line for line in demo.splitlines() if line.strip().startswith("strategy"))
    shown = {c.heading for c in COLUMNS if c.heading in heading}
    assert shown == {c.heading for c in COLUMNS} - {"hit rate"}, "the table as it is printed"


def test_every_metric_is_defined() -> None:
    counters = RequestCounters()
    counters.answers = counters.misses = 1
    counters.path_lengths[1] = 1
    run = Run(
        (new_result(0, counters, [-1]),),
        RunTotals(steps=1, wall_s=1.0, clock_s=1.0, target_passes=1),
    )
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    names = {name for name in comparison_row("x", [run], [run]) if name != "strategy"}
    undefined = {n for n in names if f"`{n}`" not in page and not n.endswith("_range")}
    assert not undefined, f"define them in docs/metrics.md: {sorted(undefined)}"
