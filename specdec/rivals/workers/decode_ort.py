"""Decodes with ONNX Runtime GenAI, run by that runtime's own Python; see ``RivalOutput``."""

import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime_genai as genai
from serve import nats_of


def convert(state: Any) -> None:
    """Converts a model folder to ONNX; ``site``: site-packages with torch and transformers."""
    sys.path.append(state.site)  # the environment's own packages come first
    words = ["-i", state.source, "-o", state.folder, "-c", f"{state.folder}/cache"]
    sys.argv = ["builder", *words, "-p", "fp32", "-e", "cpu"]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")


def load(state: Any) -> dict[str, str]:
    """Loads target and draft from a temporary folder of links, with one genai_config.json."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(state, folder, "target")
        # A model without an end token still needs a number there: one outside the vocabulary.
        config["model"]["eos_token_id"] = state.eos or [config["model"]["vocab_size"]]
        config["model"]["pad_token_id"] = (state.eos or [0])[0]
        if state.method == "draft":
            config["model"]["draft"] = _config(state, folder, "draft")["model"]["decoder"]
            config["speculative"] = {"max_draft_tokens": state.num_draft_tokens}
        Path(folder, "genai_config.json").write_text(json.dumps(config))
        state.model = genai.Model(folder)
    return {"version": genai.__version__}


def _config(state: Any, folder: str, name: str) -> dict[str, Any]:
    model = Path(vars(state)[name])
    config: dict[str, Any] = json.loads((model / "genai_config.json").read_text())
    Path(folder, name).symlink_to(model)
    decoder = config["model"]["decoder"]
    decoder["filename"] = name + "/model.onnx"
    decoder["session_options"]["intra_op_num_threads"] = state.threads
    return config


def generate(state: Any) -> dict[str, Any]:
    parameters, sampling = genai.GeneratorParams(state.model), state.sampling
    parameters.set_search_options(max_length=len(state.prompt) + state.max_new_tokens)
    parameters.set_search_options(do_sample=bool(sampling["temperature"]))
    if sampling["temperature"]:
        search = {key: sampling[key] for key in ("temperature", "top_p", "top_k")}
        parameters.set_search_options(**search, random_seed=sampling["seed"])
    if state.method != "generate":
        keys = {"ngram_size": state.ngram} if state.method == "lookup" else {}
        parameters.set_speculative_options(max_draft_tokens=state.num_draft_tokens, **keys)
    start = time.perf_counter()
    generator = genai.Generator(state.model, parameters)
    generator.append_tokens(state.prompt)
    tokens, times = [], []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
        times.append(time.perf_counter() - start)
    reply = {"tokens": tokens, "times_s": times, "wall_s": times[-1], "rounds": len(tokens)}
    if state.method != "generate":
        stats = generator.get_speculative_stats()
        reply["proposed"] = stats["draft_tokens_proposed"]
        reply["accepted"] = stats["draft_tokens_accepted"]
        # Fallback steps are those in which a lookup found nothing.
        reply["rounds"] = min(len(tokens), stats["rounds"] + stats["standard_fallback_steps"])
        reply["draft_passes"] = stats["draft_forward_passes"] if state.method == "draft" else 0
    return reply


def score(state: Any) -> float:
    parameters = genai.GeneratorParams(state.model)
    parameters.set_search_options(max_length=len(state.tokens) + 1)
    generator = genai.Generator(state.model, parameters)
    generator.append_tokens(state.tokens)
    return nats_of(generator.get_output("logits")[0], state.tokens)
