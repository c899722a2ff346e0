"""Decodes with ONNX Runtime GenAI, run by that runtime's own Python; see ``RivalOutput``."""

import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime_genai as genai
from serve import nats_of, serve

STATE: dict[str, Any] = {}


def convert(model: str, folder: str, site: str) -> dict[str, Any]:
    """Converts a model folder to ONNX; ``site``: site-packages with torch and transformers."""
    sys.path.append(site)  # the environment's own packages come first
    words = ["-i", model, "-o", folder, "-p", "fp32", "-e", "cpu", "-c", f"{folder}/cache"]
    sys.argv = ["builder", *words]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    return {"folder": folder}


def open_(
    target: str, draft: str | None, method: str, threads: int, eos: list[int], options: Any
) -> dict[str, Any]:
    """Loads target and draft from a temporary folder of links, with one genai_config.json."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(target, folder, "target", threads)
        # A model without an end token still needs a number there: one outside the vocabulary.
        config["model"]["eos_token_id"] = eos or [config["model"]["vocab_size"]]
        config["model"]["pad_token_id"] = (eos or [0])[0]
        if method == "draft":
            drafting = _config(str(draft), folder, "draft", threads)
            config["model"]["draft"] = drafting["model"]["decoder"]
            config["speculative"] = {"max_draft_tokens": options["num_draft_tokens"]}
        Path(folder, "genai_config.json").write_text(json.dumps(config))
        STATE.update(model=genai.Model(folder), method=method, options=options)
    return {"version": genai.__version__}


def _config(model: str, folder: str, name: str, threads: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(model, "genai_config.json").read_text())
    Path(folder, name).symlink_to(model)
    decoder = config["model"]["decoder"]
    decoder["filename"] = name + "/model.onnx"
    decoder["session_options"]["intra_op_num_threads"] = threads
    return config


def generate(prompt: list[int], max_new_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    parameters = genai.GeneratorParams(STATE["model"])
    search: dict[str, Any] = {"do_sample": bool(sampling["temperature"])}
    if search["do_sample"]:
        search |= {key: sampling[key] for key in ("temperature", "top_p", "top_k")}
        search["random_seed"] = sampling["seed"]
    parameters.set_search_options(max_length=len(prompt) + max_new_tokens, **search)
    method, options = STATE["method"], STATE["options"]
    if method != "generate":
        keys = {"ngram_size": options["ngram"]} if method == "lookup" else {}
        parameters.set_speculative_options(max_draft_tokens=options["num_draft_tokens"], **keys)
    start = time.perf_counter()
    generator = genai.Generator(STATE["model"], parameters)
    generator.append_tokens(prompt)
    tokens, times = [], []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
        times.append(time.perf_counter() - start)
    reply: dict[str, Any] = {"tokens": tokens, "times_s": times, "rounds": len(tokens)}
    reply["wall_s"] = time.perf_counter() - start
    if method != "generate":
        stats = generator.get_speculative_stats()
        reply["proposed"] = stats["draft_tokens_proposed"]
        reply["accepted"] = stats["draft_tokens_accepted"]
        # Fallback steps are those in which a lookup found nothing.
        reply["rounds"] = min(len(tokens), stats["rounds"] + stats["standard_fallback_steps"])
        reply["draft_passes"] = stats["draft_forward_passes"] if method == "draft" else 0
    return reply


def score(tokens: list[int]) -> dict[str, float]:
    parameters = genai.GeneratorParams(STATE["model"])
    parameters.set_search_options(max_length=len(tokens) + 1)
    generator = genai.Generator(STATE["model"], parameters)
    generator.append_tokens(tokens)
    return nats_of(generator.get_output("logits")[0], tokens)


if __name__ == "__main__":
    serve(convert, open_, generate, score)
