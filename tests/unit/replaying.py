"""Real runs of tiny random models, their records, and replays of them."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from specdec.config.hydra import compose_config
from specdec.metrics import RequestResult, RunTotals
from specdec.pairs import ModelPair, RandomPair
from specdec.pairs.record import Record, record_run
from specdec.pairs.recorded import RecordedSequences, ReplayModels
from specdec.runs.runners import PartsRunner, TokenPrompt, sampling_params
from specdec.state import StopRules

NUM_TOKENS = 32
SPARE = 8  # tokens recorded beyond, so that the last answer's accepted path is in the record too
SAMPLINGS = {  # sharp enough under sampling for the draft to be right now and then
    "greedy": ("sampling=greedy",),
    "sampled": ("sampling=t08", "sampling.temperature=0.2"),
    "no_repeat4": ("sampling=no_repeat4",),
}
PROMPTS = tuple(
    TokenPrompt(i, np.random.default_rng(i).integers(1, 64, size)) for i, size in ((3, 4), (7, 1))
)


@cache
def pair() -> RandomPair:
    """A target of three layers and a draft of its first two, in float64."""
    return RandomPair(num_layers=3, draft_layers=2, hidden_size=16, num_heads=2)


@cache
def composed(words: tuple[str, ...]) -> dict[str, Any]:
    return compose_config(["model=random", *words]).values


def run(
    models: ModelPair,
    words: tuple[str, ...],
    *,
    num_tokens: int = NUM_TOKENS,
    prompts: tuple[TokenPrompt, ...] = PROMPTS,
) -> tuple[list[RequestResult], RunTotals]:
    """Decodes the prompts (their namesakes of a record) one by one."""
    cfg = deepcopy(composed(words))
    if isinstance(models, ReplayModels):
        prompts = tuple(TokenPrompt(*prompt) for prompt in models.prompts())
    stop = StopRules(max_new_tokens=num_tokens, eos_ids=models.eos_ids)
    runner = PartsRunner(cfg=cfg, pair=models, stop=stop)
    results: list[RequestResult] = []
    totals = RunTotals.merge([runner.run([prompt], results.append) for prompt in prompts])
    runner.close()
    return results, totals


@cache
def recorded(sampling: str) -> Record:
    """The record of plain decoding: the target's path is the same under every strategy."""
    words = ("strategy=ar", *SAMPLINGS[sampling])
    results, _ = run(pair(), words, num_tokens=NUM_TOKENS + SPARE)
    return record_run(
        pair=pair(),
        prompts={prompt.id: prompt.tokens for prompt in PROMPTS},
        results=results,
        sampling=sampling_params(composed(words)["sampling"]),
        about={"sampling": sampling},
    )


def replayed(record: Record, **keys: Any) -> ReplayModels:
    return ReplayModels(RecordedSequences(record=record, **keys), num_layers=8)


def shifted(record: Record) -> Record:
    """The planted bug: every rank off by one."""
    requests = tuple(replace(r, ranks=r.ranks + 1) for r in record.requests)
    return replace(record, requests=requests)
