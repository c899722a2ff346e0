"""Training recipes: refused input, resumed runs, and files that are never overwritten."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from specdec.errors import UserError
from specdec.train import cli, recipes, session
from specdec.train.agreement import prompts_of
from specdec.train.corpus import Corpus, Document
from specdec.train.exits import ExitHeads, HeadSpec, SelfDistillation
from specdec.train.lm import Loss, Pretraining, held_out_loss, keep_settings
from specdec.train.model import LanguageModel, ModelShape, load_hf, save_hf
from specdec.train.plan import RunPlan
from specdec.train.samples import Sampling, generate, sample_documents
from specdec.train.sections import build
from specdec.train.streams import Mixture, compact, save_streams
from specdec.train.tokenizer import END, save_tokenizer, train_tokenizer
from specdec.train.unlikelihood import UnlikelihoodLoss, mark_repeated, minus_log_rest
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
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"phases": [{"until": 0.5, "length": 8, "batch": 1}]}, "the last at 1.0"),
            (
                {"phases": [{"until": u, "length": 8, "batch": 1} for u in (0.7, 0.6, 1.0)]},
                "rising shares",
            ),
            (
                {
                    "phases": [
                        {"until": u, "length": 8, "batch": 1, "layers": n}
                        for u, n in ((0.5, 4), (1.0, 6))
                    ]
                },
                "multiples of those before",
            ),
            ({"phases": [{"until": 1.0, "length": 0, "batch": 1}]}, "at least 1"),
            ({"phases": [{"until": 1.0, "lenght": 8, "batch": 1}]}, "did you mean length"),
            ({"phases": [{"until": 1.0, "batch": 1}]}, "lacks length"),
            ({"log_every": 0}, "at least 1"),
            ({"max_step": 3}, "did you mean max_steps"),
        ],
    )
    def test_invalid_plans(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(UserError, match=message):
            plan(**changes)

    def test_a_plan_that_this_model_or_text_cannot_run(self, tmp_path: Path) -> None:
        for phase, message in (
            ({"length": 65, "batch": 1}, "beyond the model's 64 positions"),
            ({"length": 8, "batch": 1, "layers": 3}, "cannot be grown to layers=3"),
        ):
            with pytest.raises(UserError, match=message):
                Pretraining(toy(), text(), plan(phases=[{"until": 1.0, **phase}]), tmp_path)
        short = Mixture({"stdlib": LINE[:16]}, {"stdlib": 1.0}, 1)
        with pytest.raises(UserError, match="no window of length=16 in stream 'stdlib' of 16"):
            Pretraining(toy(), short, plan(), tmp_path)
        with pytest.raises(UserError, match="20 held-out tokens do not fill a window of 256"):
            Pretraining(toy(), text(), plan(), tmp_path, held_out=LINE[:20])
        with pytest.raises(UserError, match="do not fill a window"):
            held_out_loss(toy(), LINE[:20], 32)
        assert not (tmp_path / "checkpoint.pt").exists()

    def test_every_window_is_drawn_and_the_last_token_is_a_target(self) -> None:
        """Of 33 tokens there are two windows of 16; 17 in a stream make exactly one."""
        mixture = Mixture({"stdlib": LINE[:33]}, {"stdlib": 1.0}, 0)
        inputs, targets = mixture.batch(2, 16)
        assert sorted(inputs[:, 0].tolist()) == [1, 17]
        assert int(targets.max()) == 33
        assert Mixture({"stdlib": LINE[:17]}, {"stdlib": 1.0}, 0).batch(1, 16)[1][0, -1] == 17

    def test_empty_streams(self) -> None:
        """GSM8K without its data is left out; alone it is an error, not a division by zero."""
        empty = np.zeros(0, np.uint16)
        both = Mixture({"stdlib": LINE, "gsm8k": empty}, {"stdlib": 0.9, "gsm8k": 0.1}, 0)
        assert both.names == ["stdlib"]
        with pytest.raises(UserError, match="no stream with text"):
            Mixture({"gsm8k": empty}, {"gsm8k": 1.0}, 0)

    def test_continuations_beyond_the_model(self) -> None:
        prompt = torch.arange(1, 31)[None]
        with pytest.raises(UserError, match="30 prompt tokens and 40 new ones do not fit"):
            generate(toy(), prompt, 40, [Sampling()], torch.Generator())
        with pytest.raises(UserError, match="nothing to sample from"):
            sample_documents(toy(), [], {}, seed=0)

    def test_unknown_names_and_values_out_of_range(self) -> None:
        with pytest.raises(UserError, match="did you mean temperature"):
            build(Sampling, {"temprature": 1.0}, "sampling.rules")
        with pytest.raises(UserError, match=r"rules.top_p=0.0 cannot be used.* above 0"):
            build(Sampling, {"temperature": 1.0, "top_p": 0.0}, "rules")
        with pytest.raises(UserError, match="prompts of human_eval: choose from"):
            prompts_of(
                "human_eval",
                Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}'),
                1,
            )

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

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            ("[1]", "not a JSON object"),
            ("[" * 100_000, "nested too deeply"),
            ({"hidden_size": "many"}, "hidden_size='many'"),
            ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
            ({"intermediate_size": None}, "no intermediate_size"),
            ({"rope_parameters": [1]}, "rope_parameters=[1]"),
            ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x'"),
        ],
        ids=["list", "deep", "text", "fraction", "missing", "rope", "theta"],
    )
    def test_damaged_configs(self, content: object, named: str, tmp_path: Path) -> None:
        save_hf(toy(), tmp_path)
        path = tmp_path / "config.json"
        if isinstance(content, dict):
            content = json.dumps(json.loads(path.read_text()) | content)
        path.write_text(str(content))
        with pytest.raises(UserError, match=re.escape(named)):
            load_hf(tmp_path)

    def test_a_damaged_record_of_settings(self, tmp_path: Path) -> None:
        (tmp_path / "work").touch()
        (tmp_path / "settings.json").write_text("[" * 100_000)
        with pytest.raises(UserError, match="nested too deeply"):
            keep_settings(tmp_path / "settings.json", {"a": 1}, [tmp_path / "work"])


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

    def test_marks_above_sixteen_bits(self) -> None:
        """A vocabulary of 40,000 is marked by ids up to 80,000."""
        marked = compact(mark_repeated(np.array([1, 2, 39_999] * 4), vocab_size=40_000, ngram=3))
        assert int(marked.max()) == 79_999
        assert compact(LINE).dtype == np.uint16


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

    def test_a_tokenizer_whose_end_token_is_not_0(self, made, tmp_path: Path) -> None:
        other = Tokenizer.from_str(train_tokenizer(["a b"] * 3, 280).to_str().replace(END, "<x>"))
        save_tokenizer(other, tmp_path, 64)
        for folder, message in ((tmp_path, "as id 0"), (tmp_path / "none", "no tokenizer.json")):
            with pytest.raises(UserError, match=message):
                made(tokenizer=str(folder), work_dir=str(tmp_path), output_dir=str(tmp_path))


def test_a_target_needs_a_depth_and_room_for_the_vocabulary(tmp_path: Path) -> None:
    save_streams({"stdlib": LINE, "held_out": LINE}, tmp_path / "tokens.npz")
    sizes = {"hidden": 8, "feed_forward": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    given = {
        **{"work_dir": str(tmp_path), "output_dir": str(tmp_path), "weights": {"stdlib": 1.0}},
        "seed": 0,
    }
    for shape, layers, message in (
        ({**sizes, "vocab_size": 40}, 1, "vocab_size=40, but the token streams hold id 40"),
        ({**sizes, "hiden": 8}, 1, "did you mean hidden"),
        (sizes, None, "the initial depth"),
    ):
        phase = {"until": 1.0, "length": 16, "batch": 2, "layers": layers}
        words = {"phases": [phase], "max_steps": 1, "eval_length": 16}
        with pytest.raises(UserError, match=message):
            cli.run("target", {"shape": shape, "plan": words, **given})
