"""EAGLE heads: incremental passes over caches equal passes over whole sequences; files."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.executors import LocalExecutor, PipelineExecutor
from specdec.models.bundled import family_path
from specdec.models.eagle import EagleHead, default_layers
from specdec.models.eagle_loading import HeadFiles, load_head, save_head, untrained_config
from specdec.models.eagle_runner import EagleRunner, rewritten
from specdec.pairs import RandomPair
from specdec.pairs.pretrained import build_pretrained
from specdec.types import TreeRows
from tests import eagle, toys

T = 9  # tokens of a sequence
NO_IDS = np.zeros(0, np.int64)


def sequence(head: EagleHead) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64[T], and the feature [T, S] of the position before each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(head.config.layer.vocab_size, (T,), generator=generator)
    shape = T, head.config.feature_size
    return tokens, torch.randn(shape, generator=generator, dtype=torch.float64)


def whole(head: EagleHead, tokens: Any, states: torch.Tensor) -> torch.Tensor:
    """[T, E]: outputs of one causal pass."""
    ids = torch.as_tensor(tokens)[None]
    return head(ids, states[None], torch.arange(ids.shape[1])[None])[0]


def from_features(runner: EagleRunner, rows: list[Any], given: torch.Tensor) -> Any:
    """A pass over rows that all read features."""
    numbers = np.arange(len(given))
    none = torch.zeros(0, runner.head.config.layer.hidden_size, dtype=torch.float64)
    return runner.forward(
        rows, features=given, feature_rows=numbers, states=none, logits_rows=numbers
    )


@pytest.mark.parametrize("variant", eagle.VARIANTS)
def test_incremental_passes_equal_whole_sequences(variant: str) -> None:
    """Prefix rows read features; two branches of nodes below read the head's own outputs."""
    head = eagle.random_head(eagle.config(variant))
    tokens, features = sequence(head)
    runner = EagleRunner(head, meter=Meter())
    cache = runner.new_cache(4)
    parts = []
    for first, last in ((0, 4), (4, T)):
        rows = cache.rows(prefix_tokens=tokens[first:last].numpy())
        parts.append(from_features(runner, [rows], features[first:last]))
    expected = whole(head, tokens, head.states(features))
    torch.testing.assert_close(
        torch.cat([p.logits for p in parts]), head.logits(expected), rtol=1e-9, atol=1e-9
    )
    fed = torch.cat([p.states for p in parts])
    torch.testing.assert_close(fed, head.fed_back(expected), rtol=1e-9, atol=1e-9)

    # Two branches: nodes 0 and 1 below the prefix, node 2 below node 1, which both see.
    states, paths = {-1: fed[-1]}, {0: [0], 1: [1], 2: [1, 2]}
    node_tokens, parents = np.array([5, 7, 11]), np.array([-1, -1, 1])
    tree = TreeRows.within(
        prefix_len=T, node_ids=np.arange(3), tokens=node_tokens, parent_ids=parents
    )
    for level in ([0, 1], [2]):
        rows = cache.rows(tree=tree.take(np.array(level)))
        out = runner.forward(
            [rows],
            features=features[:0],
            feature_rows=NO_IDS,
            states=torch.stack([states[int(p)] for p in parents[level]]),
            logits_rows=np.arange(len(level)),
        )
        for row, node in enumerate(level):
            states[node] = out.states[row]
            path = paths[node]
            inputs = [head.states(features), fed[-1:], *(states[n][None] for n in path[:-1])]
            sequence_tokens = torch.cat([tokens, torch.as_tensor(node_tokens[path])])
            fresh = whole(head, sequence_tokens, torch.cat(inputs))[-1]
            torch.testing.assert_close(out.logits[row], head.logits(fresh), rtol=1e-9, atol=1e-9)


def test_entries_computed_again_replace_the_old_ones() -> None:
    """Rows of wrong states are corrected in place, in the pass of the rows that see them."""
    head = eagle.random_head(eagle.config("eagle3 of two layers"))
    tokens, features = sequence(head)
    runner = EagleRunner(head, meter=Meter())
    cache = runner.new_cache(2)
    wrong = features.clone()
    wrong[4:7] += 1.0
    from_features(runner, [cache.rows(prefix_tokens=tokens[:7].numpy())], wrong[:7])
    tree = TreeRows.within(
        prefix_len=7,
        node_ids=np.array([0, 1]),
        tokens=tokens[7:].numpy(),
        parent_ids=np.array([-1, 0]),
    )
    again = rewritten(cache, tokens[4:7].numpy(), 4)
    logits = from_features(runner, [again, cache.rows(tree=tree)], features[4:]).logits
    expected = head.logits(whole(head, tokens, head.states(features)))[4:]
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    stale = head.logits(whole(head, tokens, head.states(torch.cat([wrong[:7], features[7:]]))))
    assert (stale[7:] - expected[3:]).abs().max() > 1e-3, "a control: without the correction"


def target(num_layers: int = 4, hidden: int = 16, vocab: int = 48) -> Any:
    """A config with the sizes that a head needs."""
    text = SimpleNamespace(
        num_hidden_layers=num_layers,
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=64,
    )
    return SimpleNamespace(get_text_config=lambda: text)


def load(folder: Path, head: EagleHead, **variant: Any) -> EagleHead:
    files = HeadFiles(folder)
    config = files.head_config(target())
    embedding, output = head._target
    return load_head(files, config, embedding=embedding, output=output, **variant)


def to_speculators(folder: Path) -> None:
    """Rewrites a folder in the other layout."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    config = json.loads((folder / "config.json").read_text())
    keys = ("draft_vocab_size", "norm_before_residual", "fc_norm", "norm_output")
    nested = {key: value for key, value in config.items() if key not in keys}
    ids = nested.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    outer = {key: config[key] for key in keys} | {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "eagle_aux_hidden_state_layer_ids": ids,
        "transformer_layer_config": nested,
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(outer))


@pytest.mark.parametrize("layout", ["authors", "speculators", "no config"])
@pytest.mark.parametrize("variant", eagle.VARIANTS)
def test_files_give_the_head_again(variant: str, layout: str, tmp_path: Path) -> None:
    head = eagle.random_head(eagle.config(variant))
    save_head(head, tmp_path)
    if head.config.version == 3 and layout == "speculators":
        to_speculators(tmp_path)
    if layout == "no config":  # the version is read from the tensors alone
        config = json.loads((tmp_path / "config.json").read_text())
        config.pop("architectures")
        (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path, head)
    tokens, features = sequence(head)
    assert loaded.config.names == head.config.names
    found, wanted = (
        one.target_logits(one.logits(whole(one, tokens, one.states(features))))
        for one in (loaded, head)
    )
    # Tensors of a file are aligned differently, which may change the order of summation.
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    if head.config.draft_vocab_size < head.config.layer.vocab_size:
        assert int(torch.isfinite(found[0]).sum()) == head.config.draft_vocab_size
        assert torch.isfinite(found[0, 1::2][:20]).all()


def test_a_stored_embedding_that_is_the_targets_is_not_kept_twice(tmp_path: Path) -> None:
    head = stored(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding, _ = head._target
    save_file(tensors | {"embed_tokens.weight": embedding}, tmp_path / "model.safetensors")
    assert not load(tmp_path, head).config.own_embedding


def test_default_layers_are_the_streams_that_enter_2_half_and_third_from_last() -> None:
    assert default_layers(32) == (1, 15, 28)  # hidden_states[2], [16], [29]
    assert default_layers(4) == (1, 1, 0)


def stored(folder: Path) -> EagleHead:
    head = eagle.random_head(eagle.config("eagle3"))
    save_head(head, folder)
    return head


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.with_name("config.json").unlink(), "no config.json"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "is damaged"),
        (lambda path: save_file({"lm_head.weight": torch.zeros(2)}, path), "has no EAGLE head"),
    ],
)
def test_bad_folders_are_refused(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    head = stored(tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(tmp_path, head)


LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"midlayer.mlp.up_proj.weight": None}, {}, "layers.0.mlp.up_proj.weight'\\] are missing"),
        ({"midlayer.gate.weight": torch.zeros(2)}, {}, "layers.0.gate.weight'\\] unknown"),
        ({"norm.weight": torch.zeros(3)}, {}, "norm.weight has shape \\(3,\\)"),
        ({"d2t": torch.arange(20) + 40}, {}, "d2t does not map 20 draft tokens"),
        ({"d2t": None, "t2d": None}, {}, "20 draft tokens, the target 48, and no tensor d2t"),
        ({"fc.weight": torch.zeros(16, 60)}, {}, "states of size 20, but model.target has 16"),
        ({}, LAYERS, "enter layers \\[9\\]"),
        ({}, {"speculators_model_type": "dflash"}, "kind 'dflash'"),
        ({}, {"model_type": "qwen3"}, "model_type 'qwen3'"),
    ],
)
def test_bad_contents_are_refused(
    tensors: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Tensors and keys in place of those of a stored head; None for a tensor that is not there."""
    head, path = stored(tmp_path), tmp_path / "model.safetensors"
    changed = load_file(path) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)
    config = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load(tmp_path, head)


def test_the_printed_command_converts_a_pickle(tmp_path: Path) -> None:
    head = stored(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"\.bin only, a pickle.*where you trust it") as caught:
        HeadFiles(tmp_path)
    source = str(caught.value).split('python -c "')[1].rstrip('"')
    exec(source, {})
    assert load(tmp_path, head).config == head.config


def bundled_target_head() -> EagleHead:
    """A head in the shapes of the bundled target, with a reduced vocabulary."""
    target = AutoConfig.from_pretrained(family_path("bundled:target"))
    config = untrained_config(3, target, draft_vocab_size=100)
    embedding = torch.zeros(target.vocab_size, target.hidden_size)
    head = EagleHead(config, embedding=embedding)
    head.target_ids = torch.arange(100)
    return head


def test_the_memory_of_a_rank_that_drafts_is_counted(tmp_path: Path) -> None:
    """On a rank of its own the head needs the target's matrices; beside the target it does not."""
    head = bundled_target_head()
    save_head(head, tmp_path)
    own = sum(p.numel() for p in head.parameters())
    embedding = head.config.layer.vocab_size * head.config.layer.hidden_size
    plain, pair = (
        build_pretrained(target="bundled:target", dtype="bfloat16", eagle_head=folder)
        for folder in (None, str(tmp_path))
    )
    assert pair.weight_bytes["eagle"] == 2 * (own + embedding)
    for plan, expected in (
        (lambda models: LocalExecutor.plan(models), own),
        (lambda models: PipelineExecutor.plan(models, stages=4), own + embedding),
    ):
        with_head, without = (
            sum(
                each.weight_bytes[0] for each in plan(models).placements.values() if 0 in each.ranks
            )
            for models in (pair, plain)
        )
        assert with_head - without == 2 * expected


def test_a_head_is_fitted_to_models_first_made_where_nothing_is_trained() -> None:
    """Whatever asked for the models first: here text of the draft, and the head while decoding."""
    pair = RandomPair(**{**toys.MODEL, "num_layers": 2, "draft_layers": 1})
    pair.token_samples()
    with torch.inference_mode():
        head = pair.eagle_head(1)
    assert not any(w.is_inference() for w in (*head.parameters(), *pair.target.parameters()))
