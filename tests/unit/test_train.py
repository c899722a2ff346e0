"""The training recipes: small real runs, and bounds on what ships."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import specdec.assets
from specdec.parts.build import check_values
from specdec.train import card, cli, corpus
from specdec.train.draft import DistillationLoss, divergence
from specdec.train.lm import Pretraining, held_out_loss
from specdec.train.model import LanguageModel, ModelShape, load_hf, save_hf
from specdec.train.plan import Phase, RunPlan
from specdec.train.samples import Sampling, generate
from specdec.train.sections import build
from specdec.train.session import Session
from specdec.train.streams import Mixture, encode

pytestmark = pytest.mark.slow

ASSETS = Path(next(iter(specdec.assets.__path__))) / "tiny"
SHAPE = ModelShape(
    num_layers=2,
    hidden=32,
    feed_forward=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=300,
    max_positions=128,
)
shipped = pytest.mark.skipif(
    not (ASSETS / "draft" / "model.safetensors").exists(), reason="no trained family here"
)


def toy(seed: int = 0, layers: int = 2) -> LanguageModel:
    sizes = {name: getattr(SHAPE, name) for name in SHAPE.__slots__}
    generator = torch.Generator().manual_seed(seed)
    return LanguageModel(ModelShape(**(sizes | {"num_layers": layers})), generator=generator)


def toy_streams() -> dict[str, np.ndarray]:
    """Counting modulo 50 in steps of 1 and 3: learnt in a few steps."""
    line = np.arange(4000) % 50 + 1
    return {"stdlib": line.astype(np.uint16), "package": (line * 3 % 50 + 1).astype(np.uint16)}


def plan(steps: int, layers: int = 2, **changes: object) -> RunPlan:
    phases = (Phase(until=1.0, layers=layers, length=32, batch=8),)
    settings = {"phases": phases, "warmup_steps": 4, "log_every": 5, "decay_from": 0.9}
    return RunPlan(max_steps=steps, **(settings | changes))


def train(folder: Path, steps: int, *, stop: int | None = None, **changes: object) -> Pretraining:
    mixture = Mixture(toy_streams(), {"stdlib": 0.5, "package": 0.5}, seed=3)
    run = Pretraining(toy(), mixture, plan(steps, **changes), folder)
    run.run(stop_after_steps=stop)
    return run


def test_weights_mean_the_same_in_transformers(tmp_path):
    """Same weights, same float32 logits but for summation order; sampling's cache agrees too."""
    from transformers import AutoModelForCausalLM

    save_hf(toy(), tmp_path)
    ours = load_hf(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(0, 300, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=2e-5, rtol=0)
    new = generate(ours, tokens, 12, [Sampling()], torch.Generator().manual_seed(0))
    row = tokens
    for position in range(12):
        with torch.no_grad():
            chosen = theirs(row).logits[:, -1].argmax(-1)
        assert torch.equal(chosen, new[:, position])
        row = torch.cat((row, chosen[:, None]), dim=1)


def test_twenty_steps_lower_the_loss(tmp_path):
    text = toy_streams()["stdlib"]
    run = train(tmp_path, 20)
    assert held_out_loss(run.model, text, 32) < held_out_loss(toy(), text, 32) - 1.0
    assert run.state.tokens == 20 * 8 * 32
    assert [row["step"] for row in json.loads((tmp_path / "curve.json").read_text())] == [
        5,
        10,
        15,
        20,
    ]


def test_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """Bit for bit, through a growth: batches, optimizers and schedule all come back."""
    phases = (
        Phase(until=0.4, layers=2, length=32, batch=4),
        Phase(until=1.0, layers=4, length=32, batch=4),
    )
    runs = {}
    for name, stops in {"whole": (None,), "parts": (4, 5, None)}.items():
        for stop in stops:
            runs[name] = train(tmp_path / name, 15, stop=stop, phases=phases, decay_from=0.45)
    assert runs["parts"].state.step == runs["whole"].state.step == 15
    for one, other in zip(
        runs["whole"].model.parameters(), runs["parts"].model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_distillation_lowers_the_divergence(tmp_path):
    target = train(tmp_path / "target", 40).model
    draft, streams = toy(seed=9, layers=1), toy_streams()
    tokens = torch.from_numpy(streams["stdlib"][:96].astype(np.int64))[None]

    def gap(model: LanguageModel) -> float:
        with torch.no_grad():
            return float(divergence(model(tokens)[0], target(tokens)[0]))

    before = gap(draft)
    mixture = Mixture(streams, {"stdlib": 1.0}, seed=1)
    run = Pretraining(
        draft, mixture, plan(30, layers=1), tmp_path / "draft", loss=DistillationLoss(target)
    )
    after = gap(run.run())
    assert after < 0.6 * before
    assert divergence(target(tokens)[0], target(tokens)[0]).abs() < 1e-6


def test_yaml_defaults_are_the_recipes_arguments():
    from omegaconf import OmegaConf

    for what, recipe in cli.RECIPES.items():
        path = Path(__file__).parents[2] / "conf" / "train" / f"{what}.yaml"
        cfg = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        shared = {key: value for key, value in cfg.items() if key in Session.__slots__}
        build(Session, shared)
        check_values(recipe, {key: value for key, value in cfg.items() if key not in shared})


@shipped
@pytest.mark.parametrize(("part", "layers", "limit"), [("target", 24, 40e6), ("draft", 2, 12e6)])
def test_shipped_models_load_and_predict(part, layers, limit):
    """Held-out loss per byte on one held-out module stays below a bound a broken model misses."""
    from transformers import AutoModelForCausalLM

    folder = ASSETS / part
    assert (folder / "model.safetensors").stat().st_size <= limit
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.num_hidden_layers == layers
    assert model.config.max_position_embeddings >= 1024
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (corpus.stdlib_root() / "copy.py").read_text()
    ids = encode(tokenizer, [text])[:1024].astype(np.int64)
    row = torch.from_numpy(ids)[None]
    with torch.no_grad():
        loss = float(model(row, labels=row).loss)
    size = len(tokenizer.decode(ids.tolist()).encode())
    assert loss * len(ids) / size < {"target": 1.1, "draft": 1.35}[part]


@shipped
def test_shipped_card_is_what_the_recipe_writes():
    """README.md is generated: the template and the records give exactly the shipped page."""
    assert card.render_card(ASSETS) == (ASSETS / "README.md").read_text()


@shipped
def test_shipped_files_name_no_machine():
    for path in ASSETS.rglob("*"):
        if path.suffix in {".json", ".md"} and path.name != "tokenizer.json":
            assert not re.search("/(root|work)" + "/|://", path.read_text()), path
