"""The recipes of the bundled family (experiments/tiny_family), and bounds on what ships."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import specdec.assets
from experiments.tiny_family import card, corpus, recipes
from experiments.tiny_family.__main__ import main
from experiments.tiny_family.lm import Pretraining, held_out_loss
from experiments.tiny_family.model import LanguageModel, ModelShape, load_hf, save_hf
from experiments.tiny_family.plan import RunPlan
from experiments.tiny_family.samples import Sampling, generate
from experiments.tiny_family.streams import Mixture, encode
from experiments.tiny_family.tokenizer import save_tokenizer, train_tokenizer
from experiments.tiny_family.unlikelihood import mark_repeated, minus_log_rest
from specdec.errors import UserError

pytestmark = pytest.mark.slow

ASSETS = Path(next(iter(specdec.assets.__path__))) / "tiny"
SIZES = {"hidden": 16, "feed_forward": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
SOURCE = '''def scaled(value, factor):
    """The product of a value and a factor, both of them numbers.

    Nothing is checked here.
    """
    return value * factor
'''
FAST = ["compiled=false", "device=cpu", "num_threads=1", "precision=fp32"]
SAMPLING = ["sampling.prompts=4", "sampling.gsm8k_prompts=0", "sampling.new_tokens=8"]


def toy(seed: int = 0, layers: int = 2) -> LanguageModel:
    shape = ModelShape(num_layers=layers, vocab_size=300, max_positions=1024, **SIZES)
    return LanguageModel(shape, generator=torch.Generator().manual_seed(seed))


def pretraining(folder: Path, seed: int = 3, **changes: Any) -> Pretraining:
    """Counting modulo 50: learnt in a few steps, through a growth."""
    line = (np.arange(4000) % 50 + 1).astype(np.uint16)
    phases = [{"until": 0.4, "layers": 2}, {"until": 1.0, "layers": 4}]
    phases = [{**phase, "length": 32, "batch": 4} for phase in phases]
    plan = {"phases": phases, "max_steps": 15, "warmup_steps": 4, "log_every": 5, **changes}
    mixture = Mixture({"stdlib": line}, {"stdlib": 1.0}, seed)
    return Pretraining(toy(), mixture, RunPlan.of(plan), folder)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Bit for bit, through a growth; changed settings are refused."""
    whole = pretraining(tmp_path / "whole").run()
    for stop in (4, 5, None):
        parts = pretraining(tmp_path / "parts").run(stop_after_steps=stop)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)
    text = (np.arange(400) % 50 + 1).astype(np.uint16)
    assert held_out_loss(whole, text, 32) < held_out_loss(toy(), text, 32) - 0.3
    with pytest.raises(UserError, match=r"seed was 3, is 5.*another work_dir"):
        pretraining(tmp_path / "parts", seed=5)


def test_weights_mean_the_same_in_transformers(tmp_path: Path) -> None:
    """Same weights, same logits but for summation order; sampling's cache agrees too."""
    save_hf(toy(), tmp_path)
    ours = load_hf(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    row = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    new = generate(ours, row, 8, [Sampling()], torch.Generator().manual_seed(0))
    for position in range(8):
        with torch.no_grad():
            logits = theirs(row).logits
            torch.testing.assert_close(ours(row), logits, atol=2e-5, rtol=0)
        chosen = logits[:, -1].argmax(-1)
        assert torch.equal(chosen, new[:, position])
        row = torch.cat((row, chosen[:, None]), dim=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match="tie_word_embeddings="):
        load_hf(tmp_path)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(2, 4))
def test_a_token_is_marked_when_a_repetition_covers_it(tokens: list[int], n: int) -> None:
    """By the definition, quadratically: some n-gram over it stands at an earlier place too."""
    marked = mark_repeated(np.asarray(tokens, np.int64), vocab_size=10, ngram=n) >= 10
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    again = [i for i, gram in enumerate(grams) if gram in grams[:i]]
    assert marked.tolist() == [any(i <= t < i + n for i in again) for t in range(len(tokens))]


def test_unlikelihood_near_one() -> None:
    """The gradient by the token's own logit is p, up to p = 1.

    A floor under 1 - p once took the gradient away from the most settled loops.
    """
    logits = torch.zeros(1, 4, 5)
    logits[0, :, 2] = torch.tensor([0.0, 5.0, 16.0, 40.0])
    logits.requires_grad_(True)
    found = minus_log_rest(logits, torch.full((1, 4), 2))
    expected = torch.log1p(torch.exp(logits[0, :, 2].detach().double()) / 4.0)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=0)
    found.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0, :, 2], logits.detach().softmax(-1)[0, :, 2])


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A corpus of forty functions; the folders of a family."""
    built = corpus.Corpus(licences={"stdlib": "PSF-2.0"})
    for number in range(40):
        text = SOURCE.replace("scaled", f"scaled_{number}")
        for kind in ("file", "functions"):
            built.train.append(corpus.Document("stdlib", kind, "a.py", text))
        built.held_out.append(corpus.Document("stdlib", "file", "b.py", text))
    monkeypatch.setattr(recipes, "build_corpus", lambda **_: built)
    return [f"work_dir={tmp_path / 'work'}", f"output_dir={tmp_path / 'own'}"]


def test_a_family_from_text_to_ngrams(places: list[str], tmp_path: Path) -> None:
    """Tokenizer, target, finish, prompts and n-gram samples, each from the files of the others."""
    work, own = tmp_path / "work", tmp_path / "own"
    main(["tokenizer", *places, "vocab_size=330"])
    sizes = [f"shape.{name}={size}" for name, size in SIZES.items()]
    sizes += ["shape.vocab_size=330", "weights={stdlib: 1}", "plan.restarts=[]"]
    plan = ["plan.phases=[{until: 1.0, layers: 2, length: 32, batch: 2}]", "plan.max_steps=2"]
    main(["target", *places, *sizes, *plan, "plan.cycle_rates=[]", *FAST])
    finish = ["finish", *places, *SAMPLING, *plan, "rounds=1", "unlikelihood.length=16", *FAST]
    finish += ["weights={stdlib: 1}", "plan.phases=[{until: 1.0, length: 32, batch: 2}]"]
    finish += ["sampling.rules=[{temperature: 0.0}]", "plan.eval_length=32"]
    main(finish)
    done = {path.name: path.read_bytes() for path in (own / "target").glob("*.safetensors")}
    main(finish)
    again = {path.name: path.read_bytes() for path in (own / "target").glob("*.safetensors")}
    assert done == again, "a repeated command starts from the same first weights"
    main(["prompts", *places, "prompts=4", "gsm8k_prompts=0"])
    prompts = (work / "prompts.jsonl").read_text().splitlines()
    assert json.loads(prompts[0])["prompt"].endswith('"""')
    for path in (own / "target").iterdir():
        (own / "draft").mkdir(exist_ok=True)
        (own / "draft" / path.name).write_bytes(path.read_bytes())
    ngram = ["ngram", *places, "sampling.prompts=4", "sampling.new_tokens=8"]
    main([*ngram, "num_threads=1", "precision=fp32"])
    tokens = load_file(own / "ngram" / "samples.safetensors")["tokens"]
    assert int((tokens == 0).sum()) == 4, "a document per prompt"


def test_a_new_tokenizer_beside_models_of_another(places: list[str], tmp_path: Path) -> None:
    """It once broke the models that ship."""
    other = train_tokenizer(["something else entirely, 12 times"] * 3, 280)
    save_tokenizer(other, tmp_path / "own" / "target", 64)
    save_hf(toy(), tmp_path / "own" / "target")
    with pytest.raises(UserError, match=r"another tokenizer.*tokenizer=.*own.target"):
        main(["tokenizer", *places])
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["targe"], "did you mean target"),
        (["target", "plan.max_stepz=1"], "no key plan.max_stepz"),
        (["target", "seed=-1"], "seed=-1 cannot be used"),
        (["target", "device=cuda:99"], "cuda:99"),
        (["target", "work_dir=none", "device=cpu"], "run the recipe `tokenizer` first"),
    ],
)
def test_unusable_input_is_refused(words: list[str], message: str) -> None:
    """A seed below 0 and an unknown device once ended in tracebacks."""
    with pytest.raises(UserError, match=message):
        main(words)


@pytest.mark.parametrize(("part", "layers", "limit"), [("target", 24, 40e6), ("draft", 2, 12e6)])
def test_shipped_models_load_and_predict(part: str, layers: int, limit: float) -> None:
    """Held-out loss per byte on one held-out module stays below a bound a broken model misses."""
    folder = ASSETS / part
    assert (folder / "model.safetensors").stat().st_size <= limit
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.num_hidden_layers == layers
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (corpus.stdlib_root() / "copy.py").read_text()
    ids = encode(tokenizer, [text])[:1024].astype(np.int64)
    row = torch.from_numpy(ids)[None]
    with torch.no_grad():
        loss = float(model(row, labels=row).loss)
    size = len(tokenizer.decode(ids.tolist()).encode())
    assert loss * len(ids) / size < {"target": 1.1, "draft": 1.35}[part]


def test_the_shipped_card_is_what_the_recipe_writes_and_names_no_machine() -> None:
    assert card.render_card(ASSETS) == (ASSETS / "README.md").read_text()
    for path in ASSETS.rglob("*"):
        if path.suffix in {".json", ".md"} and path.name != "tokenizer.json":
            assert not re.search("/(root|work)" + "/|://", path.read_text()), path
