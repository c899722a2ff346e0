"""`specdec profile`: what is measured, and that its files are profiles."""

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
from specdec.planning.candidates import clock_node
from specdec.profiling.job import as_yaml
from specdec.profiling.passes import Sample, costs_of, measure_model, measure_transfer
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


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_pipedec_s_seven_stages_are_pairs_of_its_fourteen_devices(num_tokens: int) -> None:
    pair, device = (
        build_profile({"profile": name, **load_profile(name)})
        for name in ("pipedec_7", "pipedec_14")
    )
    parts = 2 * device.ms(Work.STAGE, num_tokens) + device.ms(Work.TRANSFER, num_tokens)
    assert pair.ms(Work.STAGE, num_tokens) == pytest.approx(parts, abs=0.01)


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


def test_samples_say_how_far_they_scatter() -> None:
    assert Sample(4, (1.0, 2.0, 5.0)).spread == pytest.approx(1.0)
    assert Sample(4, (-1.0, -2.0)).spread == 0.0
    assert np.isclose(Sample(4, (1.0, 3.0)).median_ms, 2.0)


def test_the_command_measures_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "box"
    words = ["profile", "model=random", "executor.stages=2", "profiling.tokens=[1,4]"]
    words += ["profiling.repeats=2", "profiling.context=8", "profiling.transfer=false"]
    words.append(f"output_dir={folder}")
    assert main(words) == 0
    assert f"clock.profile={folder / 'measured.yaml'}" in capsys.readouterr().out
    profile = load_profile(str(folder / "measured.yaml"))
    assert profile["stages"] == 2
    found = json.loads((folder / "profile.json").read_text())
    assert found["profile"]["costs"] == profile["costs"]
    assert [s["tokens"] for s in found["samples"]["stage"]] == [1, 4]
    assert main(words) == 0
    assert "not run again" in capsys.readouterr().out
    assert main(["profile", "model=synthetic", "executor.stages=2"]) == 2
    assert "nothing to measure without models" in capsys.readouterr().err
