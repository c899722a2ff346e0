"""Decodes with OpenVINO GenAI, run by that runtime's own Python."""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from serve import nats_of


def convert(state: Any) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    main_export(
        state.source,
        output=state.folder,
        task="text-generation-with-past",
        library_name="transformers",
        convert_tokenizer=True,  # drafts are refused without it
        ov_config=OVConfig(),  # without one, models of a billion parameters become int8
    )


def load(state: Any) -> dict[str, str]:
    state.properties = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": state.threads}
    state.properties["INFERENCE_PRECISION_HINT"] = state.dtype.replace("float", "f")  # f32, bf16
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False  # a repeated prompt would cost nothing
    extra = dict(state.properties)
    if state.method == "draft":
        extra["draft_model"] = genai.draft_model(state.draft, "CPU", **extra)
    elif state.method == "lookup":
        extra["prompt_lookup"] = True
    state.pipeline = genai.LLMPipeline(state.target, "CPU", scheduler_config=scheduler, **extra)
    return {"version": genai.__version__}


def generate(state: Any) -> dict[str, Any]:
    method, sampling = state.method, state.sampling
    config = genai.GenerationConfig()
    config.max_new_tokens = state.max_new_tokens
    config.do_sample = bool(sampling["temperature"])
    if config.do_sample:
        config.temperature, config.top_p = sampling["temperature"], sampling["top_p"]
        config.top_k, config.rng_seed = sampling["top_k"], sampling["seed"]
    config.ignore_eos = not state.eos
    if state.eos:
        config.stop_token_ids = set(state.eos)
        config.set_eos_token_id(state.eos[0])
    if method != "generate":
        config.num_assistant_tokens = state.num_draft_tokens
    if method == "lookup":
        config.max_ngram_size = state.ngram
    streamer = _Times()
    ids = openvino.Tensor(np.array([state.prompt], np.int64))
    start = time.perf_counter()
    result = state.pipeline.generate(ids, config, streamer)
    wall = time.perf_counter() - start
    tokens = [int(token) for token in result.tokens[0]]
    accepted = 0
    if method != "generate":
        # Some lookups come without counts; the tokens of a pass are written at once.
        stats, at_once = result.extended_perf_metrics, len(tokens) - len(set(streamer.times))
        accepted = at_once if stats is None else int(stats.get_num_accepted_tokens())
    rounds = len(tokens) - accepted
    drafted = rounds * state.num_draft_tokens if method == "draft" else 0
    return {
        "tokens": tokens,
        "times_s": [*(at - start for at in streamer.times), *[wall] * len(tokens)][: len(tokens)],
        "wall_s": wall,
        "rounds": rounds,
        # A lookup that finds nothing proposes nothing, and the runtime does not count such rounds.
        "proposed": None if method == "lookup" else drafted,
        "accepted": accepted,
        "draft_passes": drafted,
    }


def score(state: Any) -> float:
    file = f"{state.target}/openvino_model.xml"
    model = openvino.Core().compile_model(file, "CPU", state.properties)
    rows = np.arange(len(state.tokens))[None]
    inputs = {"input_ids": np.array([state.tokens]), "attention_mask": np.ones_like(rows)}
    inputs |= {"position_ids": rows, "beam_idx": np.zeros(1, np.int32)}
    return nats_of(model(inputs)["logits"][0], state.tokens)


class _Times(genai.StreamerBase):
    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, token: Any) -> Any:
        count = len(token) if isinstance(token, (list, tuple)) else 1
        self.times += [time.perf_counter()] * count
        return genai.StreamingStatus.RUNNING

    def end(self) -> None: ...
