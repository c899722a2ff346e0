"""Compares each prompt with plain decoding; slow prompts barely move the median of these ratios."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median
from typing import Any

import numpy as np

from specdec.metrics.results import RequestResult, Run
from specdec.metrics.times import decode_speed

_LEVEL = 0.95
_NUM_RESAMPLES = 2000
_NAMES = ("speedup_prompt_median", "speedup_prompt_median_interval")


def paired_figures(
    runs: Sequence[Run],
    ar_runs: Sequence[Run],
    disturbed: Sequence[Collection[int]] = (),
) -> dict[str, Any]:
    """Returns the median speed-up over prompts and its 95 % bootstrap interval.

    A prompt's speed-up is the median over repeats of the ratio of decode speeds within a repeat.

    Args:
        ar_runs: plain decoding, by repeat as ``runs``.
        disturbed: per repeat the ids of prompts whose time does not count on either side. They are
            left out if the prompt has another repeat.
    """
    ratios = _prompt_ratios(runs, ar_runs, disturbed)
    if not ratios:
        return dict.fromkeys(_NAMES)
    values = np.array(ratios)
    interval = None
    if len(values) > 1:
        shape = (_NUM_RESAMPLES, len(values))
        picks = np.random.default_rng(0).integers(0, len(values), shape)
        medians = np.median(values[picks], axis=1)
        interval = [float(q) for q in np.quantile(medians, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])]
    return dict(zip(_NAMES, (float(np.median(values)), interval), strict=True))


def _prompt_ratios(
    runs: Sequence[Run], ar_runs: Sequence[Run], disturbed: Sequence[Collection[int]]
) -> list[float]:
    counted, others = dict[int, list[float]](), dict[int, list[float]]()
    for repeat, (run, ar) in enumerate(zip(runs, ar_runs, strict=True)):
        left_out = disturbed[repeat] if disturbed else ()
        plain = {result.id: result for result in ar.results}
        for result in run.results:
            ratio = _ratio(result, plain.get(result.id))
            if ratio is not None:
                kept = others if result.id in left_out else counted
                kept.setdefault(result.id, []).append(ratio)
    return [median(ratios) for ratios in (others | counted).values()]


def _ratio(result: RequestResult, plain: RequestResult | None) -> float | None:
    if plain is None:
        return None
    speed, plain_speed = decode_speed([result]), decode_speed([plain])
    return speed / plain_speed if speed and plain_speed else None
