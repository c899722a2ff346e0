"""``custom_generate`` of transformers: its tokens, rules and outputs, by strategies of ours."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from specdec.errors import UserError
from specdec.integrations.transformers import SpeculativeOutput, generate
from specdec.models.inspection import CERTIFIED
from specdec.models.random import random_model

pytestmark = pytest.mark.slow

VOCAB = 61
LENGTHS = (5, 9, 8)  # of the rows of the batch


def models(family: str = "llama", **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and its first layer as a draft that is sometimes right."""
    target, draft = (random_model(family, num_layers=n, **options) for n in (3, 1))
    draft.load_state_dict(target.state_dict(), strict=False)
    return target, draft


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return models(dtype="float64")


def padded() -> tuple[Tensor, Tensor]:
    """Token ids and mask of a batch, padded on the left."""
    shape, generator = (len(LENGTHS), max(LENGTHS)), torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, shape, generator=generator)
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    return torch.where(mask, ids, 0), mask.long()


def prompt() -> Tensor:
    return padded()[0][1:2]


def ours(models: tuple[PreTrainedModel, PreTrainedModel], ids: Tensor, **how: Any) -> Any:
    """What the target gives by a strategy of ours, with the draft."""
    target, draft = models
    return target.generate(ids, **how, custom_generate=generate, draft_model=draft)


@pytest.mark.parametrize("family", sorted(CERTIFIED))
def test_greedy_tokens_equal_those_without_it_in_every_family(family: str) -> None:
    """A tree and a chain, one row and a batch, in float64: rounding decides no token.

    The batch is compared row by row: transformers' logits of padded rows are NaN for gemma2 in
    float64 (its soft caps on fully masked rows).
    """
    target, draft = models(family, dtype="float64")
    ids, mask = padded()
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 7}
    rows = [row[None, seen.bool()] for row, seen in zip(ids, mask, strict=True)]
    expected = [target.generate(row, **how, pad_token_id=0)[0] for row in rows]
    tree = ours((target, draft), rows[1], **how, strategy="best_first")
    assert torch.equal(tree[0], expected[1])
    how |= {"attention_mask": mask, "pad_token_id": 0, "return_dict_in_generate": True}
    batch = ours((target, draft), ids, **how)
    assert isinstance(batch, SpeculativeOutput)
    for row, seen, whole in zip(batch.sequences, mask, expected, strict=True):
        new = row[int((seen == 0).sum()) :]
        assert torch.equal(new[: len(whole)], whole)
        assert not new[len(whole) :].any()
    assert batch.metrics is not None
    assert batch.metrics["acceptance_length"] >= 1
    assert not target._forward_hooks
    assert not target._forward_pre_hooks


def test_a_wrong_draft_changes_no_token_and_is_seen_in_the_metrics(pair: Any) -> None:
    """Control of the parity tests: what the draft proposes is verified."""
    target, draft = pair
    wrong = random_model(num_layers=1, seed=5, dtype="float64")
    how: dict[str, Any] = {"max_new_tokens": 24, "return_dict_in_generate": True}
    expected = target.generate(prompt(), **how).sequences
    found = [ours((target, model), prompt(), **how) for model in (draft, wrong, target)]
    assert all(torch.equal(each.sequences, expected) for each in found)
    lengths = [each.metrics["acceptance_length"] for each in found]
    assert lengths[1] < lengths[0] < lengths[2]


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3, "min_new_tokens": 6, "eos_token_id": [7, 11, 13, 17]},
        {"bad_words_ids": [[5], [9, 12]], "sequence_bias": [[[3], 2.5]], "suppress_tokens": [8]},
        {"begin_suppress_tokens": list(range(3, 40)), "exponential_decay_length_penalty": (4, 1.1)},
        {"forced_eos_token_id": 2, "encoder_repetition_penalty": 1.4, "eos_token_id": 2},
    ],
    ids=lambda rules: "+".join(rules),
)
def test_processors_see_what_generate_shows_them(pair: Any, rules: Any) -> None:
    """On a padded batch: some processors count the padding, some hold a value per row."""
    target, _ = pair
    ids, mask = padded()
    how = {"max_new_tokens": 16, "pad_token_id": 0, "attention_mask": mask, **rules}
    expected = target.generate(ids, **how)
    plain = target.generate(ids, max_new_tokens=16, pad_token_id=0, attention_mask=mask)
    assert expected.shape != plain.shape or not torch.equal(expected, plain)  # they matter
    assert torch.equal(ours(pair, ids, **how, strategy="best_first"), expected)


class StopAt(StoppingCriteria):
    """Ends a row whose last two tokens sum to a multiple of ``divisor``."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        return input_ids[:, -2:].sum(dim=1) % self.divisor == 0


@pytest.mark.parametrize("divisor", [7, 18])
def test_stopping_criteria_end_a_row_within_an_accepted_path(pair: Any, divisor: int) -> None:
    target, _ = pair
    how = {"max_new_tokens": 30, "stopping_criteria": StoppingCriteriaList([StopAt(divisor)])}
    expected = target.generate(prompt(), **how)
    always_right = target, target  # paths are long, and are cut
    found = ours(always_right, prompt(), **how, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert expected.shape[1] < prompt().shape[1] + 30
    assert found.finish_reasons == ("criteria",)
    assert found.metrics["acceptance_length"] > 1


class Record(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.shapes: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.values.append(value.flatten().tolist())
        self.shapes.append(value.dim())

    def end(self) -> None:
        self.ended += 1


def test_streamers_receive_the_same_in_the_same_shapes(pair: Any) -> None:
    expected, found = Record(), Record()
    pair[0].generate(prompt(), max_new_tokens=14, streamer=expected)
    ours(pair, prompt(), max_new_tokens=14, token_streamer=found, strategy="best_first")
    assert (found.values, found.shapes) == (expected.values, expected.shapes)
    assert found.ended == expected.ended == 1


def test_sampled_tokens_have_the_distribution_of_generate() -> None:
    """1,000 rows of two tokens against the exact joint law; false alarm below 1e-6.

    The statistic is a total variation distance: with N draws over S outcomes its mean is at most
    sqrt(S / N) / 2, and it exceeds that by t with probability exp(-2 N t^2) (McDiarmid).
    """
    target, draft = models(dtype="float64", vocab_size=6)
    num_rows, ids = 1000, torch.tensor([[3, 4, 5]])
    warp: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 3, "top_p": 0.95}
    torch.manual_seed(0)
    rows = ours(
        (target, draft),
        ids.repeat(num_rows, 1),
        **warp,
        max_new_tokens=2,
        eos_token_id=None,
        overrides=["verifier=rejection", "policy.gamma=2"],
    )
    counts = torch.zeros(6, 6, dtype=torch.float64)
    for first, second in rows[:, -2:].tolist():
        counts[first, second] += 1
    law = _joint_law(target, ids, warp)
    distance = (counts / num_rows - law).abs().sum().item() / 2
    bound = (9 / num_rows) ** 0.5 / 2 + (14 / (2 * num_rows)) ** 0.5  # top_k: 9 outcomes
    assert distance < bound
    unwarped = _joint_law(target, ids, {"do_sample": True, "temperature": 1.5, "top_k": 0})
    assert (law - unwarped).abs().sum().item() / 2 > 2 * bound  # the test can fail


def _joint_law(target: PreTrainedModel, ids: Tensor, warp: dict[str, Any]) -> Tensor:
    """float64[V, V]: transformers' own probability of each pair of next tokens."""

    def probabilities(rows: Tensor) -> Tensor:
        found = target.generate(
            rows,
            **warp,
            max_new_tokens=1,
            eos_token_id=None,
            output_scores=True,
            return_dict_in_generate=True,
        )
        return found.scores[0].double().softmax(-1)

    first = probabilities(ids)[0]
    after = torch.cat([ids.repeat(6, 1), torch.arange(6)[:, None]], dim=1)
    return first[:, None] * probabilities(after)


def test_the_seed_is_torchs_unless_given(pair: Any) -> None:
    how = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 12, "eos_token_id": None}

    def sample(seed: int | None, torch_seed: int) -> list[int]:
        torch.manual_seed(torch_seed)
        return list(ours(pair, prompt(), **how, seed=seed)[0].tolist())

    assert sample(None, 1) == sample(None, 1)
    assert sample(None, 1) != sample(None, 2)
    assert sample(4, 1) == sample(4, 2)


def test_settings_of_the_model_and_of_a_configuration_are_taken(pair: Any) -> None:
    config = GenerationConfig(max_length=prompt().shape[1] + 9, eos_token_id=[7], pad_token_id=0)
    expected = pair[0].generate(prompt(), generation_config=config)
    assert torch.equal(ours(pair, prompt(), generation_config=config), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
        ({"max_new_tokens": 5000}, "5009 tokens"),
        ({"strategy": "hf_assisted"}, "hf_assisted is decoding of another program"),
        ({"strategy": "eagle3"}, "eagle_head="),
        ({"draft_model": None}, "draft_model="),
        ({"overrides": ["max_new_tokens=3"]}, "is not for generate"),
        ({"overrides": ["executor=pipeline", "executor.transport=distributed"]}, "from disk"),
        ({"token_streamer": Record(), "input_ids": padded()[0]}, "streamer takes one row"),
        ({"attention_mask": torch.tensor([[1, 1, 0] + [1] * 6])}, "pad on the left"),
        ({"position_ids": torch.arange(2, 11)[None]}, "position_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_in_one_line(
    pair: Any, given: dict[str, Any], message: str
) -> None:
    target, draft = pair
    arguments = {"input_ids": prompt(), "max_new_tokens": 4, "draft_model": draft, **given}
    with pytest.raises(UserError, match=message) as caught:
        target.generate(**arguments, custom_generate=generate)
    assert "\n" not in str(caught.value)
