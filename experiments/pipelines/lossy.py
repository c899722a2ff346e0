"""SpecPipe 3.4: lossy verification, what it gains in hits and loses in the target's likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.reproduce.drafts import size_overrides
from experiments.reproduce.findings import Findings, below, surely
from experiments.reproduce.intervals import Interval, beside, hits_of, interval
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab, Outcome
from specdec.runs.jobs import prepare


def lossy(item: Item, lab: Lab) -> Findings:
    """Verification rules on real models: hits, steps, and log probabilities under the target.

    Keys: ``common``, ``rows`` (rule -> overrides; the first is lossless), ``relaxed`` and
    ``strict`` (rows), ``nats`` (loss per token that is still negligible); claims ``relaxed_hits``,
    ``strict_hits``, ``strict_loss``.
    """
    findings, config = Findings(), item.config
    size = (*size_overrides(item, lab), "threads=1")
    runs = {
        name: lab.run(["model=tiny", "clock=simulated", *config["common"], *size, *overrides])
        for name, overrides in config["rows"].items()
    }
    scores = _scores(runs)
    table = []
    for name, run in runs.items():
        s = run.summary
        logprob, best, num = (sum(column) for column in zip(*scores[name].values(), strict=True))
        cells = (s["hit_rate"], s["steps_per_token"], s["flush_steps"] / s["new_tokens"])
        likely = (-logprob / num, 100.0 * best / num)
        table.append((name, *cells, run.tbt_ms, *likely, s["loop_share"], s["num_prompts"]))
    columns = (
        *("rule", "hit rate", "steps/token", "flush steps/token", "TBT ms"),
        *("nats/token under the target", "its best token, %", "loop_share", "prompts"),
    )
    findings.table(
        "Verification rules on the bundled pair (real models, simulated time)", columns, table
    )
    names = (next(iter(runs)), config["relaxed"], config["strict"])
    first, relaxed, strict = (runs[name] for name in names)
    flushes = relaxed.summary["flush_steps"]
    hit = float(relaxed.summary["hit_rate"])
    text = f"bundled pair, HumanEval, 0.6/0.9/80: hit rate {hit:.3f}, {flushes} flush steps"
    loops = relaxed.summary["loop_share"]
    findings.add("relaxed_hits", hit == 1.0 and flushes == 0, "simulated", text, loops=loops)
    _add_strict(findings, config, first, strict, scores)
    return findings


def _add_strict(
    findings: Findings,
    config: Mapping[str, Any],
    first: Outcome,
    strict: Outcome,
    scores: Mapping[str, Mapping[int, Sequence[float]]],
) -> None:
    loops = strict.summary["loop_share"]
    rows = beside(strict.results, first.results, hits_of)
    ends = interval(rows, lambda s: s[0] / s[1] - s[2] / s[3])
    rates = (float(first.summary["hit_rate"]), float(strict.summary["hit_rate"]))
    text = f"bundled pair, HumanEval, 0.6/0.9/80: {rates[0]:.3f} to {rates[1]:.3f}"
    findings.add("strict_hits", surely(*ends, 0.0), "simulated", text, loops=loops)
    ours, other = scores[config["strict"]], scores[next(iter(scores))]
    pairs = [(*ours[i], *other[i]) for i in sorted(ours.keys() & other.keys())]
    lost, ends = _loss(pairs)
    low, high = ends
    span = "" if low is None or high is None else f" ({low:+.3f} to {high:+.3f})"
    text = f"bundled pair, HumanEval, 0.6/0.9/80: {lost:+.3f} nats per token{span}"
    findings.add("strict_loss", below(ends, config["nats"]), "simulated", text, loops=loops)


def _loss(pairs: Sequence[Sequence[float]]) -> tuple[float, Interval]:
    """Log probability per token that the first text lacks, with its interval over prompts."""
    sums = [sum(column) for column in zip(*pairs, strict=True)]
    value = sums[3] / sums[5] - sums[0] / sums[2]
    return value, interval(pairs, lambda s: s[3] / s[5] - s[0] / s[2])


def _scores(runs: Mapping[str, Outcome]) -> dict[str, dict[int, tuple[float, int, int]]]:
    """Per rule and prompt: sum of log probabilities, tokens that are the target's best, tokens.

    The target reads each text at temperature 1, without the run's sampling transform.
    """
    pair, prompts, _ = prepare(next(iter(runs.values())).config)
    starts = {prompt.id: torch.as_tensor(prompt.tokens) for prompt in prompts}
    scores: dict[str, dict[int, tuple[float, int, int]]] = {}
    for name, run in runs.items():
        for result in run.results:
            output = torch.tensor(result.output)
            tokens = torch.cat([starts[result.id], output])
            with torch.inference_mode():
                logits = pair.target(tokens[None]).logits[0, -len(output) - 1 : -1]
            law = logits.double().log_softmax(dim=-1)
            found = law.gather(1, output[:, None]).sum()
            best = (law.argmax(dim=-1) == output).sum()
            row = (float(found), int(best), len(output))
            scores.setdefault(name, {})[result.id] = row
    return scores
