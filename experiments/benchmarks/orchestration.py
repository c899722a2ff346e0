"""Overhead of a step over real ranks, with null models and stages that only sleep.

    python -m experiments.benchmarks.orchestration [--stages 8] [--width 64] [--sleep-ms 20]

Each stage takes ``--sleep-ms`` by a paced clock and computes nothing; a row per node is sent from
rank to rank. The remaining time of a step is orchestration on the critical path: the policy's
selection, messages, waking up processes, verification, commits. Prints its mean and median per
step, and the CPU time of all ranks per step, which depends less on other load of the machine.
``--phases`` also prints what rank 0 does in a step, one after another, which takes some CPU time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter, process_time, thread_time
from typing import Any

import numpy as np
import torch

from specdec.clocks.build import build_clock
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts, Workbench
from specdec.distributed.executor import DistributedExecutor
from specdec.distributed.ranks import Ranks
from specdec.pairs import build_pair
from specdec.policies import FixedWidth
from specdec.sampling.transform import SamplingParams
from specdec.sources import SyntheticSource
from specdec.state import RequestState, StopRules
from specdec.verifiers import MatchVerifier

MODEL = {"kind": "synthetic"}

_PHASES = {
    ("end of submit", "start of collect"): "drafting",
    ("start of collect", "end of collect"): "waiting for the answers",
    ("end of collect", "start of commit"): "verification, commits of tree, policy and draft",
    ("start of commit", "end of commit"): "END messages (executor.commit)",
    ("end of commit", "start of submit"): "selection of the next batch",
    ("start of submit", "end of submit"): "BEGIN message (executor.submit)",
}
"""Moments at which a phase of the loop begins and ends on rank 0 -> its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--sleep-ms", type=float, default=20.0)
    parser.add_argument("--phases", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = build(args.stages, args.width, args.sleep_ms)
    try:
        decode(parts, 16)  # a warm-up
        executor = parts.executor
        assert isinstance(executor, DistributedExecutor)
        moments = noted(executor) if args.phases else []
        before = cpu_s(executor)
        num_steps, steps_ms = decode(parts, args.tokens)
        used = [(a - b) / num_steps * 1e3 for a, b in zip(cpu_s(executor), before, strict=True)]
        late = sum(r["clock"]["overruns"] for r in executor.reports())
        report(steps_ms, used, late, args)
        if moments:
            print_phases(moments)
    finally:
        parts.executor.shutdown()


def build(stages: int, width: int, sleep_ms: float) -> Parts:
    """SpecPipe on null models and real ranks."""
    clock: dict[str, Any] = {
        "kind": "paced",
        "profile": f"{sleep_ms:g} ms per stage",
        "scale": 1.0,
        "costs": {"stage": {"tokens": [1], "ms": [sleep_ms]}},
    }
    pair, meter = build_pair(MODEL), Meter()
    ranks = Ranks(model=MODEL, clock=clock, threads=1)
    bench = Workbench(pair, clock=build_clock(clock, meter), meter=meter, ranks=ranks)
    return bench.parts(
        source=SyntheticSource(pair=pair),
        policy=FixedWidth(width=width, children=16, levels_per_step=1),
        verifier=MatchVerifier(),
        stages=stages,
    )


def noted(executor: DistributedExecutor) -> list[tuple[str, float, float]]:
    """Wall and CPU time whenever a method of ``executor`` begins or ends, from now on."""
    moments: list[tuple[str, float, float]] = []

    def wrapped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            moments.append((f"start of {name}", perf_counter(), thread_time()))
            result = method(*args, **kwargs)
            moments.append((f"end of {name}", perf_counter(), thread_time()))
            return result

        return call

    for name in ("submit", "collect", "commit"):
        setattr(executor, name, wrapped(name, getattr(executor, name)))
    return moments


def print_phases(moments: Sequence[tuple[str, float, float]]) -> None:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in _PHASES.values()}
    for (first, wall, cpu), (second, wall_after, cpu_after) in pairwise(moments):
        if name := _PHASES.get((first, second)):
            taken[name].append((wall_after - wall, cpu_after - cpu))
    for name, times in taken.items():
        wall, cpu = np.median(times, axis=0) * 1e3
        print(f"rank 0, {name}: {wall:.2f} ms, of CPU time {cpu:.2f}")


def cpu_s(executor: DistributedExecutor) -> list[float]:
    """CPU seconds of every rank so far, rank 0 (with the draft and the policy) first."""
    return [process_time(), *(report["cpu_s"] for report in executor.reports())]


def decode(parts: Parts, num_tokens: int) -> tuple[int, list[float]]:
    """Decodes one prompt; returns the number of steps and the ms of those in a full pipeline."""
    request = RequestState(
        request_id=0,
        prompt=np.arange(1, 17),
        stop=StopRules(max_new_tokens=num_tokens),
        sampling=SamplingParams(),
    )
    taken, last, full, num_steps = [], perf_counter(), False, 0
    with torch.inference_mode():  # as runs do
        for commits in parts.decode(parts.new_state(), [request]):
            num_steps += 1
            now = perf_counter()
            if full and commits:  # an answer in this step and in the one before: a full pipeline
                taken.append((now - last) * 1e3)
            full, last = bool(commits), now
    return num_steps, taken


def report(steps_ms: list[float], cpu_ms: list[float], late: int, args: argparse.Namespace) -> None:
    over = np.array(steps_ms) - args.sleep_ms
    print(
        f"{args.stages + 1} ranks, width {args.width}, stages sleep {args.sleep_ms:g} ms:"
        f" {len(over)} steps of a full pipeline; orchestration per step: mean {over.mean():.2f} ms,"
        f" median {np.median(over):.2f}, 90 % below {np.quantile(over, 0.9):.2f};"
        f" {late} sleeps were late"
    )
    print(
        f"CPU per step: rank 0 {cpu_ms[0]:.2f} ms (policy and null draft included), stages"
        f" {np.mean(cpu_ms[1:]):.2f} ms each ({min(cpu_ms[1:]):.2f} to {max(cpu_ms[1:]):.2f}),"
        f" all {sum(cpu_ms):.2f} ms"
    )


if __name__ == "__main__":
    main()
