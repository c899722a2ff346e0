"""Results say what they are of: models, backends, sampling, limits, untrained heads."""

from pathlib import Path

import pytest
import yaml

import specdec
from specdec.clocks.meter import Meter
from specdec.models.bundled import family_path
from specdec.models.medusa import MedusaHeads
from specdec.pairs import PretrainedPair, RandomPair, build_pair
from specdec.pairs.options import ModelOptions
from specdec.report.tables import markdown_table, title_of, used_columns
from specdec.runs.jobs import conditions_of

CONDITIONS = {
    **{"clock": "measured", "target": "my-target", "draft": "my-draft", "backend": "onnx"},
    **{"dtype": "float32", "quantization": "int8", "sampling": "temperature 0.8", "data": "stdlib"},
    **{"num_prompts": 4, "max_new_tokens": 96, "batch_size": 2},
}


def test_titles_name_models_backend_sampling_and_limits() -> None:
    """No table, page or picture named the model."""
    title = title_of(CONDITIONS)
    assert "data=stdlib (4 prompts)" in title
    for key in CONDITIONS.keys() - {"clock", "data", "num_prompts"}:
        assert f"{key}={CONDITIONS[key]}" in title
    assert title in markdown_table([{"strategy": "ar"}], CONDITIONS)


@pytest.mark.slow
def test_the_models_of_a_given_pair_are_filed(tmp_path: Path) -> None:
    """``config.yaml`` and the frame had the configuration's own models: bundled:target."""
    target = tmp_path / "mine"
    target.symlink_to(family_path("bundled:target"))
    pair = PretrainedPair(target=str(target), options=ModelOptions(device="cpu"))
    words = ["data.limit=1", "max_new_tokens=4", "repeats=1"]
    found = specdec.compare(["ar"], words, pair=pair, output_dir=tmp_path / "out")
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    model = config["strategies"]["ar"]["model"]
    assert (model["target"], model["draft"]) == (str(target), None)
    assert found.frame()["config.model.target"].tolist() == [str(target)]
    assert found.conditions["target"] == "mine"
    assert "target=mine" in found.table
    assert build_pair(model).section() == pair.section(), "the section builds this pair"


def test_pairs_name_their_models() -> None:
    random = RandomPair(family="gpt2", num_layers=3, draft_layers=1, options=ModelOptions())
    cfg = {"model": {"kind": "random", "dtype": "float32"}, "data": {"name": "x"}, "seed": 0}
    cfg |= {"max_new_tokens": 3, "batch_size": 1, "sampling": {}, "choices": {"sampling": "t06"}}
    found = conditions_of(cfg, random, 1, 0, 1)
    assert found["target"] == "random gpt2 of 3 layers"
    assert found["draft"] == "random gpt2 of 1 layers"
    assert found["sampling"] == "t06"
    synthetic = build_pair({"kind": "synthetic", "origin": "a paper", "draft_name": "1B"})
    names = synthetic.section()
    assert (names["target"], names["draft"]) == ("a paper", "1B")


def test_rows_of_different_runtimes_name_theirs() -> None:
    """``ar`` in ONNX Runtime stood beside ``hf_generate`` in PyTorch without a word."""
    rows = [
        {"strategy": "ar", "runtime": "ONNX Runtime", "num_prompts": 4},
        {"strategy": "hf_generate", "runtime": "PyTorch", "num_prompts": 4},
    ]
    assert "| ONNX Runtime |" in markdown_table(rows, {})
    assert "| PyTorch |" in markdown_table(rows, {})
    one = [rows[0], {**rows[1], "runtime": "ONNX Runtime"}]
    assert "runtime" not in [column.heading for column in used_columns(one)]


@pytest.mark.slow
def test_untrained_medusa_heads_are_named_in_the_row() -> None:
    """Random heads gave a row that looked like one of Medusa."""
    words = ["model=random", "data.limit=1", "max_new_tokens=3", "repeats=1"]
    found = specdec.compare(["ar", "medusa"], words)
    assert "caveat" not in found.rows[0]
    assert "Medusa heads are untrained" in found.rows[1]["caveat"]
    assert "Medusa heads are untrained" in found.table
    trained = build_pair({"kind": "pretrained", "target": "bundled:target"})
    heads = trained.artefact(MedusaHeads, num_heads=1, meter=Meter())
    assert not heads.trained
