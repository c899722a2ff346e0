"""Decodes with OpenVINO GenAI, run by that runtime's own Python."""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from serve import nats_of, serve

STATE: dict[str, Any] = {}


def convert(model: str, folder: str, **_: str) -> dict[str, Any]:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    main_export(
        model,
        output=folder,
        task="text-generation-with-past",
        library_name="transformers",
        convert_tokenizer=True,  # drafts are refused without it
        ov_config=OVConfig(),  # without one, models of a billion parameters become int8
    )
    return {"folder": folder}


def open_(
    target: str,
    draft: str | None,
    method: str,
    threads: int,
    eos: Any,
    options: Any,
    precision: str,
) -> dict[str, Any]:
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False  # a repeated prompt would cost nothing
    extra: dict[str, Any] = {"NUM_STREAMS": "1", **properties}
    if method == "draft":
        extra["draft_model"] = genai.draft_model(draft, "CPU", **extra)
    elif method == "lookup":
        extra["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **extra)
    STATE.update(pipeline=pipeline, method=method, options=options, eos=eos)
    STATE.update(file=f"{target}/openvino_model.xml", properties=properties)
    return {"version": genai.__version__}


def generate(prompt: list[int], max_new_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    method, options = STATE["method"], STATE["options"]
    config = genai.GenerationConfig()
    config.max_new_tokens = max_new_tokens
    config.do_sample = bool(sampling["temperature"])
    if config.do_sample:
        config.temperature, config.top_p = sampling["temperature"], sampling["top_p"]
        config.top_k, config.rng_seed = sampling["top_k"], sampling["seed"]
    if STATE["eos"]:
        config.stop_token_ids = set(STATE["eos"])
        config.set_eos_token_id(STATE["eos"][0])
    else:
        config.ignore_eos = True
    if method != "generate":
        config.num_assistant_tokens = options["num_draft_tokens"]
    if method == "lookup":
        config.max_ngram_size = options["ngram"]
    streamer = _Times()
    ids = openvino.Tensor(np.array([prompt], np.int64))
    start = streamer.start = time.perf_counter()
    result = STATE["pipeline"].generate(ids, config, streamer)
    wall = time.perf_counter() - start
    tokens = [int(token) for token in result.tokens[0]]
    accepted = 0
    if method != "generate":
        # Some lookups come without counts; the tokens of a pass are written at once.
        stats, at_once = result.extended_perf_metrics, len(tokens) - len(set(streamer.times))
        accepted = at_once if stats is None else int(stats.get_num_accepted_tokens())
    rounds = len(tokens) - accepted
    drafted = rounds * options["num_draft_tokens"] if method == "draft" else 0
    return {
        "tokens": tokens,
        "times_s": [*streamer.times, *[wall] * len(tokens)][: len(tokens)],
        "wall_s": wall,
        "rounds": rounds,
        # A lookup that finds nothing proposes nothing, and the runtime does not count such rounds.
        "proposed": None if method == "lookup" else drafted,
        "accepted": accepted,
        "draft_passes": drafted,
    }


def score(tokens: list[int]) -> dict[str, float]:
    model = openvino.Core().compile_model(STATE["file"], "CPU", STATE["properties"])
    rows = np.arange(len(tokens))[None]
    inputs = {"input_ids": np.array([tokens]), "attention_mask": np.ones_like(rows)}
    inputs |= {"position_ids": rows, "beam_idx": np.zeros(1, np.int32)}
    return nats_of(model(inputs)["logits"][0], tokens)


class _Times(genai.StreamerBase):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.start = 0.0
        self.times: list[float] = []

    def write(self, token: Any) -> Any:
        count = len(token) if isinstance(token, (list, tuple)) else 1
        self.times += [time.perf_counter() - self.start] * count
        return genai.StreamingStatus.RUNNING

    def end(self) -> None: ...


if __name__ == "__main__":
    serve(convert, open_, generate, score)
