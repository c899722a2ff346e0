"""Decodes with ONNX Runtime GenAI, run by that runtime's own Python."""

import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from typing import Any

import onnxruntime_genai as genai
from serve import nats_of, serve

STATE: dict[str, Any] = {}


def convert(model: str, folder: str, site: str) -> dict[str, Any]:
    """Converts a model folder; ``site`` is where torch and transformers are found."""
    sys.path.append(site)  # the environment's own packages come first
    words = ["-i", model, "-o", folder, "-p", "fp32", "-e", "cpu", "-c", f"{folder}/cache"]
    sys.argv = ["builder", *words]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    return {"folder": folder}


def open_(
    target: str, draft: str | None, method: str, threads: int, eos: list[int], options: Any
) -> dict[str, Any]:
    """Loads the models from a temporary folder of links, whose configuration names both."""
    folder = tempfile.mkdtemp()
    config = _config(target, folder, "target", threads)
    # A model without an end token still needs a number there: one outside the vocabulary.
    config["model"]["eos_token_id"] = eos or [config["model"]["vocab_size"]]
    config["model"]["pad_token_id"] = (eos or [0])[0]
    if method == "draft":
        drafting = _config(str(draft), folder, "draft", threads)
        config["model"]["draft"] = drafting["model"]["decoder"]
        config["speculative"] = {"max_draft_tokens": options["num_draft_tokens"]}
    with open(os.path.join(folder, "genai_config.json"), "w") as file:
        json.dump(config, file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if os.path.exists(os.path.join(target, name)):
            shutil.copy(os.path.join(target, name), folder)
    STATE.update(model=genai.Model(folder), method=method, options=options)
    shutil.rmtree(folder)
    return {"version": genai.__version__}


def _config(model: str, folder: str, name: str, threads: int) -> dict[str, Any]:
    with open(os.path.join(model, "genai_config.json")) as file:
        config: dict[str, Any] = json.load(file)
    os.mkdir(os.path.join(folder, name))
    for item in os.listdir(model):
        if item.startswith("model.onnx"):
            source, link = os.path.join(model, item), os.path.join(folder, name, item)
            try:
                os.link(source, link)
            except OSError:
                shutil.copy(source, link)
    decoder = config["model"]["decoder"]
    decoder["filename"] = name + "/model.onnx"
    decoder["session_options"]["intra_op_num_threads"] = threads
    return config


def generate(prompt: list[int], max_new_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """Decodes one prompt; the reply has the fields of ``specdec.rivals.RivalOutput``."""
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
