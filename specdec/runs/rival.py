"""Measures other runtimes with the same prompts, stop rules, threads and counters.

A runtime decodes in its own process and measures itself. It reports how many target passes a
request took, but not which tokens each pass emitted: the longest gaps between tokens are taken to
separate the passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec.errors import UserError
from specdec.metrics.results import RequestResult, RunTotals
from specdec.pairs import ModelPair, PretrainedPair
from specdec.parts.fields import Count, validated
from specdec.rivals import RUNTIMES, RivalOutput, RivalProcess
from specdec.rivals.endpoint import Endpoint, EndpointOptions
from specdec.rivals.environments import converted
from specdec.runs.runners import OneByOne, TokenPrompt, result_of, sampling_params
from specdec.state import TARGET_ORIGIN, RequestState, StopRules

METHODS = {
    f"{runtime}_{method}": (runtime, method)
    for runtime in RUNTIMES
    for method in ("generate", "draft", "lookup")
}
"""Name of a row -> (runtime, how it drafts)."""


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class RivalOptions:
    """Settings of another runtime's speculation; ``ngram`` is the longest that lookup matches."""

    num_draft_tokens: Count = 4
    ngram: Count = 3


@dataclass(kw_only=True, eq=False)
class RivalBaseline(OneByOne):
    """Another runtime, without stop strings and ``no_repeat_ngram``: it gets end tokens as ids.

    ``title`` is the runtime's name, which is shown with the server's version.
    """

    server: RivalProcess | Endpoint
    title: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runtime = f"{self.title} {self.server.version}".strip()
        self.pids = self.server.pids

    def close(self) -> None:
        self.server.close()

    def generate_one(self, prompt: TokenPrompt) -> tuple[RequestResult, RunTotals]:
        sampling, request = self.sampling, self.new_request(prompt)
        state = np.random.SeedSequence([self.seed, prompt.id]).generate_state(1)
        output = self.server.generate(
            prompt.tokens.tolist(),
            max_new_tokens=self.stop.max_new_tokens,
            sampling={
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or 0,
                "seed": int(state[0]) >> 1,  # the runtimes take a signed 32-bit number
            },
        )
        sizes = pass_sizes(output.times_s, output.rounds)
        _emit(request, output, sizes)
        _count(request, sizes, output)
        totals = RunTotals(
            steps=len(sizes),
            target_passes=len(sizes),
            prefill_rows=request.num_prompt - 1,
            target_rows=len(sizes) + (output.proposed or output.accepted),
            draft_passes=output.draft_passes,
            draft_rows=output.draft_passes,
            wall_s=output.wall_s,
            clock_s=output.wall_s,
            # The runtime reports one time: its own overhead is part of its passes.
            model_s={"target": output.wall_s},
            model_calls={"target": len(sizes)},
            target_bytes=self.weight_bytes["target"],
            draft_bytes=self.weight_bytes.get("draft", 0),
        )
        return result_of(request, self.tokenizer), totals


def baseline_of_runtime(cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> RivalBaseline:
    """Starts the runtime of a configuration whose strategy has kind ``rival``.

    Models are converted on first use. The pair must be loaded from folders, on the CPU, in a dtype
    of the runtime; else, or if the runtime is not installed, ``UserError`` is raised.
    """
    strategy = cfg["strategy"]
    name, (runtime, method) = strategy["name"], METHODS[strategy["method"]]
    if not isinstance(pair, PretrainedPair):
        raise UserError(f"strategy={name} needs models from folders: model=tiny/hf")
    dtypes, options = RUNTIMES[runtime].dtypes, RivalOptions(**strategy["options"])
    _refuse(
        name,
        {
            f"computes in {' or '.join(dtypes)}, not in model.dtype={pair.dtype}": (
                pair.dtype not in dtypes
            ),
            f"runs on the CPU, not on model.device={pair.device}": pair.device != "cpu",
        },
    )
    _check_rules(cfg, stop)
    folders = {"target": pair.folder("target"), "draft": None}
    if method == "draft":
        folders["draft"] = pair.folder("draft")
    server = RivalProcess(
        runtime,
        {
            **{k: path and str(converted(runtime, path)) for k, path in folders.items()},
            "method": method,
            "threads": torch.get_num_threads(),
            "eos": sorted(stop.eos_ids),
            "options": {"num_draft_tokens": options.num_draft_tokens, "ngram": options.ngram},
            **dtypes[pair.dtype],
        },
    )
    weight_bytes = {key: pair.weight_bytes[key] for key, path in folders.items() if path}
    title = RUNTIMES[runtime].title
    return RivalBaseline.of(cfg, pair, stop, server=server, weight_bytes=weight_bytes, title=title)


def baseline_of_endpoint(cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> RivalBaseline:
    """Connects to the server of a configuration whose strategy has kind ``endpoint``."""
    strategy = cfg["strategy"]
    if pair.tokenizer is None:
        raise UserError(
            f"strategy={strategy['name']} needs a model with a tokenizer: model=tiny/hf"
        )
    _check_rules(cfg, stop)
    options = EndpointOptions(**strategy["options"])
    server = Endpoint(options, tokenizer=pair.tokenizer, eos_ids=stop.eos_ids)
    return RivalBaseline.of(cfg, pair, stop, server=server)


def _check_rules(cfg: Mapping[str, Any], stop: StopRules) -> None:
    reasons = {
        "has no stop_strings": bool(stop.stop_strings),
        "has no sampling.no_repeat_ngram": bool(sampling_params(cfg["sampling"]).no_repeat_ngram),
    }
    _refuse(cfg["strategy"]["name"], reasons)


def _refuse(name: str, reasons: Mapping[str, bool]) -> None:
    for reason, is_wrong in reasons.items():
        if is_wrong:
            raise UserError(f"strategy={name} {reason}: leave that option or this row out")


def pass_sizes(times_s: Sequence[float], passes: int) -> list[int]:
    """Estimates tokens per pass: the ``passes`` - 1 longest gaps between tokens separate passes."""
    cuts = np.sort(np.argsort(-np.diff(times_s), kind="stable")[: max(0, passes - 1)]) + 1
    edges = [0, *cuts.tolist(), len(times_s)]
    return np.diff(edges).tolist() if len(times_s) else []


def _emit(request: RequestState, output: RivalOutput, sizes: Sequence[int]) -> None:
    """Emits the tokens; the last token of each pass counts as the target's own."""
    origins = [origin for size in sizes for origin in [*[0] * (size - 1), TARGET_ORIGIN]]
    for token, origin, at in zip(output.tokens, origins, output.times_s, strict=True):
        if request.finished:
            request.counters.cut_tokens += 1
        else:
            request.emit(token, origin, request.arrival_s + at)


def _count(request: RequestState, sizes: Sequence[int], output: RivalOutput) -> None:
    """Counts answers; drafts that were not accepted are spread evenly over the passes.

    If their number is unknown, neither proposals nor judged candidates are counted, so that rates
    of acceptance are undefined.
    """
    refused = max(0, (output.proposed or 0) - sum(sizes) + len(sizes))
    for i, size in enumerate(sizes):
        spare = refused // len(sizes) + (i < refused % len(sizes))
        judged = 0 if output.proposed is None else size - 1 + (spare > 0)
        request.counters.proposed += 0 if output.proposed is None else size - 1 + spare
        request.counters.count_answer(size - 1, judged, hit=False)
