"""Collects the finished prompts of a run or comparison; disturbed ones are measured again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.clocks import ClockKind
from specdec.clocks.timed_runs import timed_run
from specdec.data.prompt import Prompt
from specdec.metrics import RequestResult, Run, RunTotals
from specdec.metrics.contention import disturbed_figures, slow_repeats
from specdec.report.requests import RequestRecord, RequestWriter, finished
from specdec.runs.cpu_times import CpuMeter
from specdec.runs.runners import Runner, TokenPrompt

MAX_ATTEMPTS = 3
"""Maximum number of measurements of a prompt, per strategy and repeat."""

_AGAIN_SHARE = 0.25  # maximum share of a repeat's measurements that is repeated
_AGAIN_TOGETHER = 4  # if none of so many is better, the machine is busy and repeating is in vain

Key = tuple[str, int, int]
"""(strategy, repeat, prompt id)"""


def warm_up(runner: Runner, cfg: Mapping[str, Any], prompts: Sequence[TokenPrompt]) -> None:
    """Decodes prompts uncounted, since first calls allocate, compile and capture CUDA graphs.

    With graphs it decodes a whole batch of the longest prompts: each place in a batch has graphs of
    its own, for contexts up to the length of its request.
    """
    first = prompts[:1]
    if cfg["model"].get("graphs", "off") != "off":
        longest = sorted(prompts, key=lambda prompt: len(prompt.tokens), reverse=True)
        first = longest[: int(cfg["batch_size"])]
    runner.run(first, lambda _: None)
    if runner.trace is not None:
        runner.trace.clear()


class Measurements:
    """Measures prompts, writes them to ``requests.jsonl``, and keeps the best attempt at each.

    ``records`` has the finished requests by strategy, repeat and prompt id.
    """

    def __init__(
        self,
        writer: RequestWriter,
        *,
        new_meter: Callable[[Runner], CpuMeter | None],
        on_finish: Callable[[str], None],
        source_of: Callable[[int], Prompt | None] = lambda _: None,
    ) -> None:
        """Starts without measurements.

        Args:
            writer: of ``requests.jsonl``, whose finished prompts are not measured again.
            new_meter: makes the meter of a runner, as ``meter_of`` does.
            on_finish: called with the strategy when a prompt has its first measurement.
            source_of: prompt id -> prompt of the data set, whose name and category are written.
        """
        self.records: dict[str, list[dict[int, RequestRecord]]] = {}
        self._writer = writer
        self._new_meter = new_meter
        self._on_finish = on_finish
        self._source_of = source_of
        self._attempts: dict[Key, int] = {}

    def resume(self, strategy: str) -> int:
        """Begins a strategy's next repeat; returns how many prompts an earlier process finished."""
        repeats = self.records.setdefault(strategy, [])
        repeats.append(finished(self._writer.path, strategy, len(repeats)))
        return len(repeats[-1])

    def measure(self, runner: Runner, repeat: int, prompts: Sequence[TokenPrompt]) -> None:
        """Decodes prompts with a strategy; each is written when it is finished."""
        meter = self._new_meter(runner)

        def book(result: RequestResult, totals: RunTotals) -> None:
            cpu = None if meter is None else meter.stop()
            reason = "" if cpu is None else cpu.disturbance
            record = RequestRecord(runner.name, repeat, result, totals, cpu=cpu, disturbed=reason)
            self._keep(record)
            if meter is not None:
                meter.start()

        with timed_run():
            if meter is not None:
                meter.start()
            runner.run(prompts, lambda _: None, book)

    def measure_again(
        self,
        runners: Sequence[Runner],
        prompts: Sequence[TokenPrompt],
        later: Mapping[tuple[str, int], TokenPrompt] | None = None,
    ) -> None:
        """Measures disturbed prompts again, within the bounds at the top of this file.

        Traced runs are not repeated. ``later`` has the prompts that differ between strategies, by
        strategy and id.
        """
        named = {runner.name: runner for runner in runners if runner.trace is None}
        by_key = {(name, prompt.id): prompt for name in named for prompt in prompts}
        by_key |= {key: prompt for key, prompt in (later or {}).items() if key[0] in named}
        left = max(_AGAIN_TOGETHER, int(_AGAIN_SHARE * len(runners) * len(prompts)))
        while left > 0:
            tries = [
                key
                for key in self.disturbed()
                if self._attempts.get(key, 1) < MAX_ATTEMPTS and (key[0], key[2]) in by_key
            ][: min(left, _AGAIN_TOGETHER)]
            for name, repeat, prompt in tries:
                self.measure(named[name], repeat, [by_key[name, prompt]])
            if self.disturbed().keys() >= {*tries}:
                break
            left -= len(tries)

    def mark(self) -> None:
        """Rewrites lines whose reason changed: a prompt may be slow only against other repeats."""
        reasons = self.disturbed()
        for record in self._all():
            reason = reasons.get(record.key, "")
            if record.disturbed != reason:
                self._write(replace(record, disturbed=reason))

    def disturbed(self) -> dict[Key, str]:
        """Returns the disturbed measurements, each with its reason."""
        reasons = {r.key: r.cpu.disturbance for r in self._all() if r.cpu is not None}
        walls: dict[tuple[str, int], dict[int, float]] = {}
        for record in self._all():
            if record.cpu is not None:
                walls.setdefault((record.strategy, record.result.id), {})[record.repeat] = (
                    record.cpu.wall_s
                )
        for (strategy, prompt), seconds in walls.items():
            for repeat, reason in slow_repeats(seconds).items():
                reasons[strategy, repeat, prompt] = reasons[strategy, repeat, prompt] or reason
        return {key: reason for key, reason in reasons.items() if reason}

    def disturbed_ids(self, *strategies: str) -> list[set[int]]:
        """Returns per repeat the prompts that were disturbed in one of these strategies."""
        keys = [key for key in self.disturbed() if key[0] in strategies]
        repeats = len(self.records[strategies[0]])
        return [{prompt for _, at, prompt in keys if at == repeat} for repeat in range(repeats)]

    def figures(self, strategy: str) -> dict[str, Any]:
        """Returns ``disturbed_figures`` of a strategy; empty if disturbance is not measured."""
        records = [r for repeat in self.records[strategy] for r in repeat.values()]
        if any(record.cpu is None for record in records):
            return {}
        found = self.disturbed()
        return disturbed_figures(found.get(record.key, "") for record in records)

    def merged(self) -> dict[str, list[Run]]:
        """Returns requests and totals by strategy and repeat."""
        return {
            name: [
                Run.of((r.result, r.totals) for r in repeat.values() if r.totals is not None)
                for repeat in repeats
            ]
            for name, repeats in self.records.items()
        }

    def results(self) -> Mapping[str, list[RequestResult]]:
        """Returns the finished requests of each strategy's first repeat."""
        return {n: [r.result for r in repeats[0].values()] for n, repeats in self.records.items()}

    def _keep(self, record: RequestRecord) -> None:
        """Keeps a measurement unless an earlier attempt at the prompt was better."""
        self._attempts[record.key] = self._attempts.get(record.key, 0) + 1
        earlier = self.records[record.strategy][record.repeat].get(record.result.id)
        if earlier is None:
            self._write(record)
            self._on_finish(record.strategy)
        elif not record.disturbed or _wall_s(record) < _wall_s(earlier):
            self._write(record)

    def _write(self, record: RequestRecord) -> None:
        self.records[record.strategy][record.repeat][record.result.id] = record
        source = self._source_of(record.result.id)
        self._writer.write(
            record.strategy,
            record.result,
            repeat=record.repeat,
            totals=record.totals,
            prompt="" if source is None else source.name,
            category="" if source is None else source.category,
            cpu=record.cpu,
            disturbed=record.disturbed,
        )

    def _all(self) -> list[RequestRecord]:
        repeats = [repeat for repeats in self.records.values() for repeat in repeats]
        return [record for repeat in repeats for record in repeat.values()]


def meter_of(runner: Runner, *, waits: bool) -> CpuMeter | None:
    """Builds a meter of the processes that a runner uses; None on a clock that is not measured.

    Ranks that another launcher started cannot be read, so the meter counts waiting for them.
    """
    if runner.parts is None:
        return CpuMeter(ranks=getattr(runner, "pids", ()), waits=waits)
    if runner.parts.clock.kind is not ClockKind.MEASURED:
        return None
    pids = runner.parts.executor.pids
    return CpuMeter(ranks=pids or (), waits=waits or pids is None)


def _wall_s(record: RequestRecord) -> float:
    return 0.0 if record.cpu is None else record.cpu.wall_s
