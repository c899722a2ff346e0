"""Speed of the simulator itself: synthetic pairs on the in-process pipeline, one core.

    python -m experiments.benchmarks.simulator [--stages 8] [--width 64] [--tokens 2048]

Prints tokens decoded per second of wall time, and the virtual TBT that the run simulates.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import numpy as np
import torch

from specdec.clocks import CostCurve, LatencyProfile, SimulatedClock
from specdec.loop import decode
from specdec.metrics import RequestResult
from specdec.pairs import build_pair
from specdec.policies import FixedWidth
from specdec.runners import TokenPrompt
from specdec.sampling import SamplingParams
from specdec.scheduler import FifoScheduler
from specdec.sources import SyntheticSource
from specdec.state import DecodeState, RequestState, StopRules
from specdec.verifiers import MatchVerifier
from specdec.workbench import Workbench

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
        source=SyntheticSource(pair=pair.synthetic()),
        policy=FixedWidth(width=width, children=16, levels_per_step=1),
        verifier=MatchVerifier(),
        stages=stages,
    )
    stop = StopRules(max_new_tokens=num_tokens // 4)
    prompts = [TokenPrompt(i, np.arange(1, 17)) for i in range(4)]
    results: list[RequestResult] = []
    scheduler = FifoScheduler(
        requests=[
            RequestState(request_id=p.id, prompt=p.tokens, stop=stop, sampling=SamplingParams())
            for p in prompts
        ],
        parts=(parts.policy, parts.source, parts.executor),
        on_finish=lambda r: results.append(RequestResult.from_state(r, text="")),
    )
    state = DecodeState(draws=parts.draws, clock=parts.clock, meter=parts.meter)
    start = perf_counter()
    for _ in decode(
        state=state,
        scheduler=scheduler,
        policy=parts.policy,
        source=parts.source,
        verifier=parts.verifier,
        executor=parts.executor,
    ):
        pass
    return sum(len(r.output) for r in results) / (perf_counter() - start)


if __name__ == "__main__":
    main()
