"""Decodes with llama.cpp, run by the Python that has its package xllamacpp.

Requests go over HTTP to llama.cpp's own server in this process, as only that returns token ids.
Times are those of the server.
"""

import json
import urllib.error
import urllib.request
from typing import Any

import xllamacpp as llama
from serve import serve

CONTEXT = 8192  # tokens of a prompt and its output
PLAIN = {"cache_prompt": False, "samplers": ["temperature", "top_k", "top_p"]}
STATE: dict[str, Any] = {}


def open_(
    target: str, draft: str | None, method: str, threads: int, eos: list[int], options: Any
) -> dict[str, Any]:
    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = target, CONTEXT, 1
    params.fit_params, params.ui, params.cache_ram_mib, params.verbosity = False, False, 0, 0
    speculative = params.speculative
    kinds = {"generate": "NONE", "draft": "DRAFT_SIMPLE", "ngram": "NGRAM_SIMPLE"}
    kind = f"COMMON_SPECULATIVE_TYPE_{kinds[method]}"
    speculative.types = [llama.common_speculative_type[kind]]
    if method == "draft":
        speculative.draft.mparams.path = draft
        speculative.draft.n_max = options["num_draft_tokens"]
        speculative.draft.p_min = options["p_min"]
    elif method == "ngram":
        speculative.ngram_simple.size_m = options["num_draft_tokens"]
        speculative.ngram_simple.size_n = options["ngram"]
    for owner in (params, speculative.draft):
        owner.cpuparams.n_threads = owner.cpuparams_batch.n_threads = threads
    server = llama.Server(params)
    STATE.update(server=server, url=server.listening_address, eos=eos, method=method)
    quantization = _lines("/v1/models", None)[0]["data"][0]["meta"]["ftype"]
    return {"version": f"(xllamacpp {llama.__version__})", "quantization": quantization}


def generate(prompt: list[int], max_new_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": max_new_tokens, "return_tokens": True, **sampling}
    body |= {"ignore_eos": not STATE["eos"], "stream": True, "timings_per_token": True, **PLAIN}
    *parts, end = _answers(body)
    pairs = [(token, _seconds(part)) for part in parts for token in part["tokens"]]
    if len(pairs) != end["tokens_predicted"]:
        pairs = _with_hidden(pairs, _answers({**body, "stream": False})[0]["tokens"], _seconds(end))
    tokens, times = ([pair[i] for pair in pairs] for i in (0, 1))
    proposed, accepted = (end["timings"].get(key, 0) for key in ("draft_n", "draft_n_accepted"))
    return {
        "tokens": tokens,
        "times_s": times,
        "wall_s": _seconds(end),
        "rounds": len(tokens) - accepted,
        "proposed": proposed,
        "accepted": accepted,
        "draft_passes": proposed if STATE["method"] == "draft" else 0,
    }


def score(tokens: list[int]) -> dict[str, float]:
    """Returns the negative log-likelihood of all tokens but the first. Each is decoded alone, with
    a bias that makes it the sampled token; the server states its log probability without the bias.
    """
    body = {"n_predict": 1, "n_probs": 1, "temperature": 0, **PLAIN, "cache_prompt": True}
    nats = 0.0
    for i, token in enumerate(tokens[1:], 1):
        (answer,) = _answers({**body, "prompt": tokens[:i], "logit_bias": [[token, 1e6]]})
        (sampled,) = answer["completion_probabilities"]
        if sampled["id"] != token:
            raise ValueError(f"llama.cpp sampled {sampled['id']} in spite of a bias on {token}")
        nats -= sampled["logprob"]
    return {"nats": nats}


def _seconds(part: dict[str, Any]) -> float:
    return float(part["timings"]["prompt_ms"] + part["timings"]["predicted_ms"]) / 1000


def _with_hidden(shown: list[Any], tokens: list[int], end_s: float) -> list[tuple[int, float]]:
    """Adds tokens that the stream omits (they end within a character), at the next shown time."""
    rest, pairs = list(shown), []
    for token in tokens:
        pairs.append((token, rest[0][1] if rest else end_s))
        if rest and rest[0][0] == token:
            rest.pop(0)
    if rest:
        raise ValueError("llama.cpp decoded a request differently the second time")
    return pairs


def _answers(body: dict[str, Any]) -> list[dict[str, Any]]:
    return _lines("/completion", json.dumps(body).encode())


def _lines(path: str, data: bytes | None) -> list[dict[str, Any]]:
    request = urllib.request.Request(STATE["url"] + path, data)  # noqa: S310 - our own server
    try:
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            return [json.loads(line.removeprefix(b"data: ")) for line in answer if line.strip()]
    except urllib.error.HTTPError as error:
        raise ValueError(error.read().decode()) from error


if __name__ == "__main__":
    serve(open_, generate, score)
