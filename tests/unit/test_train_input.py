"""Training recipes: refused input, resumed runs, and files that are never overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from specdec.errors import UserError
from specdec.train import cli, recipes, session
from specdec.train.corpus import Corpus, Document
from specdec.train.exits import ExitHeads, HeadSpec, SelfDistillation
from specdec.train.lm import Loss, Pretraining
from specdec.train.model import LanguageModel, ModelShape, load_hf, save_hf
from specdec.train.plan import RunPlan
from specdec.train.sections import build
from specdec.train.streams import Mixture, compact
from specdec.train.tokenizer import save_tokenizer, train_tokenizer
from specdec.train.unlikelihood import UnlikelihoodLoss, minus_log_rest
from tests.shapes import small_llama

SHAPE = small_llama(2)  # 48 tokens, 64 positions
LINE = (np.arange(900) % 40 + 1).astype(np.uint16)


def toy(seed: int = 0, shape: ModelShape = SHAPE) -> LanguageModel:
    return LanguageModel(shape, generator=torch.Generator().manual_seed(seed))


def text(seed: int = 1) -> Mixture:
    return Mixture({"stdlib": LINE}, {"stdlib": 1.0}, seed)


def plan(**changes: object) -> RunPlan:
    given = {"phases": [{"until": 1.0, "length": 16, "batch": 2}], "max_steps": 7, **changes}
    return RunPlan.of({"warmup_steps": 2, "log_every": 2, **given})


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


class TestResuming:
    @pytest.mark.parametrize("kind", ["heads", "unlikelihood"])
    def test_a_stopped_run_equals_an_uninterrupted_one(self, kind: str, tmp_path: Path) -> None:
        """Also for losses with counters or draws, which once restarted from zero."""
        marked = [np.roll(LINE, 3 * n)[:30].astype(np.int64) + 48 for n in range(9)]
        samples = np.concatenate([piece for row in marked for piece in ([0], row)])

        def run(folder: Path, stop: int | None) -> torch.Tensor:
            target, loss = toy(3), Loss()
            model: torch.nn.Module = toy()
            if kind == "heads":
                model = ExitHeads(target, [build(HeadSpec, {"kind": "norm", "layer": 1})])
                loss = SelfDistillation(target, every=3)
            else:
                alone = Mixture({"samples": compact(samples)}, {"samples": 1.0}, 4)
                loss = UnlikelihoodLoss(alone, weight=1.0, batch=1, length=16)
            run = Pretraining(model, text(), plan(), folder, loss=loss)
            return weights(run.run(stop_after_steps=stop))

        whole = run(tmp_path / "whole", None)
        for stop in (2, 3, None):
            parts = run(tmp_path / "parts", stop)
        assert torch.equal(whole, parts)

    def test_refuses_to_resume_under_changed_settings(self, tmp_path: Path) -> None:
        """A finished run of another plan, seed or recipe was once returned as the new run."""
        Pretraining(toy(), text(), plan(), tmp_path, settings={"target": "a"}).run()
        again = Pretraining(toy(), text(), plan(log_every=3), tmp_path, settings={"target": "a"})
        assert again.state.step == 7, "settings that do not affect the weights may change"
        for changed, value, others in (
            ("plan.muon_lr", "0.1", {"schedule": plan(muon_lr=0.1)}),
            ("seed", "5", {"mixture": text(5)}),
            ("target", "b", {"settings": {"target": "b"}}),
        ):
            mixture, schedule = others.get("mixture", text()), others.get("schedule", plan())
            settings = others.get("settings", {"target": "a"})
            with pytest.raises(UserError, match=rf"{changed} was .*, is {value}.*another work_dir"):
                Pretraining(toy(), mixture, schedule, tmp_path, settings=settings)
        (tmp_path / "settings.json").unlink()
        with pytest.raises(UserError, match="without a record of its settings"):
            Pretraining(toy(), text(), plan(), tmp_path)


class TestRefusals:
    def test_every_window_is_drawn_and_the_last_token_is_a_target(self) -> None:
        """Of 33 tokens there are two windows of 16; 17 in a stream make exactly one."""
        mixture = Mixture({"stdlib": LINE[:33]}, {"stdlib": 1.0}, 0)
        inputs, targets = mixture.batch(2, 16)
        assert sorted(inputs[:, 0].tolist()) == [1, 17]
        assert int(targets.max()) == 33
        assert Mixture({"stdlib": LINE[:17]}, {"stdlib": 1.0}, 0).batch(1, 16)[1][0, -1] == 17

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("model_type", "qwen2"),
            ("rms_norm_eps", 1e-5),
            ("tie_word_embeddings", False),
            ("attention_bias", True),
            ("hidden_act", "gelu"),
            ("eos_token_id", 2),
            ("rope_parameters", {"rope_theta": 1e4, "rope_type": "llama3"}),
        ],
    )
    def test_models_of_another_format(self, key: str, value: object, tmp_path: Path) -> None:
        """They were once read without an error; an untied output matrix was dropped."""
        save_hf(toy(), tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        load_hf(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(UserError, match=f"{'rope_type' if 'rope' in key else key}="):
            load_hf(tmp_path)


class TestNumbers:
    def test_minus_log_rest_and_its_gradient_near_one(self) -> None:
        """By the definition in float64; the gradient by the token's own logit is p, up to p = 1.

        A floor under 1 - p once took the gradient away from the most settled loops.
        """
        logits = torch.zeros(1, 4, 5)
        logits[0, :, 2] = torch.tensor([0.0, 5.0, 16.0, 40.0])
        logits.requires_grad_(True)
        found = minus_log_rest(logits, torch.full((1, 4), 2))
        others = 4.0
        expected = torch.log1p(torch.exp(logits[0, :, 2].detach().double()) / others)
        torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=0)
        found.sum().backward()
        p = logits.detach().softmax(-1)[0, :, 2]
        torch.testing.assert_close(logits.grad[0, :, 2], p)


class TestProcesses:
    def test_rows_are_shared_evenly_or_not_at_all(self, monkeypatch, tmp_path: Path) -> None:
        monkeypatch.setattr(session, "rank_and_size", lambda: (1, 2))
        own = session.own_rows(torch.arange(4)[:, None], device=torch.device("cpu"))
        assert own[0].flatten().tolist() == [1, 3]
        odd = plan(phases=[{"until": 1.0, "length": 16, "batch": 3}])
        with pytest.raises(UserError, match="batch=3 must be a multiple of num_processes=2"):
            Pretraining(toy(), text(), odd, tmp_path)

    @pytest.mark.parametrize(
        ("device", "gpus", "made"),
        [("auto", 1, 1), ("cuda:1", 4, 1), ("cuda", 2, 2), ("cpu", 1, 3)],
    )
    def test_one_process_per_gpu(self, device: str, gpus: int, made: int, monkeypatch) -> None:
        """The recipes' two processes on a machine of one GPU ended in `invalid device ordinal`."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        sizes, lines = [], []
        monkeypatch.setattr(session, "_run_in_processes", lambda *words: sizes.append(words[-1]))
        keys = {"output_dir": "", "seed": 0, "num_processes": 3, "device": device}
        ours = session.Session(**keys, report=lambda _, line: lines.append(line))
        here = []
        session.start(here.append, ours, {})
        assert (len(here) == 1, sizes or [1]) == (made == 1, [made])
        assert bool(lines) == (made < 3)

    @pytest.mark.distributed
    def test_an_error_of_a_process_is_raised_in_the_parent(self, tmp_path: Path) -> None:
        cfg = {"work_dir": str(tmp_path), "output_dir": str(tmp_path), "seed": 0}
        cfg |= {"shape": {}, "weights": {}, "plan": {}, "num_threads": 1, "num_processes": 2}
        with pytest.raises(UserError, match=r"tokens.npz is missing: run `specdec train tokenizer"):
            cli.run("target", cfg)


class TestTokenizers:
    CONFIG = {
        **{"packages": {}, "gsm8k_mb": 0.0, "copy_threshold": 0.5, "vocab_size": 300},
        **{"merges_mb": 1.0, "max_positions": 64, "seed": 0},
    }

    @pytest.fixture
    def made(self, monkeypatch):
        """make_tokenizer over a corpus of three files."""
        source = "def double(value):\n    return value + value\n" * 3
        corpus = Corpus(licences={"stdlib": "PSF-2.0"})
        corpus.train += [Document("stdlib", "file", f"{i}.py", source) for i in range(2)]
        corpus.held_out.append(Document("stdlib", "file", "held.py", source))
        monkeypatch.setattr(recipes, "build_corpus", lambda **_: corpus)
        return lambda **words: cli.run("tokenizer", {**self.CONFIG, **words})

    def test_a_new_tokenizer_beside_models_of_another(self, made, tmp_path: Path) -> None:
        """`specdec train tokenizer`, as errors say to run it, once broke the models that ship."""
        other = train_tokenizer(["something else entirely, 12 times"] * 3, 280)
        save_tokenizer(other, tmp_path / "own" / "target", 64)
        save_hf(toy(), tmp_path / "own" / "target")
        before = (tmp_path / "own" / "target" / "tokenizer.json").read_bytes()
        places = {"work_dir": str(tmp_path / "work"), "output_dir": str(tmp_path / "own")}
        with pytest.raises(UserError, match=r"another tokenizer.*tokenizer=.*own.target"):
            made(tokenizer=None, **places)
        assert not (tmp_path / "work").exists()
        made(tokenizer=str(tmp_path / "own" / "target"), **places)
        streams = recipes.need_streams(tmp_path / "work", tmp_path / "own" / "target")
        (words,) = {Tokenizer.decode(other, ids) for ids in np.split(streams["stdlib"], 2)}
        assert words.startswith("def double") or "def double" in words
        assert (tmp_path / "own" / "target" / "tokenizer.json").read_bytes() == before
        assert not (tmp_path / "own" / "corpus.json").exists()

    def test_streams_of_another_tokenizer_are_refused(self, made, tmp_path: Path) -> None:
        work = str(tmp_path / "work")
        made(tokenizer=None, work_dir=work, output_dir=str(tmp_path / "one"))
        other = train_tokenizer(["something else entirely"] * 3, 280)
        save_tokenizer(other, tmp_path / "two", 64)
        with pytest.raises(UserError, match="encoded by another tokenizer"):
            recipes.need_streams(Path(work), tmp_path / "two")
        assert recipes.need_streams(Path(work), tmp_path / "one" / "target")
