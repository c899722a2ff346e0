"""Decodes with llama.cpp, run by the Python that has its package xllamacpp.

Requests go over HTTP to llama.cpp's own server in this process, as only that returns token ids.
Times are those of the server.
"""

import json
import urllib.error
import urllib.request
from typing import Any

import xllamacpp as llama

CONTEXT = 8192  # tokens of a prompt and its output
PLAIN = {"cache_prompt": False, "samplers": ["temperature", "top_k", "top_p"]}


def load(state: Any) -> dict[str, str]:
    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = state.target, CONTEXT, 1
    params.fit_params, params.ui, params.cache_ram_mib, params.verbosity = False, False, 0, 0
    kinds = {"generate": "NONE", "draft": "DRAFT_SIMPLE", "ngram": "NGRAM_SIMPLE"}
    kind = f"COMMON_SPECULATIVE_TYPE_{kinds[state.method]}"
    params.speculative.types = [llama.common_speculative_type[kind]]
    if state.method == "draft":
        params.speculative.draft.mparams.path = state.draft
        params.speculative.draft.n_max = state.num_draft_tokens
        params.speculative.draft.p_min = state.p_min
    elif state.method == "ngram":
        params.speculative.ngram_simple.size_m = state.num_draft_tokens
        params.speculative.ngram_simple.size_n = state.ngram
    for owner in (params, params.speculative.draft):
        owner.cpuparams.n_threads = owner.cpuparams_batch.n_threads = state.threads
    state.server = llama.Server(params)
    quantization = _lines(state, "/v1/models")[0]["data"][0]["meta"]["ftype"]
    return {"version": f"(xllamacpp {llama.__version__})", "quantization": quantization}


def generate(state: Any) -> dict[str, Any]:
    body = {"prompt": state.prompt, "n_predict": state.max_new_tokens, **state.sampling, **PLAIN}
    body |= {"return_tokens": True, "ignore_eos": not state.eos, "timings_per_token": True}
    tokens: list[int] = []
    times: list[float] = []
    for part in _lines(state, "/completion", {**body, "stream": True}):
        timings = part["timings"]
        wall = (timings["prompt_ms"] + timings["predicted_ms"]) / 1000
        tokens += part["tokens"]
        times += [wall] * (timings["predicted_n"] - len(times))
    if len(tokens) != len(times):  # the stream omits tokens that end within a character
        shown, (whole,) = tokens, _lines(state, "/completion", body)
        tokens = whole["tokens"]
        rest = iter(tokens)
        if len(tokens) != len(times) or not all(token in rest for token in shown):
            raise ValueError("llama.cpp decoded a request differently the second time")
    proposed, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    return {
        "tokens": tokens,
        "times_s": times,
        "wall_s": wall,
        "rounds": len(tokens) - accepted,
        "proposed": proposed,
        "accepted": accepted,
        "draft_passes": proposed if state.method == "draft" else 0,
    }


def score(state: Any) -> float:
    """Returns the negative log-likelihood of all tokens but the first. Each is decoded alone, with
    a bias that makes it the sampled token; the server states its log probability without the bias.
    """
    body = {"n_predict": 1, "n_probs": 1, "temperature": 0, **PLAIN, "cache_prompt": True}
    nats = 0.0
    for i, token in enumerate(state.tokens[1:], 1):
        body |= {"prompt": state.tokens[:i], "logit_bias": [[token, 1e6]]}
        (answer,) = _lines(state, "/completion", body)
        (sampled,) = answer["completion_probabilities"]
        if sampled["id"] != token:
            raise ValueError(f"llama.cpp sampled {sampled['id']} in spite of a bias on {token}")
        nats -= sampled["logprob"]
    return nats


def _lines(state: Any, path: str, body: Any = None) -> list[dict[str, Any]]:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(state.server.listening_address + path, data)  # noqa: S310
    try:
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            return [json.loads(line.removeprefix(b"data: ")) for line in answer if line.strip()]
    except urllib.error.HTTPError as error:
        raise ValueError(error.read().decode()) from error
