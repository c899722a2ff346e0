"""`specdec train eagle3_head`: losses, and the recipe on a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.cli.main import main
from specdec.models.eagle_loading import HeadFiles, load_head
from specdec.train.eagle import Eagle3Spec, head_config, new_head, predictions
from specdec.train.eagle_loss import Objective, TrainingTimeTest, read_target, step_loss, wanted
from specdec.train.model import LanguageModel, ModelShape, load_hf
from tests.training import COMMON, EVALUATION, SAMPLING, SIZES, make_family, own

pytestmark = pytest.mark.slow

KIND = Objective.CROSS_ENTROPY


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return make_family(tmp_path, monkeypatch)


def small_target() -> LanguageModel:
    shape = ModelShape(num_layers=5, vocab_size=50, max_positions=128, **SIZES)
    target = LanguageModel(shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        target.lm_head.weight *= 20.0  # peaked, so that there is something to learn
    return target


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(4))


def test_losses_of_known_distributions() -> None:
    """p is (0.5, 0.3, 0.2), q (0.2, 0.2, 0.6); in the draft vocabulary {0, 2} p is (5, 2) / 7."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    ids = torch.tensor([0, 2])
    kept = torch.tensor([[0.25, 0.75]])

    def loss(kind: Objective, draft: Tensor, chosen: Tensor | None) -> float:
        probs, counts = wanted(kind, p.log()[None], chosen)
        return float(step_loss(kind, draft.log(), probs[0], None if counts is None else counts[0]))

    cross = -(p * q.log()).sum()
    assert loss(Objective.CROSS_ENTROPY, q, None) == pytest.approx(float(cross))
    assert loss(Objective.ACCEPTANCE, q, None) == pytest.approx(1 - (0.2 + 0.2 + 0.2))
    cross = -(torch.tensor([5 / 7, 2 / 7]) * kept.log()).sum()
    assert loss(Objective.CROSS_ENTROPY, kept, ids) == pytest.approx(float(cross))
    assert loss(Objective.ACCEPTANCE, kept, ids) == pytest.approx(1 - (0.25 + 0.2))


def test_positions_outside_the_draft_vocabulary_are_left_out() -> None:
    target = torch.tensor([[5.0, 1.0, 0.0], [0.0, 5.0, 1.0]]).log_softmax(-1)
    draft = torch.zeros(2, 2, requires_grad=True)
    probs, counts = wanted(KIND, target[None], torch.tensor([1, 2]))
    assert counts is not None
    assert counts.tolist() == [[False, True]]
    loss = step_loss(KIND, draft, probs[0], counts[0])
    loss.backward()
    assert draft.grad is not None
    assert bool((draft.grad[0] == 0).all()), "token 0 is likeliest and cannot be drafted"
    assert bool((draft.grad[1] != 0).all())
    alone = step_loss(KIND, draft[1:], probs[0, 1:], counts[0, 1:])
    torch.testing.assert_close(loss, alone)
    nothing = step_loss(KIND, draft[:1], probs[0, :1], counts[0, :1])
    assert float(nothing.detach()) == 0.0


def test_the_training_time_test_is_the_weighted_mean_of_its_steps() -> None:
    """Against a head that is called row by row, as a decoder does."""
    target = small_target()
    head = new_head(target, head_config(target, Eagle3Spec()), None, 0)
    tokens, steps = random_tokens(2, 14), 3
    loss = TrainingTimeTest(target, steps=steps, decay=0.5, temperature=0.7, every=4)
    whole = loss(head, tokens, tokens)
    features, last = read_target(target, head, tokens)
    log_target = target.logits(last) / 0.7
    known, total = head.states(features), torch.zeros(())
    rows = [range(13), range(0, 11, 4), range(0, 11, 4)]
    for step, chosen in enumerate(rows):
        parts = []
        for row in chosen:
            states = known[:, : row + 1]
            for _ in range(step + 1):
                length = states.shape[1]
                places = torch.arange(length)[None]
                outputs = head(tokens[:, 1 : length + 1], states, places)[:, -1:]
                states = torch.cat([states, head.fed_back(outputs)], 1)
            p = log_target[:, row + 1 + step].softmax(-1)
            parts.append(-(p * (head.logits(outputs)[:, 0] / 0.7).log_softmax(-1)).sum(-1))
        total = total + 0.5**step * torch.stack(parts).mean()
    torch.testing.assert_close(whole, total / 1.75)
    loss(head, tokens, tokens)
    assert loss.state() == {"calls": 2}, "the next call uses other rows"


def test_remembered_hidden_states_give_the_same_loss() -> None:
    target, tokens = small_target(), random_tokens(3, 12)
    head = new_head(target, head_config(target, Eagle3Spec()), None, 0)
    plain = TrainingTimeTest(target, steps=2)(head, tokens, tokens)
    kept = TrainingTimeTest(target, steps=2, remember=2)
    first = kept(head, tokens, tokens)
    torch.testing.assert_close(first, plain)
    passes = []
    hook = target.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    assert torch.equal(kept(head, tokens, tokens), first)
    hook.remove()
    assert len(passes) == 1, "two of the three sequences were kept"


@pytest.mark.parametrize("objective", list(Objective))
def test_training_brings_the_head_to_the_target(objective: Objective) -> None:
    """Over some steps the acceptance of every step of the test rises well above the start's."""
    target, tokens = small_target(), random_tokens(4, 24)
    head = new_head(target, head_config(target, Eagle3Spec()), None, 0)
    loss = TrainingTimeTest(target, steps=2, objective=objective)
    measure = TrainingTimeTest(target, steps=2, objective=Objective.ACCEPTANCE)
    before = float(measure(head, tokens, tokens).detach())
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        loss(head, tokens, tokens).backward()
        optimizer.step()
    after = float(measure(head, tokens, tokens).detach())
    assert after < 0.6 * before, (before, after)


def test_predictions_are_those_of_rows_before_each_token() -> None:
    """Row t of step s has seen the target's features up to position t - 1 - s, and no more."""
    target, tokens = small_target(), random_tokens(1, 12)
    head = new_head(target, head_config(target, Eagle3Spec()), None, 0)
    with torch.no_grad():
        before = [logits for _, logits in predictions(target, head, tokens, 3)]
        for changed in range(4, 12):
            other = tokens.clone()
            other[0, changed] = (other[0, changed] + 1) % 50
            after = [logits for _, logits in predictions(target, head, other, 3)]
            for step in range(3):
                same = (before[step] == after[step]).all(-1)
                assert bool(same[step + 1 : changed].all())
                assert not bool(same[changed]), "the last token is read by its own row"
    assert [len(logits) for logits in before] == [12, 12, 12]


def command(family: list[str], *words: str) -> list[str]:
    plan = "plan.phases=[{until: 1.0, length: 32, batch: 2}]"
    fast = [plan, "plan.max_steps=4", "plan.log_every=1"]
    few = ["weights={samples: 0.5, stdlib: 0.5}", "loss.steps=3"]
    return ["train", "eagle3_head", *family, *COMMON, *SAMPLING, *EVALUATION, *fast, *few, *words]


def test_a_head_of_ones_own_model(family: list[str]) -> None:
    """Trained on a reduced vocabulary, measured, and read as any head from disk."""
    assert main(command(family, "head.draft_vocabulary=100", "head.layers=[1, 2, 4]")) == 0
    folder, target = own(family) / "eagle3", load_hf(own(family) / "target")
    files = HeadFiles(folder)
    config = files.head_config(target.config)
    assert (config.version, config.layers, config.draft_vocab_size) == (3, (0, 1, 3), 100)
    head = load_head(files, config, embedding=target.lm_head.weight.detach(), output=None)
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():
        for _, logits in predictions(target, head, tokens, 3):
            assert bool(logits.isfinite().any(-1).all())
            assert int(logits[5].isfinite().sum()) == 100
    assert load_file(folder / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    rows: list[dict[str, Any]] = json.loads((folder / "measured.json").read_text())
    assert {row["step"] for row in rows} == {0, 1, 2}
    assert {row["data"] for row in rows} == {"stdlib"}
    record = json.loads((folder / "training.json").read_text())
    assert (record["steps"], record["loss"]["steps"]) == (4, 3)
    assert len(record["curve"]) == 4


def test_a_run_from_a_stored_head_begins_with_its_weights(family: list[str]) -> None:
    assert main(command(family)) == 0
    first = own(family) / "first"
    (own(family) / "eagle3").rename(first)
    (own(family).parent / "work" / "heads" / "eagle3" / "checkpoint.pt").unlink()
    still = [f"initial={first}", "plan.muon_lr=1.0e-12", "plan.adam_lr=1.0e-12"]
    assert main(command(family, *still)) == 0
    before = load_file(first / "model.safetensors")
    after = load_file(own(family) / "eagle3" / "model.safetensors")
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight)
