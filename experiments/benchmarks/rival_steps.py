"""Where a plain step's time goes: ``python -m experiments.benchmarks.rival_steps``.

Decodes the same prompts in turn with ONNX Runtime GenAI (``specdec rivals install ort``), in its
own process, and with ``ar`` on ``model.backend=onnx``. Prints microseconds per decoded token:
between two tokens of the other runtime; inside our session; inside our model calls; and of our
whole step. All are wall times, of which only the ratios count on a machine with other work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from specdec.api import Decoder
from specdec.config.job import run_job_of
from specdec.models.runner import ModelRunner
from specdec.pairs import PretrainedPair
from specdec.rivals import RivalProcess
from specdec.rivals.runtimes import converted
from specdec.runs.jobs import prepare

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}


def main() -> int:
    """Prints medians and tenth percentiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = ["strategy=ar", "model.backend=onnx", "threads=1", f"max_new_tokens={args.tokens}"]
    words += ["data=humaneval", f"data.limit={args.prompts}"]
    pair, loaded, _ = prepare(run_job_of(words).config)
    assert isinstance(pair, PretrainedPair)
    prompts = [prompt.tokens.tolist() for prompt in loaded]
    decoder = Decoder(words, pair=pair)
    rival = _rival(pair)
    ours = _Stopwatch()
    between: list[float] = []
    for prompt in args.repeats * prompts:
        theirs = rival.generate(prompt, max_new_tokens=args.tokens, sampling=GREEDY)
        between.extend(np.diff(theirs.times_s))
        ours.restart()
        found = decoder.generate(prompt)
        assert tuple(found.tokens) == theirs.tokens, "the runtimes disagree on a token"
    rival.close()
    print(f"{len(between)} tokens, equal in both; us per token     median  10 %")
    rows = {"ONNX Runtime GenAI": between, **ours.seconds}
    for name, seconds in rows.items():
        low, middle = 1e6 * np.percentile(seconds, [10, 50])
        print(f"{name:40s}{middle:12.0f}{low:6.0f}")
    return 0


def _rival(pair: PretrainedPair) -> RivalProcess:
    worker = RivalProcess("ort")
    worker.ask(
        "open",
        target=str(converted("ort", pair.folder("target"), print)),
        draft=None,
        method="generate",
        threads=1,
        eos=sorted(pair.eos_ids),
        options={},
    )
    return worker


class _Stopwatch:
    """Times of our passes, without the first two of a request (prefill and first token).

    Attributes:
        seconds: name of a part -> seconds per pass.
    """

    def __init__(self) -> None:
        """Replaces the methods that it times, for the life of the process."""
        self.seconds: dict[str, list[float]] = {
            "ours: session": [],
            "ours: model call": [],
            "ours: step": [],
        }
        self._calls, self._began = 0, 0.0
        forward = ModelRunner.forward

        def timed(runner: ModelRunner, rows: Sequence[Any], **options: Any) -> Any:
            start = perf_counter()
            output = forward(runner, rows, **options)
            end = perf_counter()
            self._calls += 1
            if self._calls > 2:
                self.seconds["ours: model call"].append(end - start)
                self.seconds["ours: step"].append(end - self._began)
            self._began = end
            return output

        ModelRunner.forward = timed  # type: ignore[method-assign, assignment]
        from onnxruntime import InferenceSession

        run = InferenceSession.run_with_iobinding

        def timed_run(session: Any, *arguments: Any) -> None:
            start = perf_counter()
            run(session, *arguments)
            if self._calls > 1:
                self.seconds["ours: session"].append(perf_counter() - start)

        InferenceSession.run_with_iobinding = timed_run

    def restart(self) -> None:
        """A new request begins."""
        self._calls = 0


if __name__ == "__main__":
    sys.exit(main())
