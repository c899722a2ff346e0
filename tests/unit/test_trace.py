"""Traces: the record equals the loop's steps; files and pictures agree with the record."""

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from specdec.cli.trace import draw
from specdec.clocks import ClockReport, MeasuredClock, Span, Timeline
from specdec.runs.runners import PartsRunner, TokenPrompt
from specdec.state import DecodeState, StopRules
from specdec.trace.files import chrome_events, commit_kinds, write_trace
from specdec.trace.recorder import RunTrace
from specdec.types import Commit
from tests.matrix.cells import Cell, config, pair

PROMPTS = [TokenPrompt(3, np.array([3, 1, 4, 1, 5])), TokenPrompt(8, np.array([2]))]
COSTS = {
    kind: {"tokens": [1, 5], "ms": [float(ms), ms + 1.0]}
    for kind, ms in (("stage", 10), ("draft", 3), ("head", 2), ("prune", 1), ("transfer", 0.5))
}
CLOCK = {"kind": "simulated", "profile": "test", "scale": 1.0, "costs": COSTS}
STAGES = 3


def traced(policy: str, executor: str = "pipeline", **keys: object) -> tuple[PartsRunner, list]:
    """A finished traced run and its commits per step."""
    values = config(Cell("draft_model", policy, "match", executor, "t06"))
    if policy == "specpipe":
        values["policy"].update(width=5, children=3)
    values = {**values, "clock": CLOCK, "trace": True, **keys}
    runner = PartsRunner(cfg=values, pair=pair(), stop=StopRules(max_new_tokens=16))
    parts = runner.parts
    state = DecodeState(draws=parts.draws, clock=parts.clock, meter=parts.meter)
    return runner, list(runner.steps(state, PROMPTS, lambda _: None))


@pytest.fixture(scope="module")
def specpipe() -> tuple[PartsRunner, list[list[Commit]]]:
    return traced("specpipe")


@pytest.fixture(scope="module")
def folder(specpipe: tuple[PartsRunner, list], tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("run")
    trace = specpipe[0].trace
    assert trace is not None
    # Text that would end a script or a comment if it were not escaped.
    write_trace(where, trace, latency=STAGES, text=lambda i: f"</script><!--{i}")
    return where


def test_a_trace_changes_nothing() -> None:
    values = config(Cell("draft_model", "specpipe", "match", "pipeline", "t06"))
    found = []
    for trace in (False, True):
        runner = PartsRunner(
            cfg={**values, "clock": CLOCK, "trace": trace},
            pair=pair(),
            stop=StopRules(max_new_tokens=10),
        )
        results: list = []
        totals = runner.run(PROMPTS, results.append)
        found.append(([(r.output, r.emitted_s, r.counters) for r in results], totals.steps))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("policy", "executor"),
    [("specpipe", "pipeline"), ("static", "local")],
)
def test_trees_are_reproduced_from_the_record(policy: str, executor: str) -> None:
    """Replaying nodes and commits gives the nodes that each commit kept, and the output."""
    runner, steps = traced(policy, executor)
    assert runner.trace is not None
    expected = {
        p.id: [c for commits in steps for c in commits if c.request == p.id] for p in PROMPTS
    }
    for record in runner.trace.requests:
        tokens, parents, alive = {}, {}, set()
        commits = iter(expected[record["id"]])
        for step in record["steps"]:
            for node, parent, token, *_ in step["nodes"]:
                assert node not in alive
                assert parent in alive or parent == -1
                alive.add(node)
                tokens[node], parents[node] = token, parent
            assert set(step["submitted"]) <= alive
            if step["commit"] is None:
                continue
            commit = next(commits)
            assert step["commit"]["kind"] == commit.kind
            assert [tokens[i] for i in step["commit"]["retired"]] == commit.retired_tokens.tolist()
            keep: set[int] = set()
            for node in sorted(alive):
                if node == step["commit"]["root"] or parents[node] in keep:
                    keep.add(node)
            if commit.kind == "hit":
                assert sorted(keep) == commit.kept_ids.tolist()
            alive = keep
        assert next(commits, None) is None, "every decision is on record"


def test_work_and_waits_tile_every_rank_s_time(folder: Path) -> None:
    trace = json.loads((folder / "trace.json").read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    end = max(e["ts"] + e["dur"] for e in events)
    assert {e["cat"] for e in events} == {"compute", "prune", "transmit", "wait"}
    for rank in range(STAGES + 1):
        mine = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == rank)
        assert mine[0][0] == pytest.approx(0.0, abs=1e-2)
        for (start, length), (following, _) in pairwise(mine):
            assert following == pytest.approx(start + length, abs=1e-2)
        assert sum(mine[-1]) == pytest.approx(end, abs=1e-2)


def test_a_stage_s_level_is_the_step_that_fed_it(
    folder: Path, specpipe: tuple[PartsRunner, list]
) -> None:
    assert specpipe[0].trace is not None
    fed = specpipe[0].trace.fed
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    stages = [e for e in events if e["name"] == "stage"]
    assert {e["tid"] for e in stages} == {1, 2, 3}
    for event in stages:
        args = event["args"]
        level = args["level"]
        assert level == args["step"] - (event["tid"] - 1)
        assert args["depths"] == fed[level]["depths"]
        most = fed[level]["nodes"] + fed[level]["prefill"]
        assert 0 < args["tokens"] <= most
        if event["tid"] == 1:
            assert args["tokens"] == most, "nothing is pruned before the first stage"


def test_a_group_s_ranks_share_a_level() -> None:
    """Two ranks per stage: both compute the submission of stage - 1 steps ago."""
    spans = [Span(rank, "stage", rank / 10, 0.1, 4, 7) for rank in (1, 2, 3, 4)]
    fed = {6: {"requests": [1], "depths": [2, 2], "prefill": 0}}
    events = chrome_events(spans, fed, {1: 1, 2: 1, 3: 2, 4: 2})
    levels = [e["args"]["level"] for e in events if e["name"] == "stage"]
    assert levels == [7, 7, 6, 6]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names[0] == "rank 1: stage 1"
    assert names[3] == "rank 4: stage 2"


def test_a_warm_up_is_not_recorded() -> None:
    runner, steps = traced("specpipe")
    trace = runner.trace
    assert trace is not None
    trace.clear()
    assert trace.spans() == []
    assert trace.requests == []
    state = runner.parts.new_state()
    again = list(runner.steps(state, PROMPTS, lambda _: None))
    assert len(again) == len(steps)
    assert min(span.step for span in trace.spans()) == 0
    assert min(span.start_s for span in trace.spans()) == 0.0


_DRIVER = """
const fs = require("fs");
const script = fs.readFileSync(process.argv[2], "utf8").match(/<script>([\\s\\S]*)<\\/script>/)[1];
const data = script.match(/^const data = (.*);$/m)[1];
const play = script.match(/^function play[\\s\\S]*?^}$/m)[0];
const replay = eval("(" + play + ")");
console.log(JSON.stringify(JSON.parse(data).requests.map(r => replay(r)
  .filter(f => f.commit)
  .map(f => [f.commit.kind, [...f.keep].sort((a, b) => a - b), f.output.map(o => o[0])]))));
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script, which needs node")
def test_the_page_shows_what_the_loop_did(
    folder: Path, specpipe: tuple[PartsRunner, list[list[Commit]]], tmp_path: Path
) -> None:
    draw(folder)
    driver = tmp_path / "driver.js"
    driver.write_text(_DRIVER, encoding="utf-8")
    words = ["node", str(driver), str(folder / "tree.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    shown = json.loads(done.stdout)
    for prompt, frames in zip(PROMPTS, shown, strict=True):
        commits = [c for step in specpipe[1] for c in step if c.request == prompt.id]
        assert [kind for kind, _, _ in frames] == [c.kind.value for c in commits]
        kept = [keep for kind, keep, _ in frames if kind == "hit"]
        assert kept == [c.kept_ids.tolist() for c in commits if c.kind == "hit"]
        output = [t for c in commits for t in [*c.retired_tokens[1:].tolist(), c.next_token]]
        assert frames[-1][2] == output


def test_steps_of_any_missed_request_are_misses() -> None:
    def request(*kinds: str) -> dict:
        return {"steps": [{"step": i, "commit": {"kind": k}} for i, k in enumerate(kinds)]}

    trees = {"requests": [request("hit", "miss", "hit"), request("miss", "hit", "hit")]}
    assert commit_kinds(trees) == {0: "miss", 1: "miss", 2: "hit"}


def test_spans_of_workers_are_aligned_with_the_controller() -> None:
    """Their clocks start at another time of day; their steps restart with each run."""
    clock = MeasuredClock(timeline=Timeline())
    trace = RunTrace(clock)

    def report(rank: int, origin_s: float, *spans: Span) -> ClockReport:
        return ClockReport(rank=rank, origin_s=origin_s, spans=spans)

    trace.began_s = 1.0
    for run, base in enumerate((0, 40)):
        trace.timeline.step = base
        trace.begin_run([report(0, 100.0), report(1, 102.5, Span(1, "stage", 0.0, 9.0, 9, 9))])
        at = 10.0 * (run + 1)
        mine = Span(0, "draft", at, 0.5, 4, base + 3)
        theirs = Span(1, "stage", at - 2.5, 0.5, 4, 3)
        trace.end_run([report(0, 100.0, mine), report(1, 102.5, theirs)])
    assert [(s.rank, s.start_s, s.step) for s in trace.spans()] == [
        (0, 9.0, 3),
        (1, 9.0, 3),
        (0, 19.0, 43),
        (1, 19.0, 43),
    ]
