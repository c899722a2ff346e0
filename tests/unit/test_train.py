"""`specdec train`: drafters learn, resume, are read back, and accept what was measured."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import dispatch_model
from transformers import PreTrainedModel

import specdec
from specdec.cli.main import main
from specdec.errors import UserError
from specdec.models.bundled import family_path
from specdec.models.frozen import FrozenModel
from specdec.models.random import random_model
from specdec.pairs import PretrainedPair
from specdec.train.block import BlockDrafter, BlockSpec
from specdec.train.drafter import OutputOptions
from specdec.train.eagle import EagleDrafter, EagleSpec
from specdec.train.losses import Goal, LossOptions, Objective
from specdec.train.run import train
from specdec.train.texts import AnsweredText, Batch, Windows, read_answers

pytestmark = pytest.mark.slow

VOCAB, PROMPT, LENGTH = 61, 4, 28
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"steps": 3, "output": {"matrix": "own", "vocabulary": 40}},
    "medusa": {
        **{"heads": 2, "output": {"matrix": "own", "vocabulary": None}},
        "loss": {"temperature": 0.5, "label_weight": 1.0},
    },
    "exit": {
        "head": "transformer",
        "layers": [2],
        "output": {"matrix": "shared", "vocabulary": 40},
    },
    "draft": {"layers": [0, 3]},
    "block": {
        **{"kind": "dspark", "block": 3, "num_layers": 1},
        "output": {"matrix": "shared", "vocabulary": 40},
    },
}
DECODED = {
    "eagle3": ["source=eagle", "model.eagle_head={out}", "policy=chain", "policy.gamma=3"],
    "medusa": ["source=medusa", "source.heads=2", "model.exit_heads={out}", "policy.gamma=2"],
    "exit": ["strategy=eesd", "model.exit_heads={out}", "model.exit_layer=2", "policy.gamma=4"],
    "draft": ["model.draft={out}", "policy.gamma=4"],
    "block": ["source=block", "source.head={out}", "policy=chain", "policy.gamma=3"],
}
"""Overrides of a run that drafts chains, as agreement is measured of."""


def config(kind: str, out: Path, answers: Path) -> dict[str, Any]:
    """Options under which a small model's answers are learnt by heart."""
    return {
        **{"output_dir": str(out), "answers": str(answers), "held_out": 2, "seed": 0},
        "plan": {"learning_rate": 0.01, "batch": 4, "length": LENGTH, "max_steps": 40}
        | {"warmup_steps": 4},
        "loss": {"temperature": 0.5},
        **KINDS[kind],
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk and the greedy answers that it gives to random prompts."""
    folder = tmp_path_factory.mktemp("train")
    model = random_model(vocab_size=VOCAB, max_positions=128, seed=3)
    model.save_pretrained(folder / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # its smallest tokens are the model's
        shutil.copy(Path(family_path("bundled:target")) / name, folder / "target")
    texts = torch.randint(1, VOCAB, (10, PROMPT), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        while texts.shape[1] < LENGTH:
            texts = torch.cat([texts, model(texts).logits[:, -1:].argmax(-1)], 1)
    lines = [
        {"id": i, "prompt_token_ids": row[:PROMPT], "output_token_ids": row[PROMPT:]}
        for i, row in enumerate(texts.tolist())
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def target_of(place: Path) -> PreTrainedModel:
    from specdec.models.loading import load_model

    return load_model(place / "target")


def texts_of(place: Path) -> list[AnsweredText]:
    return list(read_answers(place / "answers.jsonl", None, {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_learns_and_decoding_accepts_what_was_measured(
    kind: str, place: Path, tmp_path: Path
) -> None:
    """It learns answers by heart, and a run of the preset needs as many target passes as said."""
    values = config(kind, tmp_path, place / "answers.jsonl")
    target = target_of(place)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    by_name = train(kind, values, target)
    assert all(torch.equal(before[n], w) for n, w in target.state_dict().items())
    (record,) = tmp_path.glob("training*.json")
    curve = json.loads(record.read_text())["curve"]
    assert curve[-1]["loss"] < 0.8 * curve[0]["loss"]
    assert by_name is not None
    (found,) = by_name.values()
    texts = texts_of(place)
    held = [texts[0], texts[-1]]
    passes = emitted = 0
    for text in held:
        steps: list[specdec.Step] = []
        words = [word.format(out=tmp_path) for word in DECODED[kind]]
        words += ["model=hf", f"model.target={place / 'target'}", "model.dtype=float32"]
        words += ["model.device=cpu", "ignore_eos=true", f"max_new_tokens={LENGTH - PROMPT}"]
        prompt, answer = text.tokens[:PROMPT].tolist(), text.tokens[PROMPT:].tolist()
        result = specdec.generate(prompt, overrides=words, on_step=steps.append)
        assert list(result.tokens) == answer
        passes, emitted = passes + len(steps), emitted + len(answer)
    assert (found.passes, found.tokens) == (passes, emitted)
    assert found.tokens_per_pass > 1.2


@pytest.mark.parametrize("kind", ["eagle3", "draft"])
def test_a_stopped_run_equals_an_uninterrupted_one(kind: str, place: Path, tmp_path: Path) -> None:
    """Bit for bit, also where the loss uses other positions in every step, and after Ctrl+C."""

    def interrupt(progress: float, _line: str) -> None:
        if progress >= 0.6:
            raise KeyboardInterrupt

    files = dict[str, bytes]()
    for name, stops in {"whole": [None], "parts": [1e-9, "Ctrl+C", None]}.items():
        for stop in stops:
            values = config(kind, tmp_path / name, place / "answers.jsonl")
            values["plan"] |= {"max_steps": 5, "stop_minutes": None if stop == "Ctrl+C" else stop}
            values["loss"] |= {"every": 3}
            if stop == "Ctrl+C":
                with pytest.raises(KeyboardInterrupt):
                    train(kind, values, target_of(place), report=interrupt)
            else:
                assert (train(kind, values, target_of(place)) is None) == (stop is not None)
        files[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert files["whole"] == files["parts"]
    values["plan"]["learning_rate"] = 0.02
    with pytest.raises(UserError, match=r"learning_rate was 0.01, is 0.02.*another work_dir"):
        train(kind, values, target_of(place))


class TestLosses:
    def test_losses_of_known_distributions(self) -> None:
        """p is (5, 3, 2) / 10, q (2, 2, 6) / 10; in the draft vocabulary {0, 2} p is (5, 2) / 7."""
        p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
        kept, ids = torch.tensor([[0.25, 0.75]]), torch.tensor([0, 2])

        def loss(draft: torch.Tensor, ids: torch.Tensor | None, **options: Any) -> float:
            goal = Goal(p.log(), ids, LossOptions(**options))
            return float(goal.loss(draft.log(), torch.tensor([2]), slice(None)))

        divergence = (p * (p / q).log()).sum()
        assert loss(q, None) == pytest.approx(float(divergence))
        assert loss(q, None, objective=Objective.ACCEPTANCE) == pytest.approx(1 - 0.6)
        small = torch.tensor([5 / 7, 2 / 7])
        divergence = (small * (small / kept[0]).log()).sum()
        assert loss(kept, ids) == pytest.approx(float(divergence))
        assert loss(kept, ids, objective=Objective.ACCEPTANCE) == pytest.approx(1 - (0.25 + 0.2))
        weighed = {"target_weight": 0.0, "label_weight": 2.0}
        assert loss(q, None, **weighed) == pytest.approx(-2 * np.log(0.6))
        assert loss(kept, ids, **weighed) == pytest.approx(-2 * np.log(0.75))

    def test_positions_outside_the_draft_vocabulary_are_left_out(self) -> None:
        target = torch.tensor([[5.0, 1.0, 0.0], [0.0, 5.0, 1.0]])
        draft = torch.zeros(2, 2, requires_grad=True)
        goal = Goal(target, torch.tensor([1, 2]), LossOptions())
        goal.loss(draft, torch.tensor([0, 1]), slice(None)).backward()
        assert draft.grad is not None
        assert bool((draft.grad[0] == 0).all()), "token 0 is likeliest and cannot be drafted"
        assert bool((draft.grad[1] != 0).all())

    def test_the_training_time_test_is_the_weighted_mean_of_its_steps(self, place: Path) -> None:
        """Against a head that is called row by row, as a decoder does."""
        target = FrozenModel(target_of(place))
        spec = EagleSpec(steps=3, decay=0.5)
        drafter = EagleDrafter(target, spec, OutputOptions(matrix="own"), None, 0)
        head, tokens = drafter.head, torch.from_numpy(texts_of(place)[0].tokens[None, :14]).long()
        counts = torch.ones_like(tokens, dtype=torch.bool)
        counts[:, 0] = False
        options = LossOptions(temperature=0.7, every=4)
        whole = drafter.loss(target, Batch(tokens, counts, 1), options)
        streams = target.residuals(tokens, drafter.layers)
        log_target = (target.logits(streams[target.num_layers]) / 0.7).log_softmax(-1)
        known, total = head.states(drafter.features(streams)), torch.zeros(())
        for step in range(3):
            parts = []
            for row in range(1, 13, 4):  # the offset is that of step 1
                if row + 2 + step > 13:
                    continue
                states = known[:, : row + 1]
                for _ in range(step + 1):
                    length = states.shape[1]
                    outputs = head(tokens[:, 1 : length + 1], states, torch.arange(length)[None])[
                        :, -1:
                    ]
                    states = torch.cat([states, head.fed_back(outputs)], 1)
                log_q = (head.logits(outputs)[:, 0] / 0.7).log_softmax(-1)
                log_p = log_target[:, row + 1 + step]
                parts.append((log_p.exp() * (log_p - log_q)).sum(-1))
            total = total + 0.5**step * torch.stack(parts).mean()
        torch.testing.assert_close(whole, total / 1.75)

    def test_the_loss_of_a_block_is_the_weighted_mean_of_its_drafts(self, place: Path) -> None:
        """Against blocks of one anchor each, over a draft vocabulary; 3 drafts, every anchor."""
        target, ids = FrozenModel(target_of(place)), torch.arange(0, VOCAB, 2)
        spec = BlockSpec(kind="dspark", block=3, anchors=99, decay=0.5)
        drafter = BlockDrafter(target, spec, OutputOptions(), ids)
        head, tokens = drafter.head, torch.from_numpy(texts_of(place)[0].tokens[None, :14]).long()
        counts = torch.ones_like(tokens, dtype=torch.bool)
        whole = drafter.loss(target, Batch(tokens, counts, 1), LossOptions(temperature=0.7))
        streams = target.residuals(tokens, drafter.layers)
        p_TV = (target.logits(streams[target.num_layers])[0] / 0.7).softmax(-1)
        context = head.context(drafter.features(target, streams), torch.arange(14))
        losses, inside = ([list[torch.Tensor]() for _ in range(3)] for _ in range(2))
        for anchor in range(1, 13):
            at = torch.tensor([anchor])
            rows = head(tokens[:, at], at, context)[0, 0]
            for number in range(min(3, 13 - anchor)):
                before, row = tokens[0, anchor + number][None], rows[number : number + 1]
                logits, p = head.logits(row, before)[0], p_TV[anchor + number, ids]
                log_q, log_p = (logits / 0.7).log_softmax(-1), (p / p.sum()).log()
                if bool(p.max() == p_TV[anchor + number].max()):
                    losses[number].append((log_p.exp() * (log_p - log_q)).sum())
                share = torch.minimum(p, (logits / 0.7).softmax(-1)).sum()
                estimate = head.confidence(row, before)[0]
                inside[number].append(F.binary_cross_entropy(estimate, share.detach()))
        means = [torch.stack(losses[k]).mean() + torch.stack(inside[k]).mean() for k in range(3)]
        total = sum(0.5**k * mean for k, mean in enumerate(means))
        torch.testing.assert_close(whole, total / 1.75)


class TestTexts:
    def test_answers_of_every_form_are_read(self, tmp_path: Path) -> None:
        """Text, chats and a run's records; ids above 16 bits stay what they are."""
        tokenizer = PretrainedPair(target="bundled:target").tokenizer
        tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        lines: list[dict[str, Any]] = [
            {"prompt": "def f(", "completion": "x):"},
            {"messages": [{"content": "a"}, {"content": "b"}]},
            {"id": 7, "output": [70000, 5], "text": "as in requests.jsonl"},
        ]
        path = tmp_path / "answers.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        text, chat, run = read_answers(path, tokenizer, {7: np.array([1, 2])})
        assert tokenizer.decode(text.tokens.tolist()) == "def f(x):"
        assert tokenizer.decode(chat.tokens.tolist()) == "[a]b"
        assert run.tokens.tolist() == [1, 2, 70000, 5]
        assert (run.num_prompt, run.tokens.dtype) == (2, np.int32)
        with pytest.raises(UserError, match="answers prompt 7, which data= does not have"):
            list(read_answers(path, tokenizer, {}))

    def test_an_epoch_visits_every_answer_token_once(self) -> None:
        texts = [AnsweredText(np.arange(1, size + 1, dtype=np.int32), 3) for size in range(5, 40)]
        windows = Windows(texts, length=16, batch=4, seed=1)
        seen = 0
        for step in range(windows.steps_per_epoch):
            tokens, counts, _ = windows.batch(step)
            assert tokens.numel() == windows.size(step)
            seen += int(counts.sum())
            assert bool((tokens[counts] > 3).all()), "no token of a prompt, and no padding"
        first_of_window = sum(1 for text in texts for at in (16, 32) if at < len(text.tokens))
        assert seen == sum(len(text.tokens) - 3 for text in texts) - first_of_window
        assert windows.chosen(0) != windows.chosen(windows.steps_per_epoch), "another order"


@pytest.mark.parametrize(("room", "passes"), [(1e6, 1), (3e3, 3)])
def test_states_that_are_kept_are_those_of_a_pass(room: float, passes: int, place: Path) -> None:
    rows = [text.tokens for text in texts_of(place)[:3]]
    lengths = [len(rows[0]), len(rows[1]) - 3, 1 + len(rows[2]) // 2]
    tokens = torch.zeros(3, max(lengths), dtype=torch.long)
    for row, text, length in zip(tokens, rows, lengths, strict=True):
        row[:length] = torch.from_numpy(text[:length])
    tokens[1, lengths[1] - 1] = 0  # a text that ends with token 0
    fresh, kept = FrozenModel(target_of(place)), FrozenModel(target_of(place), keep_bytes=room)
    made: list[int] = []
    kept.layers[0].register_forward_hook(lambda *_: made.append(1))
    for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2]):
        expected = fresh.residuals(tokens[order], (1, 2))
        found = kept.residuals(tokens[order], (1, 2))
        for number, streams in expected.items():
            for row, which in enumerate(order):
                text = slice(lengths[which])
                torch.testing.assert_close(found[number][row, text], streams[row, text])
    assert len(made) == passes


def test_layers_on_several_devices_give_the_same_target(place: Path) -> None:
    """By accelerate's hooks, here all on the CPU."""
    tokens = torch.arange(1, 12)[None]
    plain = FrozenModel(target_of(place))
    spread = FrozenModel(dispatch_model(target_of(place), {"": "cpu"}, force_hooks=True))
    with torch.no_grad():
        one, other = (each.residuals(tokens, {2}) for each in (plain, spread))
        torch.testing.assert_close(one[2], other[2])
        torch.testing.assert_close(plain.logits(one[4]), spread.logits(other[4]))


def test_the_target_answers_prompts_of_a_file(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command; given again, it goes on with the answers that it has written."""
    prompts = [{"question": f"def f{i}(x):"} for i in range(6)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    words = ["train", "medusa", "model=tiny", "model.device=cpu", f"data.path={path}"]
    words += ["data.field=question", "max_new_tokens=6", "plan.max_steps=2"]
    words += ["threads=1", f"output_dir={tmp_path / 'out'}", "answer_batch=3"]
    assert main([*words, "estimate_only=true"]) == 0
    assert not list((tmp_path / "out").glob("*.safetensors"))
    said = " ".join(capsys.readouterr().err.split())
    assert "peak memory about" in said
    assert "; 1 held out" in said, "a fifth of six"
    answers = (tmp_path / "out" / "work" / "answers.jsonl").read_text()
    assert main(words) == 0
    assert (tmp_path / "out" / "work" / "answers.jsonl").read_text() == answers
    assert len(list((tmp_path / "out").glob("medusa-24-*.safetensors"))) == 4
