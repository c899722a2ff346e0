"""`specdec train` of heads, draft, n-grams and finish, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from tokenizers import Tokenizer

from specdec.cli.main import main
from specdec.models.exits import read_head
from specdec.train.model import LanguageModel, load_hf, save_hf
from tests.training import COMMON, EVALUATION, SAMPLING, SIZES, make_family, own

pytestmark = pytest.mark.slow

SHORT = ["plan.max_steps=2", "plan.length=32"]


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return make_family(tmp_path, monkeypatch)


def test_a_map_of_names_is_replaced_and_a_section_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`packages={}` once changed nothing, `weights={stdlib: 1}` kept the other streams."""
    words = ["weights={stdlib: 1}", "evaluation.prompts={xsum: 2}", "loss={every: 3}"]
    assert main(["train", "exit_head", *words, "--cfg"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["weights"] == {"stdlib": 1}
    assert shown["evaluation"] == {"prompts": {"xsum": 2}, "new_tokens": 128}
    assert shown["loss"] == {"kl_weight": 1.0, "temperature": 1.0, "every": 3}
    assert main(["train", "tokenizer", "packages={}", "--cfg"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["packages"] == {}


@pytest.mark.parametrize(
    ("recipe", "words", "names"),
    [
        ("exit_head", ["heads=[{kind: norm, layer: 2}]", "weights={stdlib: 1}"], ["norm-2"]),
        (
            "bundled_heads",
            ["heads=[{kind: transformer, layer: 1}, {kind: norm, layer: 3}]", *SAMPLING],
            ["norm-3", "transformer-1"],
        ),
        (
            "medusa_heads",
            ["heads=[{kind: medusa, layer: 4, offset: 1}, {kind: medusa, layer: 4, offset: 2}]"]
            + SAMPLING,
            ["medusa-4-1", "medusa-4-2"],
        ),
    ],
)
def test_heads_of_ones_own_model(
    recipe: str, words: list[str], names: list[str], family: list[str]
) -> None:
    """Trained, measured and read back; the target's files stay as they are."""
    files = [path for path in (own(family) / "target").iterdir() if path.is_file()]
    before = {path.name: path.read_bytes() for path in files}
    command = ["train", recipe, *family, *words, *COMMON, *SHORT, *EVALUATION]
    assert main(command) == 0
    heads = own(family) / "heads"
    assert sorted(path.stem for path in heads.glob("*.safetensors")) == names
    assert {path.name: path.read_bytes() for path in files} == before
    for name in names:
        with safe_open(heads / f"{name}.safetensors", framework="pt") as file:
            assert file.get_tensor("output.weight").shape == (330, 16)
        kind, layer, *_ = name.split("-")
        if kind != "medusa":
            assert read_head(heads, kind, int(layer)).layer == int(layer)
    (measured,) = heads.glob("measured-*.json")
    assert {row["head"] for row in json.loads(measured.read_text())} == set(names)
    (record,) = heads.glob("training-*.json")
    assert json.loads(record.read_text())["steps"] == 2
    if recipe == "exit_head":
        assert main(command) == 0, "a repeated command resumes finished work"


def test_a_draft_of_ones_own_and_its_ngrams(family: list[str]) -> None:
    """A whole family beside a tokenizer that was there: each model gets a copy of it."""
    phase = "phases=[{until: 1.0, length: 32, batch: 2}]"
    few = [f"distill_plan.{words}" for words in (phase, "max_steps=2", "restarts=[]")]
    few += ["distill_plan.cycle_rates=[]", "distill_weights={samples: 0.5, function: 0.5}"]
    draft = ["train", "draft", *family, "target_layers=[3, 0]", *few, *SAMPLING, *COMMON]
    assert main(draft) == 0
    made, target = own(family) / "draft", own(family) / "target"
    assert load_hf(made).shape.num_layers == 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (target / name).read_bytes()
    assert json.loads((made / "training.json").read_text())["target_layers"] == [3, 0]
    short = ["sampling.prompts=4", "sampling.new_tokens=8", "num_threads=0", "precision=fp32"]
    assert main(["train", "ngram", *family, *short]) == 0
    with safe_open(own(family) / "ngram" / "samples.safetensors", framework="pt") as file:
        tokens = file.get_tensor("tokens")
    assert tokens.dtype == torch.int16
    assert int((tokens == 0).sum()) == 4, "a document per prompt"
    (target / "tokenizer.json").unlink()
    sizes = [f"shape.{name}={size}" for name, size in SIZES.items()]
    plan = ["plan.phases=[{until: 1.0, layers: 2, length: 32, batch: 2}]", "plan.max_steps=1"]
    plan += [
        "shape.vocab_size=330",
        "plan.restarts=[]",
        "plan.cycle_rates=[]",
        "weights={stdlib: 1}",
    ]
    assert main(["train", "target", *family, *sizes, *plan, *COMMON]) == 0
    assert (target / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()


def test_finish_trains_long_windows_and_recognises_its_model(
    family: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The default plan has long windows: 256 alone once raised the loss at later positions."""
    few = ["plan.max_steps=5", "plan.log_every=1", "unlikelihood.length=16", "rounds=1"]
    command = ["train", "finish", *family, *COMMON, *SAMPLING, *few]
    command += ["weights={stdlib: 0.5, function: 0.5}", "sampling.rules=[{temperature: 0.0}]"]
    target = own(family) / "target"
    assert main(command) == 0
    finished = load_hf(target).state_dict()
    (done,) = json.loads((target / "training.json").read_text())["finish"]["rounds"]
    assert done["windows"] == [256, 512, 1024]
    record = json.loads((tmp_path / "work" / "finish" / "0" / "training.json").read_text())
    assert record["held_out_window"] == 1024
    assert record["tokens"] == 5 * 4096, "as many tokens at each length"
    assert "held_out" in record["curve"][2]

    def unchanged() -> bool:
        now = load_hf(target).state_dict()
        return all(torch.equal(now[name], value) for name, value in finished.items())

    assert main(command) == 0
    assert unchanged(), "a repeated command starts from the same first weights"
    assert main([*command, "ngram=3"]) == 2
    assert "ngram was 8, is 3" in " ".join(capsys.readouterr().err.split())
    other = LanguageModel(load_hf(target).shape, generator=torch.Generator().manual_seed(9))
    save_hf(other, target)
    assert main(command) == 2, "another model was once replaced by the first one's weights"
    assert "neither the model before the rounds in" in " ".join(capsys.readouterr().err.split())
    assert Tokenizer.from_file(str(target / "tokenizer.json")).get_vocab_size() == 330
