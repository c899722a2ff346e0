"""Figures and the page of ``experiments.plan.regret``.

A result is a case's eight candidates, the plan's first choice first: planned tokens/s, measured
tokens/s, and seconds and tokens of every batch of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.planning.candidates import PLAIN

WITHIN = 0.05
"""Wanted regret, in 90 % of cases."""

NEAR = 0.1
"""Wanted error of the planned tokens/s, in 80 % of cases."""

_RESAMPLES = 4000


def regrets(result: Mapping[str, Any]) -> list[float]:
    """Of every candidate, as if it were the first."""
    speeds = [c["measured_tokens_per_s"] for c in result["candidates"]]
    return [max(speeds) / speed - 1.0 for speed in speeds]


def regret(result: Mapping[str, Any]) -> float:
    """Time of the first choice over that of the best, less 1."""
    return regrets(result)[0]


def least_regret(result: Mapping[str, Any]) -> float | None:
    """Lower end of the regret's 95 % interval over batches of prompts; None without their times.

    The greatest of the lower ends against each other candidate, at a level divided by their number
    (Bonferroni), because the fastest of them is chosen by the same times.
    """
    if "turns" not in result["candidates"][0]:
        return None
    turns = np.array([c["turns"] for c in result["candidates"]])  # [candidates, turns, 2]
    drawn = np.random.default_rng(0).integers(turns.shape[1], size=(_RESAMPLES, turns.shape[1]))
    seconds, tokens = np.moveaxis(turns[:, drawn].sum(2), -1, 0)  # [candidates, resamples]
    per_token = seconds / tokens
    ratios = per_token[0] / per_token[1:] - 1.0
    return max(0.0, float(np.quantile(ratios, 0.025 / len(ratios), axis=1).max()))


def error(result: Mapping[str, Any]) -> float:
    """Of the planned tokens/s of the first choice, relative to the measured ones."""
    first = result["candidates"][0]
    return float(first["planned_tokens_per_s"] / first["measured_tokens_per_s"] - 1.0)


def gain_error(result: Mapping[str, Any]) -> float:
    """As ``error``, of the gain over plain decoding."""
    first, plain = result["candidates"][0], _plain(result)
    planned = first["planned_tokens_per_s"] / plain["planned_tokens_per_s"]
    measured = first["measured_tokens_per_s"] / plain["measured_tokens_per_s"]
    return float(planned / measured - 1.0)


def _plain(result: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(c for c in result["candidates"] if c["strategy"] == PLAIN)
    return found


def shares(results: Sequence[Mapping[str, Any]]) -> str:
    """The shares of cases within the bars."""
    small = np.mean([regret(r) <= WITHIN for r in results])
    near = np.mean([abs(error(r)) <= NEAR for r in results])
    gains = np.mean([abs(gain_error(r)) <= NEAR for r in results])
    return (
        f"{len(results)} cases: regret at most 5 % in {100 * small:.0f} % (wanted 90 %),"
        f" tokens/s within 10 % in {100 * near:.0f} % (wanted 80 %), gains over plain decoding"
        f" within 10 % in {100 * gains:.0f} %"
    )


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float, float]:
    """How two measurements of a case differ: first choice, plain decoding, gain of the first."""

    def change(at: int) -> float:
        speeds = [r["candidates"][at]["measured_tokens_per_s"] for r in (before, after)]
        return float(speeds[1] / speeds[0] - 1.0)

    names = [candidate["strategy"] for candidate in before["candidates"]]
    first, plain = change(0), change(names.index(PLAIN))
    return first, plain, (1.0 + first) / (1.0 + plain) - 1.0


def table(
    results: Mapping[str, Any],
    control: Mapping[str, Any],
    again: Mapping[str, Any],
    samples: Mapping[str, Any],
) -> str:
    """The cases, and those of ``--control``, ``--again`` and ``--samples``, as a page."""
    states = [result["provenance"].get("git", {}) for result in results.values()]
    revisions = sorted({str(state.get("revision", "unknown"))[:7] for state in states})
    machines = [result["provenance"].get("hardware", {}) for result in results.values()]
    told = sorted({f"{m.get('cpu', '?')}, {m.get('cores', '?')} cores" for m in machines})
    lines = [
        "# The first choice of plans against measured time\n",
        f"`python -m experiments.plan.regret DIR --write`, revision {', '.join(revisions)};"
        f" {'; '.join(told)}. Eight candidates per case are in regret.json.\n",
        "| case | first choice | tokens/s measured | planned | error | of the gain | regret |"
        " lower end of its 95 % interval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        first = result["candidates"][0]
        sizes = " ".join(f"{k}={v}" for k, v in first["sizes"].items())
        least = least_regret(result)
        lines.append(
            f"| {name} | {first['strategy']} {sizes} | {first['measured_tokens_per_s']:.1f} |"
            f" {first['planned_tokens_per_s']:.1f} | {100 * error(result):+.1f} % |"
            f" {100 * gain_error(result):+.1f} % | {100 * regret(result):.1f} % |"
            f" {'-' if least is None else f'{100 * least:.1f} %'} |"
        )
    more = [*_control(control), *_again(results, again), *_samples(results, samples)]
    return "\n".join([*lines, "", shares(list(results.values())), *more]) + "\n"


def case_line(result: Mapping[str, Any]) -> str:
    """What is printed of a case."""
    first = result["candidates"][0]
    return (
        f"{first['strategy']} {first['measured_tokens_per_s']:.1f} tokens/s,"
        f" planned {first['planned_tokens_per_s']:.1f} ({100 * error(result):+.1f} %; gain"
        f" {100 * gain_error(result):+.1f} %), regret {100 * regret(result):.1f} %"
    )


def again_line(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What is printed of a case of ``--again``."""
    first, plain, gain = changes(before, after)
    return (
        f"first choice {100 * first:+.1f} %, plain decoding {100 * plain:+.1f} %,"
        f" gain {100 * gain:+.1f} %"
    )


def again_shares(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """How often a measurement is within the bar of the same measurement at another time."""
    found = np.abs([changes(before, after) for before, after in pairs])
    near = [f"{100 * share:.0f} %" for share in np.mean(found <= NEAR, axis=0)]
    return (
        f"{len(pairs)} cases measured twice: the first choice within 10 % of itself in {near[0]},"
        f" plain decoding in {near[1]}, the gain in {near[2]}"
    )


def sample_ratio(samples: Mapping[str, Any]) -> float:
    """Tokens per answer on the prompts of the record over those on the prompts of the run."""
    (tokens, answers), (run_tokens, run_answers) = samples["planned"], samples["run"]
    return float(tokens / answers / (run_tokens / run_answers))


def gain_error_of_speed(before: Mapping[str, Any], samples: Mapping[str, Any]) -> float:
    """``gain_error`` without the difference between the two samples of prompts."""
    return (1.0 + gain_error(before)) / sample_ratio(samples) - 1.0


def samples_line(before: Mapping[str, Any], samples: Mapping[str, Any]) -> str:
    """What is printed of a case of ``--samples``."""
    return (
        f"tokens per answer {100 * (sample_ratio(samples) - 1):+.1f} % on the plan's prompts, gain"
        f" {100 * gain_error(before):+.1f} %, without it"
        f" {100 * gain_error_of_speed(before, samples):+.1f} %"
    )


def samples_shares(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """The errors of planned gains with and without the difference between the samples."""
    ratios = [sample_ratio(samples) - 1.0 for _, samples in pairs]
    errors = [gain_error(before) for before, _ in pairs]
    left = [gain_error_of_speed(before, samples) for before, samples in pairs]
    return (
        f"{len(pairs)} cases: the first choice has {100 * np.mean(ratios):+.1f} % tokens per answer"
        f" on the plan's prompts ({100 * min(ratios):+.1f} to {100 * max(ratios):+.1f} %); the"
        f" planned gain is {100 * np.mean(errors):+.1f} % off on average and within 10 % in"
        f" {100 * np.mean(np.abs(errors) <= NEAR):.0f} %, without that difference"
        f" {100 * np.mean(left):+.1f} % and {100 * np.mean(np.abs(left) <= NEAR):.0f} %"
    )


def control_line(result: Mapping[str, Any]) -> str:
    """What is printed of a case of ``--control``."""
    found = regrets(result)
    return f"regret {100 * np.median(found):.1f} % (median), {100 * max(found):.1f} % (largest)"


def control_shares(results: Sequence[Mapping[str, Any]]) -> str:
    """How often one of eight identical candidates is within the bar."""
    found = np.concatenate([regrets(r) for r in results])
    return (
        f"{len(found)} candidates in groups of eight identical ones:"
        f" regret at most 5 % in {100 * np.mean(found <= WITHIN):.0f} %,"
        f" 90 % of them below {100 * np.quantile(found, 0.9):.1f} %"
    )


def _control(results: Mapping[str, Any]) -> list[str]:
    """The page's second part; empty without ``--control``."""
    if not results:
        return []
    lines = [
        "\n## Eight times the same candidate\n",
        "`python -m experiments.plan.regret DIR --control`: no plan can choose better than among"
        " these, so their regrets are the noise of machine and measurement.\n",
        "| case | slowest and fastest, tokens/s | median regret | largest |",
        "|---|---|---|---|",
    ]
    for name, result in results.items():
        speeds = [c["measured_tokens_per_s"] for c in result["candidates"]]
        found = regrets(result)
        lines.append(
            f"| {name} | {min(speeds):.1f} to {max(speeds):.1f} | {100 * np.median(found):.1f} % |"
            f" {100 * max(found):.1f} % |"
        )
    return [*lines, "", control_shares(list(results.values()))]


def _again(results: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """The page's third part; empty without ``--again``."""
    if not again:
        return []
    lines = [
        "\n## The same runs at another time\n",
        "`python -m experiments.plan.regret DIR --again`: how far the second measurement is from"
        " the first, on other prompts; a plan that is right has this error.\n",
        "| case | first choice, tokens/s | then | change | plain decoding | gain |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in again.items():
        before, after = (r["candidates"][0] for r in (results[name], result))
        first, plain, gain = changes(results[name], result)
        lines.append(
            f"| {name} | {before['measured_tokens_per_s']:.1f} |"
            f" {after['measured_tokens_per_s']:.1f} | {100 * first:+.1f} % |"
            f" {100 * plain:+.1f} % | {100 * gain:+.1f} % |"
        )
    return [*lines, "", again_shares([(results[name], again[name]) for name in again])]


def _samples(results: Mapping[str, Any], samples: Mapping[str, Any]) -> list[str]:
    """The page's last part; empty without ``--samples``."""
    if not samples:
        return []
    lines = [
        "\n## The two samples of prompts\n",
        "`python -m experiments.plan.regret DIR --samples`: tokens per answer of the first choice"
        " on the prompts that the plan decoded and on those of the run; counts, no times.\n",
        "| case | plan's prompts | run's prompts | difference | error of the gain | without it |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in samples.items():
        planned, run = (tokens / answers for tokens, answers in (found["planned"], found["run"]))
        lines.append(
            f"| {name} | {planned:.2f} | {run:.2f} | {100 * (sample_ratio(found) - 1):+.1f} % |"
            f" {100 * gain_error(results[name]):+.1f} % |"
            f" {100 * gain_error_of_speed(results[name], found):+.1f} % |"
        )
    return [*lines, "", samples_shares([(results[name], samples[name]) for name in samples])]
