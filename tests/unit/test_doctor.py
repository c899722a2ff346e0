"""`specdec doctor` finds how a head was trained, whatever its folder says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.cli import doctor
from specdec.cli.main import main
from specdec.metrics.loops import repeated_ngrams
from specdec.models.eagle_loading import HeadFiles, save_head
from specdec.models.eagle_readings import accepted, load_reading, readings
from specdec.models.frozen import FrozenModel
from specdec.models.loading import load_model
from specdec.models.random import random_model
from specdec.train.drafter import OutputOptions
from specdec.train.eagle import EagleDrafter, EagleSpec
from specdec.train.losses import LossOptions
from specdec.train.texts import Batch

pytestmark = pytest.mark.slow

PROMPT, LENGTH = 4, 24


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Tensor]:
    """A target and a head that learnt its greedy texts by heart: their folders, and the texts."""
    folder = tmp_path_factory.mktemp("doctor")
    sizes = {"num_layers": 6, "hidden_size": 16, "vocab_size": 50, "max_positions": 64}
    model = random_model(**sizes, num_heads=2, num_kv_heads=1, seed=3)
    model.save_pretrained(folder / "target")
    target = FrozenModel(model)
    texts = torch.randint(1, 50, (6, LENGTH), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for place in range(PROMPT, LENGTH):
            texts[:, place] = model(texts[:, :place]).logits[:, -1].argmax(-1)
    spec = EagleSpec(norm_before_residual=True, steps=3)
    trained = EagleDrafter(target, spec, OutputOptions(matrix="own"), None, 0)
    head = trained.head
    with torch.no_grad():  # norms that change a state's direction, so that readings matter
        head.layers[0].hidden_norm.weight[::2] *= -3.0
        head.layers[0].hidden_norm.weight[1::2] *= 3.0
        head.norm.weight[::2] *= -0.2
        head.norm.weight[1::2] *= 2.0
    counts, options = torch.ones_like(texts, dtype=torch.bool), LossOptions(temperature=0.2)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for step in range(80):
        optimizer.zero_grad()
        trained.loss(target, Batch(texts, counts, step), options).backward()
        optimizer.step()
    save_head(head, folder / "head")
    return folder / "target", folder / "head", texts


def told(folder: Path, where: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a head whose config.json says something else."""
    where.mkdir()
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (where / "config.json").write_text(json.dumps(config))
    (where / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return where


def examine(
    trained: tuple[Path, Path, Tensor], head: Path, monkeypatch: pytest.MonkeyPatch, out: Path
) -> tuple[int, dict[str, Any]]:
    """Exit status and figures of the command on the texts."""
    texts = [(text, PROMPT) for text in trained[2]]
    monkeypatch.setattr(doctor, "_texts", lambda *_: texts)
    words = ["doctor", str(head), f"target={trained[0]}", "tokens=3", f"json={out}"]
    return main(words), json.loads(out.read_text())


def nothing(config: dict[str, Any]) -> None:
    assert config["norm_before_residual"] is True


def with_ids_of_outputs(config: dict[str, Any]) -> None:
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in ids]


@pytest.mark.parametrize(
    "change, best",
    [
        (nothing, "as on disk"),
        (lambda config: config.pop("norm_before_residual"), "residual after its norm"),
        (with_ids_of_outputs, "layer ids +1"),
        (lambda config: config.update(norm_output=True), "fed back before the norm"),
    ],
)
def test_the_reading_of_training_is_found(
    change: Callable[[dict[str, Any]], None],
    best: str,
    trained: tuple[Path, Path, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = told(trained[1], tmp_path / "head", change)
    status, report = examine(trained, head, monkeypatch, tmp_path / "report.json")
    rows = {row["reading"]: row for row in report["readings"]}
    assert report["best"] == best, rows
    assert status == (0 if change is nothing else 1)
    assert rows[best]["loss"] <= (0.02 if change is nothing else 0.0), "2 % count as equal"
    assert rows[best]["accepted"] > 1.0
    shown = capsys.readouterr().out
    if change is nothing:
        assert "no other accepts clearly more" in shown
        assert rows["residual before its norm"]["loss"] > 0.02, "more than the command calls equal"
        return
    assert f"was trained for {best!r}" in shown
    remedy = rows[best]["remedy"]
    assert remedy in shown
    healed = json.loads((head / "config.json").read_text())
    healed.pop("eagle_config") if "ids" in remedy else None
    (head / "config.json").write_text(json.dumps({**healed, **json.loads(f"{{{remedy}}}")}))
    status, report = examine(trained, head, monkeypatch, tmp_path / "again.json")
    assert (status, report["best"]) == (0, "as on disk")


def test_accepted_tokens_are_those_of_drafting_one_by_one(
    trained: tuple[Path, Path, Tensor],
) -> None:
    """Greedy drafts by whole passes, and the counts of a draft's first right tokens."""
    frozen = FrozenModel(load_model(trained[0]))
    files = HeadFiles(trained[1])
    own = readings(files, frozen)[0]
    head = load_reading(files, own, frozen)
    lengths = [0] * 4
    with torch.no_grad():
        for tokens in trained[2]:
            in_loop = repeated_ngrams(tokens[PROMPT:].tolist())
            streams = frozen.residuals(tokens[None], {layer + 1 for layer in own.config.layers})
            features = torch.cat([streams[layer + 1] for layer in own.config.layers], -1)
            for first in range(PROMPT - 2, LENGTH - 4):
                if in_loop[first + 2 - PROMPT]:
                    continue
                states, known = head.states(features[:, : first + 1]), tokens[1 : first + 2]
                right = 0
                for step in range(3):
                    at = torch.arange(len(known))[None]
                    outputs = head(known[None], states, at)[:, -1:]
                    drafted = int(head.logits(outputs).argmax())
                    if drafted != int(tokens[first + 2 + step]):
                        break
                    right += 1
                    known = torch.cat([known, torch.tensor([drafted])])
                    states = torch.cat([states, head.fed_back(outputs)], 1)
                lengths[right] += 1
    runs = torch.cat(accepted(frozen, head, [(text, PROMPT) for text in trained[2]], 3))
    outside = accepted(frozen, head, [(text[: PROMPT + 7], PROMPT) for text in trained[2]], 3)
    assert list(map(len, outside)) == [5] * 6, "no 8-gram of 7 tokens is a repetition"
    assert torch.bincount(runs, minlength=4).tolist() == lengths


def test_the_bundled_target_continues_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untrained head of the bundled target: a whole run, with figures on the screen."""
    from specdec.models.bundled import family_path

    target = FrozenModel(load_model(family_path("bundled:target")))
    EagleDrafter(target, EagleSpec(), OutputOptions(matrix="own"), None, 0).save(tmp_path)
    words = ["doctor", str(tmp_path), "prompts=1", "new_tokens=12"]
    assert main([*words, "json=-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["drafts"] > 0
    assert report["readings"][0]["reading"] == "as on disk"
    assert not report["fits"]
    assert main(words) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "trained for another target, or not at all" in shown
