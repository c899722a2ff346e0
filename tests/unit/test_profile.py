"""`specdec profile`: the equations, what is measured, and that its files are profiles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.cli.main import main
from specdec.clocks import CostCurve, LatencyProfile, SimulatedClock, Work
from specdec.clocks.build import build_profile
from specdec.config.job import run_job_of
from specdec.config.profiles import load_profile
from specdec.errors import UserError
from specdec.executors.pipeline import StepCharges as StepClock
from specdec.pairs import RandomPair
from specdec.pairs.random import build_random
from specdec.profiling.limits import bounded, measure_machine, passes_of, roofline_png
from specdec.profiling.passes import Sample, costs_of, measure_model, measure_transfer
from specdec.profiling.trees import (
    StepTimes,
    as_yaml,
    clock_node,
    eq1_tbt,
    eq2_tbt,
    pipedec_latency,
)
from specdec.report.tables import notes_of

pytestmark = pytest.mark.slow

PROFILE = LatencyProfile(
    name="test",
    costs={
        "stage": CostCurve(tokens=(1, 64), ms=(30.0, 40.0), block_tokens=64, block_ms=6.0),
        "head": CostCurve(tokens=(1,), ms=(2.0,)),
        "draft": CostCurve(tokens=(1,), ms=(17.0,)),
        "prune": CostCurve(tokens=(1,), ms=(5.0,)),
        "transfer": CostCurve(tokens=(1, 64), ms=(1.0, 3.0)),
    },
)


def test_equations_by_hand() -> None:
    assert eq1_tbt((10.0, 30.0, 20.0), hit=0.9) == pytest.approx(33.0)
    assert eq2_tbt(48.0, 8, hit=0.98) == pytest.approx(48 * 1.14)
    assert eq2_tbt(1.0, 8, hit=0.0) == 8.0, "without a hit every token goes through the pipeline"
    assert eq1_tbt([7.0] * 5, 0.3) == pytest.approx(eq2_tbt(7.0, 5, 0.3)), "equal for equal stages"


def test_step_times_of_a_group() -> None:
    """PipeDec 3.1: a group's devices work one after the other, with a transfer between them."""
    times = StepTimes.of(PROFILE, width=64, stages=7, group=2)
    assert times.compute == 2 * 40 + 3
    assert times.stages == (*[83.0 + 5 + 3] * 6, 83.0 + 5 + 3 + 2)
    assert pipedec_latency(times) == pytest.approx(83 + 3)
    slow_draft = StepTimes(stages=(5.0,), compute=5.0, transfer=1.0, draft=17.0)
    assert pipedec_latency(slow_draft) == 17.0


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_the_devices_of_a_stage_are_priced_one_by_one(devices: int, num_tokens: int) -> None:
    """Once a stage was priced as one device, whatever ``executor.groups`` said."""
    clock = SimulatedClock(PROFILE)
    times = StepClock(clock, [1, devices])
    times.compute([0, num_tokens], 0)
    times.finish()
    transfers = (devices - 1) * PROFILE.ms(Work.TRANSFER, num_tokens)
    parts = devices * PROFILE.ms(Work.STAGE, num_tokens) + transfers
    assert clock.now() * 1e3 == pytest.approx(parts)
    law = StepTimes.of(PROFILE, width=num_tokens, stages=2, group=devices)
    assert law.compute == pytest.approx(parts), "the equations price a group alike"


def test_unlike_devices_have_a_time_each() -> None:
    """Plain decoding takes their sum, a step of a full pipeline the slowest."""
    profile = build_profile({"profile": "pipedec_21", **load_profile("pipedec_21")})
    factors = profile.costs["stage"].devices
    clock, stages = SimulatedClock(profile), len(factors)
    times = StepClock(clock, [1] * stages)
    for stage in range(stages):
        times.compute([int(stage == other) for other in range(stages)], 0)
        times.finish()
    one = profile.ms(Work.STAGE, 1)
    assert clock.now() * 1e3 == pytest.approx(one * sum(factors))
    times.compute([1] * stages, 0)
    times.finish()
    assert clock.now() * 1e3 == pytest.approx(one * (sum(factors) + 1))


@pytest.mark.parametrize("keys", [["executor.stages=4"], ["executor.groups=[1,1,1,1,1,1,1,1]"]])
def test_unlike_devices_fit_one_stage_on_each(keys: list[str]) -> None:
    words = ["strategy=specpipe", "clock=simulated", "clock.profile=specpipe_2server", *keys]
    with pytest.raises(UserError, match=r"executor\.stages=8"):
        run_job_of(words)


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_pipedec_s_seven_stages_are_pairs_of_its_fourteen_devices(num_tokens: int) -> None:
    pair, device = (
        build_profile({"profile": name, **load_profile(name)})
        for name in ("pipedec_7", "pipedec_14")
    )
    law = StepTimes.of(device, width=num_tokens, stages=7, group=2)
    assert pair.ms(Work.STAGE, num_tokens) == pytest.approx(law.compute, abs=0.01)


def test_a_profile_s_file_can_be_used_by_path_and_by_name(tmp_path: Path) -> None:
    samples = {
        Work.STAGE: [Sample(1, (3.0, 1.0, 2.0)), Sample(8, (4.0, 4.5, 5.0))],
        Work.HEAD: [Sample(1, (-0.5, 0.1, -0.2)), Sample(8, (1.0, 1.0, 9.0))],
        Work.PRUNE: [Sample(1, (0.0, 0.0, 0.0))],
    }
    clock = clock_node("mine", costs_of(samples), 'of "this" machine: #1')
    profile = build_profile(clock)
    assert profile.costs["stage"].ms == (2.0, 4.5)
    assert profile.costs["head"].ms == (0.0, 1.0), "a difference below 0 is noise"
    assert "prune" not in profile.costs, "what costs nothing is not priced"
    path = tmp_path / "profile" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(as_yaml({**clock, "stages": 4}), encoding="utf-8")
    for found in (load_profile(str(path)), load_profile("mine", [tmp_path])):
        assert build_profile({"profile": "mine", **found}) == profile
        assert found["stages"] == 4
    with pytest.raises(UserError, match=r"clock\.profile=mine"):
        load_profile("mine")


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["strategy=ar"], "1/8"),
        (["strategy=specpipe"], ""),
        (["strategy=specpipe", "executor.stages=5"], "5/8"),
        (["strategy=specpipe", "executor.stages=5", "clock.profile=uniform_30ms"], ""),
        (["strategy=pipedec", "executor.stages=2", "executor.groups=[4,4]"], ""),
        (["strategy=ppsd", "model.exit_layer=6"], "4/8"),
        (["strategy=eesd", "model.exit_layer=6", "clock.profile=ppsd_vicuna7b"], ""),
    ],
)
def test_a_profile_of_other_stages_is_noted(words: list[str], share: str) -> None:
    """`ar` on one device took a stage's time for the whole target: SpecPipe looked slower."""
    common = ["clock=simulated", "clock.profile=specpipe_8x3090", "model=tiny"]
    clock = run_job_of([*common, *words]).config["clock"]
    assert (share in clock["caveat"]) if share else ("caveat" not in clock)
    note = [f"x: {clock['caveat']}."] if share else []
    assert notes_of([{"strategy": "x", **clock}]) == note


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (["executor=pipeline", "executor.stages=2"], True),
        (["executor=pipeline", "executor.stages=1"], False),
        (["executor=pipeline", "executor.transport=distributed"], False),
        (["executor=pipeline", "clock=simulated"], False),
        (["strategy=hf_generate"], False),
    ],
)
def test_a_pipeline_in_one_process_is_noted(words: list[str], noted: bool) -> None:
    """SpecPipe was "measured" at a fraction of its speed where its stages took turns."""
    clock = run_job_of(["model=random", *words]).config["clock"]
    assert ("take turns" in clock.get("caveat", "")) == noted


def test_everything_is_measured_for_every_number_of_tokens() -> None:
    seen: list[str] = []
    samples = measure_model(
        RandomPair(num_layers=5, hidden_size=32),
        stages=2,
        tokens=[1, 3],
        repeats=2,
        context=5,
        on_repeat=seen.append,
    )
    assert set(samples) == {Work.STAGE, Work.HEAD, Work.DRAFT, Work.PRUNE}
    for found in samples.values():
        assert [s.tokens for s in found] == [1, 3]
        assert all(len(s.ms) == 2 for s in found)
    assert all(ms > 0 for s in samples[Work.STAGE] for ms in s.ms)
    assert len(seen) == 4 * 3


@pytest.mark.distributed
def test_a_transfer_is_measured_between_two_processes() -> None:
    samples = measure_transfer(width=16, dtype=torch.float32, tokens=[1, 300], repeats=2)
    assert [s.tokens for s in samples] == [1, 300]
    assert all(ms > 0 for s in samples for ms in s.ms)


def test_a_profile_in_use_is_held_against_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "profiling.use=specpipe_8x3090", "model=synthetic", "max_new_tokens=24"]
    words += ["executor.stages=4", "data.limit=1", "profiling.widths=[4,16]"]
    words += ["profiling.children=[4]", "profiling.groups=[1,2]", f"output_dir={tmp_path / 'p'}"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "policy.width=" in out
    found = json.loads((tmp_path / "p" / "profile.json").read_text())
    cells = found["cells"]
    assert [(c["width"], c["stages"], c["group"]) for c in cells][:2] == [(4, 4, 1), (16, 4, 1)]
    assert (cells[2]["stages"], cells[2]["group"]) == (2, 2)
    profile = build_profile({"profile": "x", **load_profile("specpipe_8x3090")})
    for cell in cells:
        times = StepTimes.of(
            profile, width=cell["width"], stages=cell["stages"], group=cell["group"]
        )
        assert cell["eq2"] == pytest.approx(
            eq2_tbt(max(times.stages), cell["stages"], cell["hit_rate"])
        )
        assert cell["eq2_error"] == pytest.approx(cell["eq2"] / cell["tbt"] - 1)
        assert cell["pipedec"] <= max(times.stages)
        assert cell["draft_bound"] is False, "17 ms beside 37 or more"
    best = min(cells, key=lambda c: c["tbt"])
    assert found["proposal"]["simulated"]["width"] == best["width"]
    assert not (tmp_path / "p" / "measured.yaml").exists(), "nothing was measured"
    assert main(words) == 0
    assert "not run again" in capsys.readouterr().out


def test_samples_say_how_far_they_scatter() -> None:
    assert Sample(4, (1.0, 2.0, 5.0)).spread == pytest.approx(1.0)
    assert Sample(4, (-1.0, -2.0)).spread == 0.0
    assert np.isclose(Sample(4, (1.0, 3.0)).median_ms, 2.0)


@pytest.mark.parametrize("stages", [1, 3])
def test_bytes_and_flops_are_those_by_hand(stages: int) -> None:
    """Of the longest slice of layers; of the output head alone; of the whole draft."""
    pair = build_random(num_layers=4, hidden_size=64, vocab_size=61, dtype="float32")
    kinds = (Work.STAGE, Work.HEAD, Work.DRAFT, Work.PRUNE)
    context, rows = 20, 3
    samples = {kind: [Sample(num, (2.0, 4.0, 3.0)) for num in (1, rows)] for kind in kinds}
    passes = passes_of(pair, samples, stages=stages, context=context)
    found = {(work["kind"], work["rows"]): work for work in passes}
    config, layers = pair.target.config, -(-pair.num_layers // stages)
    weights = sum(p.numel() for p in pair.target.model.layers[:layers].parameters())
    stage, head = found["stage", rows], found["head", rows]
    cached = 2 * layers * config.num_key_value_heads * config.head_dim  # numbers per token
    assert stage["num_bytes"] == 4 * (weights + cached * (context + 2 * rows))
    attention = 4 * layers * config.num_attention_heads * config.head_dim * rows * (context + rows)
    assert stage["flops"] == 2 * rows * weights + attention
    assert (head["num_bytes"], head["flops"]) == (4 * 61 * 64, 2 * rows * 61 * 64)
    draft = pair.draft
    both = [*draft.model.layers.parameters(), *draft.get_output_embeddings().parameters()]
    cached = 2 * len(draft.model.layers) * draft.config.num_key_value_heads * draft.config.head_dim
    expected = 4 * (sum(p.numel() for p in both) + cached * (context + 2))
    assert found["draft", 1]["num_bytes"] == expected
    assert all(work["ms"] == 3.0 for work in passes)


def test_a_machine_is_measured() -> None:
    found = measure_machine(num_bytes=1 << 20, dtype=torch.float32, device=torch.device("cpu"))
    assert found["copy_bytes"] == 1 << 22, "a smaller copy measures the call"
    assert 1e8 < found["bytes_per_s"] < 1e13
    assert 1e8 < found["flops_per_s"] < 1e14


def test_the_longer_of_two_times_bounds_a_pass() -> None:
    machine = {"bytes_per_s": 1e9, "flops_per_s": 2e9}
    sizes = [(4_000_000, 2_000_000, 8.0), (4_000_000, 12_000_000, 8.0), (1, 1, 0.0)]
    works = [{"kind": "stage", "rows": 1, "num_bytes": b, "flops": f, "ms": t} for b, f, t in sizes]
    found = [bounded(work, machine) for work in works]
    assert [work["bound"] for work in found] == ["bytes", "flops", "bytes"]
    assert [work["bound_ms"] for work in found[:2]] == pytest.approx([4.0, 6.0])
    assert [work["share"] for work in found] == [0.5, 0.75, None]
    assert roofline_png(machine, works).startswith(b"\x89PNG")
