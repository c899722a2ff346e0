"""Measures other runtimes with the same prompts, stop rules, threads and counters.

A runtime decodes in its own process and measures itself. It reports how many target passes a
request took, but not which tokens each pass emitted: the longest gaps between tokens are taken to
separate the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from specdec.errors import UserError
from specdec.metrics.results import RequestResult, RunTotals
from specdec.pairs import ModelPair, PretrainedPair
from specdec.parts.fields import Count, validated
from specdec.rivals import RUNTIMES, RivalOutput, RivalProcess
from specdec.rivals.endpoint import Endpoint, EndpointOptions
from specdec.rivals.environments import converted
from specdec.runs.runners import (
    Book,
    TokenPrompt,
    result_of,
    run_one_by_one,
    sampling_params,
)
from specdec.sampling.transform import SamplingParams
from specdec.state import TARGET_ORIGIN, RequestState, StopRules
from specdec.types import Lossless

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


class Server(Protocol):
    """A process or server that decodes the prompts of a baseline.

    ``pids`` are the processes whose CPU time is the server's; empty if it is not measured.
    """

    version: str

    @property
    def pids(self) -> tuple[int, ...]: ...

    def generate(
        self, prompt: Sequence[int], *, max_new_tokens: int, sampling: Mapping[str, Any]
    ) -> RivalOutput:
        """See ``RivalProcess.generate``."""
        ...

    def close(self) -> None: ...


class RivalBaseline:
    """Another runtime as a ``Runner``; it claims greedy-exact or distribution-exact decoding."""

    parts = None
    trace = None

    def __init__(
        self,
        *,
        name: str,
        server: Server,
        tokenizer: PreTrainedTokenizerBase | None,
        weight_bytes: Mapping[str, int],
        stop: StopRules,
        sampling: SamplingParams,
        seed: int = 0,
    ) -> None:
        """Wraps a runtime with its models loaded.

        Args:
            weight_bytes: "target" and, with a draft model, "draft" -> bytes of the weights.
            stop: without stop strings: these runtimes receive end tokens as ids only.
            sampling: without ``no_repeat_ngram``.
            seed: combined with the prompt's id; the runtime's draws differ from this library's.
        """
        self.name = name
        self.claims = Lossless.TOKEN if sampling.greedy else Lossless.DISTRIBUTION
        self._stop, self._sampling, self._seed = stop, sampling, seed
        self._tokenizer = tokenizer
        self._bytes = weight_bytes
        self._process = server
        self.version, self.pids = server.version, server.pids
        self._origin_s = perf_counter()

    def run(
        self,
        prompts: Sequence[TokenPrompt],
        on_finish: Callable[[RequestResult], None],
        book: Book | None = None,
    ) -> RunTotals:
        return run_one_by_one(prompts, self.generate_one, on_finish, book)

    def close(self) -> None:
        self._process.close()

    def generate_one(self, prompt: TokenPrompt) -> tuple[RequestResult, RunTotals]:
        request = RequestState(
            request_id=prompt.id, prompt=prompt.tokens, stop=self._stop, sampling=self._sampling
        )
        request.arrival_s = request.admitted_s = perf_counter() - self._origin_s
        state = np.random.SeedSequence([self._seed, prompt.id]).generate_state(1)
        sampling = self._sampling
        found = self._process.generate(
            prompt.tokens.tolist(),
            max_new_tokens=self._stop.max_new_tokens,
            sampling={
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or 0,
                "seed": int(state[0]) >> 1,  # the runtimes take a signed 32-bit number
            },
        )
        sizes = pass_sizes(found.times_s, found.rounds)
        _emit(request, found, sizes)
        _count(request, sizes, found)
        totals = RunTotals(
            steps=len(sizes),
            target_passes=len(sizes),
            prefill_rows=request.num_prompt - 1,
            target_rows=len(sizes) + found.proposed,
            draft_passes=found.draft_passes,
            draft_rows=found.draft_passes,
            wall_s=found.wall_s,
            clock_s=found.wall_s,
            # The runtime reports one time: its own overhead is part of its passes.
            model_s={"target": found.wall_s},
            model_calls={"target": len(sizes)},
            target_bytes=self._bytes["target"],
            draft_bytes=self._bytes.get("draft", 0),
        )
        return result_of(request, self._tokenizer), totals


def runtime_baseline(
    *,
    name: str,
    method: str,
    pair: PretrainedPair,
    stop: StopRules,
    sampling: SamplingParams,
    seed: int = 0,
    options: RivalOptions,
    note: Callable[[str], None] = lambda _: None,
) -> RivalBaseline:
    """Starts a runtime of ``METHODS`` with the models, which are converted on first use.

    The pair must be loaded from folders, on the CPU, in a dtype of the runtime; else, or if the
    runtime is not installed, ``UserError`` is raised.
    """
    runtime, kind = METHODS[method]
    _check(name, RUNTIMES[runtime].dtypes, pair)
    _check_rules(name, stop, sampling)
    folders = {"target": pair.folder("target"), "draft": None}
    if kind == "draft":
        folders["draft"] = pair.folder("draft")
    process = RivalProcess(
        runtime,
        {
            **{k: path and str(converted(runtime, path, note)) for k, path in folders.items()},
            "method": kind,
            "threads": torch.get_num_threads(),
            "eos": sorted(stop.eos_ids),
            "options": {"num_draft_tokens": options.num_draft_tokens, "ngram": options.ngram},
            **RUNTIMES[runtime].dtypes[pair.dtype],
        },
    )
    return RivalBaseline(
        name=name,
        server=process,
        tokenizer=pair.tokenizer,
        weight_bytes={key: pair.weight_bytes[key] for key, path in folders.items() if path},
        stop=stop,
        sampling=sampling,
        seed=seed,
    )


def baseline_of_runtime(cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> RivalBaseline:
    """Builds the baseline of a configuration whose strategy has kind ``rival``."""
    strategy = cfg["strategy"]
    if not isinstance(pair, PretrainedPair):
        raise UserError(f"strategy={strategy['name']} needs models from folders: model=tiny/hf")
    return runtime_baseline(
        name=str(strategy["name"]),
        method=strategy["method"],
        pair=pair,
        stop=stop,
        sampling=sampling_params(cfg["sampling"]),
        seed=int(cfg["seed"]),
        options=RivalOptions(**strategy["options"]),
    )


def baseline_of_endpoint(cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> RivalBaseline:
    """Builds the baseline of a configuration whose strategy has kind ``endpoint``."""
    name, sampling = str(cfg["strategy"]["name"]), sampling_params(cfg["sampling"])
    if pair.tokenizer is None:
        raise UserError(f"strategy={name} needs a model with a tokenizer: model=tiny/hf")
    _check_rules(name, stop, sampling)
    return RivalBaseline(
        name=name,
        server=Endpoint(
            EndpointOptions(**cfg["strategy"]["options"]),
            tokenizer=pair.tokenizer,
            eos_ids=stop.eos_ids,
        ),
        tokenizer=pair.tokenizer,
        weight_bytes=pair.weight_bytes,
        stop=stop,
        sampling=sampling,
        seed=int(cfg["seed"]),
    )


def pass_sizes(times_s: Sequence[float], passes: int) -> list[int]:
    """Estimates tokens per pass: the ``passes`` - 1 longest gaps between tokens separate passes."""
    cuts = np.sort(np.argsort(-np.diff(times_s), kind="stable")[: max(0, passes - 1)]) + 1
    edges = [0, *cuts.tolist(), len(times_s)]
    return np.diff(edges).tolist() if len(times_s) else []


def _check(name: str, dtypes: Collection[str], pair: PretrainedPair) -> None:
    some = " or ".join(dtypes)
    reasons = [
        (pair.dtype not in dtypes, f"computes in {some}, not in model.dtype={pair.dtype}"),
        (pair.device != "cpu", f"runs on the CPU, not on model.device={pair.device}"),
    ]
    _refuse(name, reasons)


def _check_rules(name: str, stop: StopRules, sampling: SamplingParams) -> None:
    reasons = [
        (bool(stop.stop_strings), "has no stop_strings"),
        (bool(sampling.no_repeat_ngram), "has no sampling.no_repeat_ngram"),
    ]
    _refuse(name, reasons)


def _refuse(name: str, reasons: Sequence[tuple[bool, str]]) -> None:
    for wrong, reason in reasons:
        if wrong:
            raise UserError(f"strategy={name} {reason}: leave that option or this row out")


def _emit(request: RequestState, found: RivalOutput, sizes: Sequence[int]) -> None:
    """Emits the tokens; the last token of each pass counts as the target's own."""
    origins = [origin for size in sizes for origin in [*[0] * (size - 1), TARGET_ORIGIN]]
    for token, origin, at in zip(found.tokens, origins, found.times_s, strict=True):
        if request.finished:
            request.counters.cut_tokens += 1
        else:
            request.emit(token, origin, request.arrival_s + at)


def _count(request: RequestState, sizes: Sequence[int], found: RivalOutput) -> None:
    """Counts answers; drafts that were not accepted are spread evenly over the passes."""
    refused = max(0, found.proposed - sum(sizes) + len(sizes))
    for i, size in enumerate(sizes):
        spare = refused // len(sizes) + (i < refused % len(sizes))
        request.counters.proposed += size - 1 + spare
        request.counters.count_answer(size - 1, size - 1 + (spare > 0), hit=False)
