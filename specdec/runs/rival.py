"""Measures other runtimes with the same prompts, stop rules, threads and counters.

A runtime reports how many target passes a request took, but not which tokens each pass emitted: the
longest gaps between tokens are taken to separate the passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.errors import UserError
from specdec.metrics.results import RequestResult, RunTotals
from specdec.models.bundled import family_path
from specdec.models.gguf import SUFFIX
from specdec.pairs import ModelPair, PretrainedPair
from specdec.parts.fields import Count, Share, validated
from specdec.rivals.endpoint import Endpoint, EndpointOptions
from specdec.rivals.runtimes import RUNTIMES, RivalOutput, RivalProcess, converted
from specdec.runs.runners import OneByOne, TokenPrompt, emit, result_of, sampling_params
from specdec.state import RequestState, StopRules
from specdec.types import Lossless

ROWS = {  # name of a row -> (runtime, how it drafts)
    f"{name}_{method}": (name, method) for name in RUNTIMES for method in RUNTIMES[name].methods
}
HELD_OUT = Path(__file__).parents[1] / "assets" / "held_out.txt"
_nats: dict[tuple[str, ...], float] = {}  # (runtime, file, type) -> nats per byte of HELD_OUT


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class RivalOptions:
    num_draft_tokens: Count = 4
    ngram: Count = 3  # length of the n-grams that are looked up; the longest except in llama.cpp
    p_min: Share = 0.0  # a draft model stops below this probability (llama.cpp only)


@dataclass(kw_only=True, eq=False)
class RivalBaseline(OneByOne):
    """Decodes with another runtime, without stop strings and ``sampling.no_repeat_ngram``."""

    server: RivalProcess | Endpoint
    runtime: str
    caveat: str = ""
    lossy: bool = False  # whether it computes another function than the pair's target

    def __post_init__(self) -> None:
        super().__post_init__()
        self.claims = Lossless.LOSSY if self.lossy else self.claims
        self.pids = self.server.pids

    def close(self) -> None:
        self.server.close()

    def generate_one(self, prompt: TokenPrompt) -> tuple[RequestResult, RunTotals]:
        sampling, request = self.sampling, self.new_request(prompt)
        settings = {
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "seed": self.seed_of(prompt) >> 1,  # the runtimes take a signed 32-bit number
        }
        output = self.server.generate(
            prompt.tokens.tolist(), max_new_tokens=self.stop.max_new_tokens, sampling=settings
        )
        sizes = pass_sizes(output.times_s, output.rounds)
        _count(request, sizes, output)
        totals = self.new_totals(
            len(sizes),
            output.wall_s,
            prefill_rows=request.num_prompt - 1,
            target_rows=len(sizes) + (output.proposed or output.accepted),
            draft_passes=output.draft_passes,
            draft_rows=output.draft_passes,
            # The runtime reports one time: its own overhead is part of its passes.
            model_s={"target": output.wall_s},
            model_calls={"target": len(sizes)},
        )
        return result_of(request, self.tokenizer), totals


def baseline_of_runtime(cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> RivalBaseline:
    """Starts the runtime of a strategy of kind ``rival``; models are converted on first use.

    Raises ``UserError`` if the runtime is not installed, or if the models are not from folders
    (llama.cpp: GGUF files), not on the CPU, or in a dtype that the runtime does not support.
    """
    strategy = cfg["strategy"]
    row, (name, method) = strategy["name"], ROWS[strategy["method"]]
    runtime, options = RUNTIMES[name], asdict(RivalOptions(**strategy["options"]))
    if not isinstance(pair, PretrainedPair):
        raise UserError(f"strategy={row} needs models from folders: model=tiny")
    dtypes = runtime.dtypes or (pair.dtype,)
    other_type = f"computes in {' or '.join(dtypes)}, not in model.dtype={pair.dtype}"
    on_gpu = f"runs on the CPU, not on model.device={pair.device}"
    _refuse(cfg, stop, (pair.dtype not in dtypes, other_type), (pair.device != "cpu", on_gpu))
    names = ("target", "draft") if method == "draft" else ("target",)
    if runtime.dtypes:
        models = {key: pair.folder(key) for key in names}
        paths = {key: converted(name, folder) for key, folder in models.items()}
        weight_bytes = {key: pair.weight_bytes[key] for key in names}
    else:
        models = paths = {key: _gguf_file(row, pair, key) for key in names}
        weight_bytes = {key: path.stat().st_size for key, path in paths.items()}
    threads = torch.get_num_threads()
    server = RivalProcess(name, threads=threads)
    given: dict[str, Any] = {"draft": None, **{key: str(path) for key, path in paths.items()}}
    given |= {"method": method, "threads": threads, "dtype": pair.dtype, **options}
    loaded = server.ask("load", eos=sorted(stop.eos_ids), **given)
    quality, own = nats_per_byte(pair, server, (name, given["target"], pair.dtype))
    files = " and ".join(path.name for path in models.values())
    settings = "".join(f", {key}={value}" for key, value in strategy["options"].items())
    bits = pair.options.bits_of("target")
    precision = f"int{bits}" if bits else pair.dtype
    caveat = (
        f"{files} in {loaded.get('quantization', pair.dtype)}, threads={threads}{settings};"
        f" {quality:.4f} nats per byte of {HELD_OUT.name}, target in {precision} {own:.4f}"
    )
    if not runtime.dtypes:
        caveat += f". Another function than ar's: compare with {name}_generate"
    about: dict[str, Any] = {"runtime": f"{runtime.title} {loaded['version']}", "caveat": caveat}
    about |= {"weight_bytes": weight_bytes, "lossy": not runtime.dtypes}
    return RivalBaseline.of(cfg, pair, stop, server=server, **about)


def baseline_of_endpoint(cfg: Mapping[str, Any], pair: ModelPair, stop: StopRules) -> RivalBaseline:
    name, options = cfg["strategy"]["name"], cfg["strategy"]["options"]
    if pair.tokenizer is None:
        raise UserError(f"strategy={name} needs a model with a tokenizer: model=tiny")
    _refuse(cfg, stop)
    server = Endpoint(EndpointOptions(**options), tokenizer=pair.tokenizer, eos_ids=stop.eos_ids)
    unknown = "the server does not say its file, quantisation, threads or quality"
    return RivalBaseline.of(cfg, pair, stop, server=server, runtime=server.version, caveat=unknown)


def nats_per_byte(
    pair: PretrainedPair, server: RivalProcess, runtime: tuple[str, ...]
) -> tuple[float, float]:
    """Returns -log p per byte of ``HELD_OUT`` by the server's model and by the pair's target."""
    text = HELD_OUT.read_text(encoding="utf-8")
    ids = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
    size = len(text.encode()) - len(pair.tokenizer.decode(ids[:1]).encode())
    target = ("", pair.model_name("target"), pair.dtype, str(pair.options.quantization))
    if runtime not in _nats:
        _nats[runtime] = server.ask("score", tokens=ids) / size
    if target not in _nats:
        with torch.inference_mode():
            tokens = torch.tensor(ids, device=pair.target.device)
            logits = pair.target(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.double(), tokens[1:], reduction="sum")
            _nats[target] = float(loss) / size
    return _nats[runtime], _nats[target]


def _gguf_file(row: str, pair: PretrainedPair, key: str) -> Path:
    path = Path(family_path(pair.model_name(key))).expanduser()
    if path.suffix != SUFFIX:
        raise UserError(
            f"strategy={row} reads GGUF files, and model.{key}={pair.model_name(key)} is none: use"
            " model=smollm2, or model=gguf model.path=FILE"
        )
    return path


def _refuse(cfg: Mapping[str, Any], stop: StopRules, *reasons: tuple[bool, str]) -> None:
    no_repeat = sampling_params(cfg["sampling"]).no_repeat_ngram > 0
    asked = (bool(stop.stop_strings), "has no stop_strings")
    for applies, reason in (*reasons, asked, (no_repeat, "has no sampling.no_repeat_ngram")):
        if applies:
            name = cfg["strategy"]["name"]
            raise UserError(f"strategy={name} {reason}: leave that option or this row out")


def pass_sizes(times_s: Sequence[float], passes: int) -> list[int]:
    """Estimates tokens per pass: the ``passes`` - 1 longest gaps between tokens separate passes."""
    cuts = np.sort(np.argsort(-np.diff(times_s), kind="stable")[: max(0, passes - 1)]) + 1
    edges = [0, *cuts.tolist(), len(times_s)]
    return np.diff(edges).tolist() if len(times_s) else []


def _count(request: RequestState, sizes: Sequence[int], output: RivalOutput) -> None:
    """Emits the tokens of each pass to the request, and counts accepted and rejected draft tokens.

    ``sizes`` has the number of tokens per pass. Rejected draft tokens are spread evenly over the
    passes; if their number is unknown, draft tokens are not counted: acceptance is undefined.
    """
    refused = max(0, (output.proposed or 0) - sum(sizes) + len(sizes))
    ends = np.cumsum(sizes, dtype=int).tolist()
    for i, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        times_s = [request.arrival_s + at for at in output.times_s[end - size : end]]
        emit(request, output.tokens[end - size : end], times_s)
        spare = refused // len(sizes) + (i < refused % len(sizes))
        judged = 0 if output.proposed is None else size - 1 + (spare > 0)
        request.counters.proposed += 0 if output.proposed is None else size - 1 + spare
        request.counters.count_answer(size - 1, judged, hit=False)
