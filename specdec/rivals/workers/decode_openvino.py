"""Decodes with OpenVINO GenAI, run by that runtime's own Python."""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from serve import serve

STATE: dict[str, Any] = {}


def open_models(
    target: str,
    draft: str | None,
    method: str,
    threads: int,
    eos: list[int],
    options: dict[str, int],
    precision: str,
) -> dict[str, Any]:
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "NUM_STREAMS": "1",
    }
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False  # a repeated prompt would cost nothing
    extra = {}
    if method == "draft":
        extra["draft_model"] = genai.draft_model(draft, "CPU", **properties)
    if method == "lookup":
        extra["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **extra, **properties)
    STATE.update(pipeline=pipeline, method=method, options=options, eos=eos)
    return {"version": genai.__version__}


def generate(prompt: list[int], max_new_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """Decodes one prompt; the reply has the fields of ``specdec.rivals.process.RivalOutput``."""
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
    cpu, start = time.process_time(), time.perf_counter()
    streamer.start = start
    ids = openvino.Tensor(np.array([prompt], np.int64))
    result = STATE["pipeline"].generate(ids, config, streamer)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    tokens = [int(token) for token in result.tokens[0]]
    times = streamer.times[: len(tokens)]
    times += [wall] * (len(tokens) - len(times))
    rounds, accepted = len(tokens), 0
    if method != "generate":
        accepted = int(result.extended_perf_metrics.get_num_accepted_tokens())
        rounds = len(tokens) - accepted
    # A lookup that finds nothing proposes nothing, and the runtime does not count such rounds.
    proposed = {"generate": 0, "lookup": None}.get(method, rounds * options["num_draft_tokens"])
    return {
        "tokens": tokens,
        "times_s": times,
        "wall_s": wall,
        "cpu_s": cpu,
        "prefill_s": times[0] if times else 0.0,
        "rounds": rounds,
        "proposed": proposed,
        "accepted": accepted,
        "draft_passes": rounds * options["num_draft_tokens"] if method == "draft" else 0,
    }


class _Times(genai.StreamerBase):  # type: ignore[misc]
    """Records when each token is written."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 0.0
        self.times: list[float] = []

    def write(self, token: Any) -> Any:
        count = len(token) if isinstance(token, (list, tuple)) else 1
        self.times += [time.perf_counter() - self.start] * count
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Does nothing."""


if __name__ == "__main__":
    serve({"open": open_models, "generate": generate})
