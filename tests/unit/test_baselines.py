"""transformers' baselines: our tokens, rules and counts, and nothing left on the models."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from specdec.metrics import RequestResult, RunTotals, lossless_against, summarise
from specdec.models.random import random_model
from specdec.runs.hf_generate import HFBaseline, HFOptions
from specdec.runs.runners import TokenPrompt
from specdec.sampling.transform import SamplingParams, SamplingTransform
from specdec.state import StopRules
from tests.sampled import sampled

HF_KINDS = ("hf_generate", "hf_assisted", "hf_prompt_lookup")
VOCAB = 48
PROMPTS = [(i, np.random.default_rng(i).integers(1, VOCAB, 5 + i)) for i in range(4)]


def tiny() -> PreTrainedModel:
    return random_model(num_layers=2, vocab_size=VOCAB, scale=0.5)


class Models(NamedTuple):
    target: PreTrainedModel
    draft: PreTrainedModel

    def decode(
        self,
        kind: str,
        stop: StopRules,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        prompts: Sequence[tuple[int, np.ndarray]] = PROMPTS,
        **settings: Any,
    ) -> tuple[list[RequestResult], RunTotals]:
        """Decodes prompts one after the other."""
        draft = self.draft if kind == "hf_assisted" else None
        keys = {"kind": kind, "target": self.target, "draft": draft, "stop": stop}
        baseline = HFBaseline(**keys, sampling=sampling, **settings)
        found = [baseline.generate_one(TokenPrompt(*prompt)) for prompt in prompts]
        return [result for result, _ in found], RunTotals.merge([totals for _, totals in found])

    def reference(
        self,
        tokens: np.ndarray,
        stop: StopRules,
        params: SamplingParams = SamplingParams(),  # noqa: B008
    ) -> list[int]:
        """Greedy decoding by whole forward passes and our own transform and stop rules."""
        transform = SamplingTransform(params)
        row, output = tokens.tolist(), []
        while not output or stop.reason(output) is None:
            with torch.inference_mode():
                logits = self.target(torch.tensor([row])).logits[0, -1:]
            token = int(transform.sample(logits, np.zeros(1), [np.array(row)])[0])
            row.append(token)
            output.append(token)
        return output


@pytest.fixture(scope="module")
def models() -> Models:
    """The draft is the target, disturbed: it agrees often, not always."""
    draft, generator = tiny(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += 0.02 * torch.randn(weights.shape, generator=generator)
    return Models(tiny(), draft)


@pytest.mark.parametrize("kind", HF_KINDS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(no_repeat_ngram=2, processors=(RepetitionPenaltyLogitsProcessor(1.3),)),
    ],
    ids=["greedy", "processors"],
)
def test_greedy_rows_equal_our_rules_token_by_token(
    kind: str, params: SamplingParams, models: Models
) -> None:
    stop = StopRules(max_new_tokens=24, eos_ids=frozenset({7, 11}))
    results, totals = models.decode(kind, stop, params)
    for result, (prompt_id, tokens) in zip(results, PROMPTS, strict=True):
        expected = models.reference(tokens, stop, params)
        assert list(result.output) == expected
        assert result.finish_reason == stop.reason(expected)
        assert (result.id, result.num_prompt) == (prompt_id, len(tokens))
        assert list(result.emitted_s) == sorted(result.emitted_s)
        assert result.admitted_s < result.emitted_s[0]
    assert summarise(results, totals)["new_tokens"] == sum(len(r.output) for r in results)


@pytest.mark.parametrize("kind", HF_KINDS)
def test_passes_and_acceptance_are_counted_from_what_was_fed(kind: str, models: Models) -> None:
    """Checked against an independent count of the calls of the models' forward methods."""
    calls: Counter[str] = Counter()
    hooks = [
        model.model.register_forward_hook(lambda *_, name=name: calls.update([name]))
        for name, model in models._asdict().items()
    ]
    results, totals = models.decode(kind, StopRules(max_new_tokens=20))
    for hook in hooks:
        hook.remove()
    found = summarise(results, totals)
    assert found["target_passes"] == calls["target"] == found["answers"]
    assert found["draft_passes"] == calls["draft"]
    assert found["new_tokens"] == 20 * len(PROMPTS)
    assert found["new_tokens"] == found["accepted_tokens"] + found["answers"]
    fed = sum(len(tokens) for _, tokens in PROMPTS)
    assert totals.prefill_rows == fed - len(PROMPTS)
    assert totals.target_rows == found["answers"] + found["proposed_nodes"]
    assert totals.target_bytes == sum(p.nbytes for p in models.target.parameters())
    assert 0 < totals.model_s["target"] < totals.wall_s
    if kind == "hf_generate":
        assert found["acceptance_length"] == 1.0
        assert found["proposed_nodes"] == found["draft_passes"] == 0
    else:
        assert found["acceptance_length"] > 1.0
        assert found["proposed_nodes"] >= found["accepted_tokens"] > 0
    assert (found["draft_passes"] > 0) == (kind == "hf_assisted") == (totals.draft_bytes > 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(HF_KINDS, every=3, start=1))
def test_sampled_tokens_follow_the_processed_distribution(kind: str, models: Models) -> None:
    """Chi-square over the first token of 600 runs; false alarm 1e-6.

    The planted bug, another temperature, must be told apart at the same level.
    """
    from scipy.stats import chisquare

    tokens = PROMPTS[1][1]
    params = SamplingParams(temperature=0.6, top_k=8, top_p=0.9)
    with torch.inference_mode():
        logits = models.target(torch.from_numpy(tokens)[None]).logits[0, -1:]
    right = SamplingTransform(params).probs(logits)[0]
    wrong = SamplingTransform(SamplingParams(temperature=1.2, top_k=int((right > 0).sum())))
    # Two tokens, so that the first one is drafted; the plain row needs one only.
    stop = StopRules(max_new_tokens=1 if kind == "hf_generate" else 2)
    results, _ = models.decode(kind, stop, params, [(i, tokens) for i in range(600)])
    counts = np.bincount([r.output[0] for r in results], minlength=VOCAB)
    support = right > 0
    assert support.sum() >= 2
    assert not counts[~support].any()
    assert chisquare(counts[support], right[support] * len(results)).pvalue > 1e-6
    planted = wrong.probs(logits)[0][support]
    assert chisquare(counts[support], planted * len(results)).pvalue < 1e-6


def test_seed_and_prompt_key_the_draws_and_the_global_generator_is_untouched(
    models: Models,
) -> None:
    def outputs(seed: int, prompts: list[tuple[int, np.ndarray]]) -> dict[int, tuple[int, ...]]:
        stop, params = StopRules(max_new_tokens=12), SamplingParams(temperature=1.0)
        results, _ = models.decode("hf_generate", stop, params, prompts, seed=seed)
        return {r.id: r.output for r in results}

    state = torch.get_rng_state()
    first = outputs(5, PROMPTS)
    assert outputs(5, PROMPTS[::-1]) == first
    assert outputs(6, PROMPTS) != first
    assert torch.equal(torch.get_rng_state(), state)


def test_stop_strings_end_the_request_inside_an_accepted_block(models: Models) -> None:
    """transformers itself does not cut a block at a stop string; the engine's rules do."""

    def decode(tokens: object) -> str:
        return "".join(chr(65 + t) for t in tokens)  # type: ignore[attr-defined]

    tokens = PROMPTS[2][1]
    plain = models.reference(tokens, StopRules(max_new_tokens=20))
    stop = StopRules(max_new_tokens=20, stop_strings=(decode(plain[5:7]),), decode=decode)
    expected = models.reference(tokens, stop)
    assert len(expected) < 20
    equal = Models(models.target, tiny())  # drafts run past the stop string
    for kind in HF_KINDS:
        (result,), totals = equal.decode(kind, stop, prompts=[(0, tokens)])
        assert list(result.output) == expected
        assert result.finish_reason == "stop_string"
        assert totals.target_passes <= len(expected)
        summarise([result], totals)
        if kind == "hf_assisted":
            assert result.counters.cut_tokens > 0


def test_settings_of_the_models_neither_leak_in_nor_are_changed(models: Models) -> None:
    """A checkpoint's generation_config may hold sampling, penalties and limits of its own."""
    stop = StopRules(max_new_tokens=16)
    clean, _ = models.decode("hf_assisted", stop)
    noisy = GenerationConfig(
        do_sample=True, temperature=2.0, repetition_penalty=3.0, min_new_tokens=2, eos_token_id=7
    )
    before = [model.generation_config for model in models]
    for model in models:
        model.generation_config = noisy
    try:
        found, _ = models.decode("hf_assisted", stop, options=HFOptions(schedule="heuristic"))
        assert all(model.generation_config is noisy for model in models)
    finally:
        for model, config in zip(models, before, strict=True):
            model.generation_config = config
    assert lossless_against(found, clean)["lossless"]
    for model in models:
        assert not {**model._forward_hooks, **model._forward_pre_hooks}
