from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from specdec.planning.chains import ChainCell
from specdec.planning.search import Times, effective, interval
from specdec.planning.sensitivity import Change
from specdec.planning.simulate import Candidate, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A ranked candidate.

    Attributes:
        strategy: name of the preset.
        sizes: keys of its policy that differ from the preset.
        tokens_per_s: expected speed over all requests of a batch, with its 95 % interval.
        ms_per_token: expected time per token of one request, with its 95 % interval.
        gain: speed-up over plain decoding by the plan's objective, with its paired 95 % interval.
        first: share of the resamples in which this candidate is the best.
        tokens_per_answer, hit_rate: emitted tokens and hits per answer of the target.
        memory_gb: gigabytes on the fullest device; None if unknown.
    """

    strategy: str
    sizes: Mapping[str, Any]
    layout: str
    devices: int
    tokens_per_s: float
    tokens_per_s_interval: tuple[float, float]
    ms_per_token: float
    ms_per_token_interval: tuple[float, float]
    gain: float
    gain_interval: tuple[float, float]
    first: float
    tokens_per_answer: float
    hit_rate: float
    memory_gb: float | None
    is_plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of ``specdec.plan``.

    Attributes:
        choices: ranked candidates, fastest first, with plain decoding among them.
        objective, batch, context, devices: what was planned for.
        acceptance, machine: texts that describe the inputs and their origin.
        decides: sentences on what the time of the first choice depends on.
        changes, changes_told: the fastest candidates under other acceptance and links, and
            sentences that summarise them.
        chains: the best chain for each batch and context.
        crossover: context -> number of requests from which on plain decoding is best.
        by_batch: the fastest of the ranked candidates at each batch size.
        engines: engine -> flags for the best chain.
        memory_limit_gb: memory of a device; None if unknown.
        left_out: preset -> why it was not simulated.
        complete: whether the budget sufficed.
        notes: limits of this plan.
        expected: what a real run of the first choice is compared with (``check``).
        simulated_tokens, search_s: tokens that were simulated, and seconds of the search.
        folder: where it is written; empty if nowhere.
    """

    choices: tuple[Recommendation, ...]
    objective: str
    batch: int
    context: int
    devices: int
    acceptance: str
    machine: str
    decides: tuple[str, ...]
    changes: tuple[Change, ...]
    changes_told: tuple[str, ...]
    chains: tuple[ChainCell, ...]
    crossover: Mapping[int, int | None]
    by_batch: tuple[Mapping[str, Any], ...]
    engines: Mapping[str, str]
    memory_limit_gb: float | None
    left_out: Mapping[str, str]
    complete: bool
    notes: tuple[str, ...]
    expected: Mapping[str, Any]
    simulated_tokens: int = 0
    search_s: float = 0.0
    folder: str = ""
    overrides: tuple[str, ...] = field(default_factory=tuple)

    @property
    def best(self) -> Recommendation:
        return self.choices[0]

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame([asdict(choice) for choice in self.choices])

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **values,
            "choices": [asdict(choice) for choice in self.choices],
            "changes": [change.to_json() for change in self.changes],
            "chains": [cell.to_json() for cell in self.chains],
            "crossover": {str(k): v for k, v in self.crossover.items()},
        }


@dataclass(frozen=True, slots=True)
class Ranked:
    candidate: Candidate
    units: Sequence[Unit]
    memory_gb: float | None


def choices_of(
    ranked: Sequence[Ranked], *, objective: str, requests: float, drawn: bool, plain: str
) -> tuple[Recommendation, ...]:
    """Returns the choices, fastest first; drops a preset that decodes exactly like a faster one.

    All candidates must have results on the same prompts. ``plain`` is the name of plain decoding.
    """
    times = [Times.of(r.units, objective, r.candidate.layout.devices) for r in ranked]
    order = sorted(range(len(ranked)), key=lambda at: times[at].mean)
    kept: list[int] = []
    for at in order:
        same = any(
            np.array_equal(times[at].above, times[k].above)
            and np.array_equal(times[at].below, times[k].below)
            for k in kept
        )
        if not same or ranked[at].candidate.name == plain:
            kept.append(at)
    num = effective(len(ranked[0].units), requests, drawn)
    base = next(at for at in kept if ranked[at].candidate.name == plain)
    drawn_times = {at: times[at].resampled(num) for at in kept}
    fastest = np.argmin(np.stack([drawn_times[at] for at in kept]), axis=0)
    return tuple(
        _choice(
            ranked[at],
            num,
            gain=times[base].mean / times[at].mean,
            gain_interval=interval(drawn_times[base] / drawn_times[at]),
            first=float((fastest == place).mean()),
            is_plain=at == base,
        )
        for place, at in enumerate(kept)
    )


def _choice(
    ranked: Ranked,
    num: float,
    *,
    gain: float,
    gain_interval: tuple[float, float],
    first: float,
    is_plain: bool,
) -> Recommendation:
    units, candidate = ranked.units, ranked.candidate
    together = Times.of(units, "throughput", 1)
    alone = Times.of(units, "latency", 1)
    batch = int(candidate.config["batch_size"])
    # With one request at a time, decode phases alone count, as in ``tokens_per_s`` of a run.
    speed = alone if batch == 1 else together
    low, high = interval(1.0 / speed.resampled(num))
    low_ms, high_ms = interval(1e3 * alone.resampled(num))
    answers = sum(unit.answers for unit in units)
    return Recommendation(
        strategy=candidate.name,
        sizes=candidate.sizes,
        layout=candidate.layout.told(),
        devices=candidate.layout.devices,
        tokens_per_s=1.0 / speed.mean,
        tokens_per_s_interval=(low, high),
        ms_per_token=1e3 * alone.mean,
        ms_per_token_interval=(low_ms, high_ms),
        gain=gain,
        gain_interval=gain_interval,
        first=first,
        tokens_per_answer=sum(unit.emitted for unit in units) / max(answers, 1),
        hit_rate=sum(unit.hits for unit in units) / max(answers, 1),
        memory_gb=ranked.memory_gb,
        is_plain=is_plain,
    )


def compared(first: Recommendation, second: Recommendation) -> str:
    """Returns a text that compares the first choice with the next preset."""

    def of(choice: Recommendation) -> str:
        every = choice.ms_per_token * choice.tokens_per_answer
        return f"{choice.strategy} {choice.tokens_per_answer:.2f} every {every:.1f} ms"

    return f"tokens per answer of the target: {of(first)}, {of(second)}"
