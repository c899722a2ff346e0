"""Speed of the simulator itself: synthetic pairs on the in-process pipeline, one core.

    python -m experiments.benchmarks.simulator [--stages 8] [--width 64] [--tokens 2048]

Prints decoded tokens per second of wall time (not of simulated time).
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np
import torch

from specdec.clocks import CostCurve, LatencyProfile, SimulatedClock
from specdec.compose.workbench import Workbench
from specdec.pairs import build_pair
from specdec.policies import FixedWidth
from specdec.sampling.transform import SamplingParams
from specdec.sources import SyntheticSource
from specdec.state import RequestState, StopRules
from specdec.verifiers import MatchVerifier

PROFILE = LatencyProfile(name="uniform 30 ms", costs={"stage": CostCurve(tokens=(1,), ms=(30.0,))})


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates = sorted(run(args.stages, args.width, args.tokens) for _ in range(args.repeats))
    print(
        f"simulated pipeline, synthetic pair, {args.stages} stages, width {args.width}:"
        f" {rates[len(rates) // 2]:.0f} tokens/s of wall time on one core"
        f" (median of {args.repeats}, {rates[0]:.0f} to {rates[-1]:.0f})"
    )


def run(stages: int, width: int, num_tokens: int) -> float:
    """Tokens per second of one run of four prompts."""
    pair = build_pair({"kind": "synthetic"})
    bench = Workbench(pair, clock=SimulatedClock(PROFILE))
    parts = bench.parts(
        source=SyntheticSource(pair=pair),
        policy=FixedWidth(width=width, children=16, levels_per_step=1),
        verifier=MatchVerifier(),
        stages=stages,
    )
    stop = StopRules(max_new_tokens=num_tokens // 4)
    finished: list[RequestState] = []
    requests = [
        RequestState(request_id=i, prompt=np.arange(1, 17), stop=stop, sampling=SamplingParams())
        for i in range(4)
    ]
    start = perf_counter()
    for _ in parts.decode(parts.new_state(), requests, on_finish=finished.append):
        pass
    return sum(len(r.output) for r in finished) / (perf_counter() - start)


if __name__ == "__main__":
    main()
