"""Block drafters: parity with transformers, files, proposals, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import Pair, levels, steps
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MuseGlimmerAssistantConfig
from transformers import MuseGlimmerAssistantModel as Assistant
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from specdec.certify.laws import FALSE_ALARM, OPPOSED_TABLE, TARGET_TABLE
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Workbench, build
from specdec.errors import UserError
from specdec.interfaces import TreePolicy
from specdec.models.block import (
    BlockHead,
    BlockRunner,
    Kind,
    load_block,
    save_block,
    untrained_block,
)
from specdec.models.slicing import hidden_states
from specdec.policies import Chain
from specdec.state import RequestState
from specdec.testing import TablePair
from specdec.verifiers import MatchVerifier, RejectionVerifier
from strategies.block import BlockSource
from tests.laws import least_p_value
from tests.proposals import check_proposals

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def target_model(layers: int = 6) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=layers, head_dim=6)
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that greedy choices do not hang on a rounding
    return model


def of_target(target: LlamaForCausalLM) -> dict[str, Any]:
    embedding = target.get_input_embeddings().weight.detach()
    return {"embedding": embedding, "output": target.get_output_embeddings()}


def drafts(head: BlockHead, target: LlamaForCausalLM, tokens: Tensor) -> list[int]:
    """The greedy drafts after ``tokens``, int64[T], whose last one is the anchor."""
    runner = BlockRunner(head, meter=Meter())
    context = runner.new_context()
    features = hidden_states(target, tokens[None, :-1], head.config.names)[0][0]
    for part in features.split(3):  # as features arrive while decoding
        runner.read(context, part)
    rows, found = runner.rows(context, int(tokens[-1])), [int(tokens[-1])]
    for row in rows:
        logits = runner.target_logits(runner.logits(row[None], torch.tensor(found[-1:])))
        found.append(int(logits.argmax()))
    return found[1:]


def test_drafts_equal_transformers_token_for_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block of a whole generation; layer 5 is the last, which is read after the norm."""
    target = target_model()
    config = MuseGlimmerAssistantConfig(
        **SIZES,
        head_dim=6,
        num_hidden_layers=2,
        block_size=5,
        mask_token_id=60,
        target_layer_ids=[0, 2, 5],
        layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    torch.manual_seed(1)
    assistant = Assistant(config).double().eval()
    with torch.no_grad():
        for name, weight in assistant.named_parameters():
            noise = torch.randn(weight.shape, dtype=torch.float64)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.4 * noise)
    assistant.save_pretrained(tmp_path)
    head = load_block(tmp_path, target.config, **of_target(target))
    blocks: list[list[int]] = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found, logits = original(self, input_ids, *args, **kwargs)
        if logits is not None:
            start = input_ids.shape[1]
            assert found[0, start:].tolist() == drafts(head, target, input_ids[0])
            blocks.append(found[0, start:].tolist())
        return found, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    prompt = torch.tensor([[3, 14, 15, 9, 2, 6]])
    target.generate(
        prompt,
        assistant_model=assistant,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert len(blocks) > 5
    assert len({token for block in blocks for token in block}) > 5


# DSpark, by its formulas.


def random_block(kind: Kind, target: LlamaForCausalLM, **variants: Any) -> BlockHead:
    head = untrained_block(kind, target.config, **of_target(target), **variants)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_((weight.dim() == 1) + 0.4 * noise)
    return head


def test_dsparks_logits_and_confidence_are_the_papers() -> None:
    """Its first row predicts too; the token before adds W2 W1[token] and enters the confidence."""
    target = target_model()
    head = random_block("dspark", target)
    w1, w2 = head.markov_head["markov_w1"].weight, head.markov_head["markov_w2"].weight
    proj = head.confidence_head["proj"]
    tokens = torch.tensor([5, 7, 9, 11, 2])
    features = hidden_states(target, tokens[None], head.config.names)[0]
    context = head.context(features, torch.arange(5))
    rows = head(torch.tensor([[8]]), torch.tensor([5]), context)[0, 0]
    assert len(rows) == head.config.block_size == head.config.num_drafts
    before = torch.tensor([8, 1, 2, 3, 4])
    expected = rows @ target.lm_head.weight.T + w1[before] @ w2.T
    torch.testing.assert_close(head.logits(rows, before), expected)
    sure = torch.cat([rows, w1[before]], -1) @ proj.weight[0] + proj.bias
    torch.testing.assert_close(head.confidence(rows, before), sure.sigmoid())


# Files.


def rewrite(folder: Path, **changes: Any) -> None:
    """Changes config.json; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def load(folder: Path, target: LlamaForCausalLM) -> BlockHead:
    return load_block(folder, target.config, **of_target(target))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_both_layouts_are_read(kind: Kind, tmp_path: Path) -> None:
    """In ``speculators``' the ids are of the streams that enter layers, so one more."""
    target = target_model()
    save_block(random_block(kind, target), tmp_path)
    authors = load(tmp_path, target)
    tokens = torch.tensor([5, 7, 9, 11, 2])
    expected = drafts(authors, target, tokens)
    layer = json.loads((tmp_path / "config.json").read_text())
    nested = layer.pop("dflash_config")
    own = {key: layer[key] for key in ("block_size", "sample_from_anchor")}
    ids = [i + 1 for i in nested["target_layer_ids"]]
    own |= {"mask_token_id": nested["mask_token_id"], "aux_hidden_state_layer_ids": ids}
    own |= {"speculators_model_type": kind, "transformer_layer_config": layer}
    (tmp_path / "config.json").write_text(json.dumps(own))
    other = load(tmp_path, target)
    assert other.config.names == authors.config.names
    assert drafts(other, target, tokens) == expected


def test_a_draft_vocabulary_is_mapped(tmp_path: Path) -> None:
    target = target_model()
    head = random_block("dflash", target, draft_vocab_size=20)
    head.target_ids = torch.arange(20) * 3 + 1
    save_block(head, tmp_path)
    found = drafts(load(tmp_path, target), target, torch.tensor([5, 7, 9, 11]))
    assert all(token % 3 == 1 for token in found)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    "speculators' other kinds": ({"speculators_model_type": "peagle"}, "peagle"),
    "no block size": ({"block_size": None}, "block_size"),
    "no layer ids": ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids"),
    "no mask token": ({"dflash_config": {"target_layer_ids": [1, 2, 3]}}, "mask_token_id"),
    "another family": ({"model_type": "gemma4"}, "gemma4"),
    "sliding layers": ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
    "a gated term": ({"markov_head_type": "gated"}, "gated"),
    "layers of another target": (
        {"dflash_config": {"target_layer_ids": [1, 2, 40], "mask_token_id": 3}},
        r"\[40\]",
    ),
    "fewer streams": (
        {"dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 3}},
        r"fc\.weight",
    ),
    "more layers": ({"num_hidden_layers": 2}, r"layers\.1"),
    "no map of the vocabulary": ({"draft_vocab_size": 20}, "d2t"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, named = REFUSED[case]
    target = target_model()
    save_block(random_block("dflash", target), tmp_path)
    load(tmp_path, target)
    rewrite(tmp_path, **changes)
    with pytest.raises(UserError, match=named):
        load(tmp_path, target)


def test_unknown_tensors_and_pickles_are_refused(tmp_path: Path) -> None:
    target = target_model()
    save_block(random_block("dflash", target), tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "layers.0.layer_scalar": torch.ones(1)}, path)
    with pytest.raises(UserError, match="layer_scalar"):
        load(tmp_path, target)
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickle"):
        load(tmp_path, target)


# The source.


@pytest.fixture(scope="module")
def models() -> Pair:
    return Pair()


@pytest.mark.parametrize(
    ("kind", "policy", "stages"),
    [("dflash", Chain(gamma=6), None), ("dspark", levels(), 2)],
    ids=["chain", "levels over stages"],
)
def test_candidates_are_the_block_of_the_root(
    kind: Kind, policy: TreePolicy, stages: int | None, models: Pair
) -> None:
    """Row d of the block after all tokens before the root, in pipelines too."""
    bench = Workbench(models, seed=2)
    source = BlockSource(pair=models, clock=bench.clock, meter=bench.meter, untrained=kind)
    parts = bench.parts(source=source, policy=policy, verifier=MatchVerifier(), stages=stages)
    head = source._runner.head

    def logits_of(request: RequestState, slot: int) -> Tensor | None:
        tree, root = request.tree, request.prefix_len
        depth = int(tree.depths[slot])
        if depth >= head.config.num_drafts or not root:
            return None
        tokens = torch.from_numpy(request.tokens[:root])[None]
        with torch.inference_mode():
            features = hidden_states(models.target, tokens, head.config.names)[0]
            context = head.context(features, torch.arange(root))
            anchor = torch.tensor([[int(tree.tokens[0])]])
            row = head(anchor, torch.tensor([root]), context)[0, 0, depth]
            return head.logits(row, torch.tensor(int(tree.tokens[slot])))

    state = parts.new_state()
    seen = check_proposals(parts, lambda: steps(parts, state), logits_of, k=3, atol=1e-6)
    assert seen[0] > 10
    assert seen[1] > 5
    assert not any(seen[head.config.num_drafts :])


def test_confidence_ends_drafts(models: Pair) -> None:
    """Higher limits give fewer rows; 1 gives none, since an estimate is below 1."""

    def rows(confidence: float) -> int:
        bench = Workbench(models, seed=2)
        source = BlockSource(
            pair=models,
            clock=bench.clock,
            meter=bench.meter,
            untrained="dspark",
            confidence=confidence,
        )
        parts = bench.parts(source=source, policy=Chain(gamma=4), verifier=MatchVerifier())
        steps(parts, parts.new_state())
        return parts.executor.counters.rows

    counts = [rows(limit) for limit in (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 2, "limits between 0 and 1 end some drafts"


def test_sampled_candidates_keep_the_law() -> None:
    bench = Workbench(TablePair(target=TARGET_TABLE, draft=OPPOSED_TABLE), seed=1)
    parts = build("dspark", bench, verifier=RejectionVerifier())
    assert least_p_value(parts, 300, num_tokens=3, batch_size=150) > FALSE_ALARM
