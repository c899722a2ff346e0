"""Reads acceptance logs: the one reader of all commands that take measured acceptance.

docs/calibration.md lists the formats. ``_READERS`` finds the reader of a JSON object by a key,
wherever in the document the object is. Sources of the engines' keys: vLLM #48915 and its log line
``SpecDecoding metrics``; SGLang #11144 and #33518; llama.cpp #12603 (``timings``) and #24536 (its
log line). All histograms count accepted draft tokens, without the target's own.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specdec.data.files import read_text
from specdec.errors import UserError
from specdec.files import parse_json
from specdec.fitting.requests import (
    AcceptanceLog,
    RequestLog,
    of_histogram,
    of_matches,
    of_passes,
    of_rates,
    of_totals,
)
from specdec.types import IntArray

Lengths = Literal["auto", "emitted", "accepted"]
Node = Mapping[str, Any]

FORMATS = (
    "vLLM (acceptance_histogram, per_step_accepted, SpecDecoding lines), SGLang (spec_verify_ct,"
    " spec_accept_histogram), llama.cpp (draft_n, draft acceptance lines), lists of accepted"
    " lengths (accept_lengths, pre_num, accepted_tokens, acc_len, plain), acceptance by position"
    " (acceptance_rate_by_position, accepted_by_pos), match sequences of 1, 0 and ?"
)

_MATCHES = re.compile(r"[01?]{8,}")
_MOST = 4096  # most tokens of a pass
_VLLM_LINE = re.compile(
    r"SpecDecoding metrics:(?:.*Drafted:\s*(\d+))?.*Per-position acceptance rate:\s*([\d.,\s]+)"
)
_LLAMA_LINE = re.compile(
    r"draft acceptance(?: rate)?\s*=\s*[\d.]+\s*\(\s*(\d+) accepted\s*/\s*(\d+) generated\)"
    r"(?:, mean acceptance length =\s*([\d.]+))?"
    r"(?:, acceptance rate per position = \(([\d.,\s]+)\))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a log. If it has several lists of lengths, ``method`` is an index (None: -1)."""

    method: str | None = None  # which of several pairs or methods in a file: a part of its name
    lengths: Lengths = "auto"  # whether lists count the target's own token; auto: if none is 0
    draft_tokens: int | None = None  # verified draft tokens per pass if the log does not say


def read_log(path: str | Path, options: ReadOptions | None = None) -> AcceptanceLog:
    file, options = Path(path).expanduser(), options or ReadOptions()
    if not file.is_file():
        what = "matches no file" if has_magic(str(path)) else "is not a file"
        raise UserError(f"{str(path)!r} {what}: name an acceptance log")
    if not (text := read_text(file).strip()):
        raise UserError(f"{str(path)!r} is empty: name an acceptance log")
    try:
        requests = _chosen([*_requests(text, options)], options.method)
    except UserError as error:
        raise UserError(f"{str(path)!r}: {error}") from error
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise UserError(
            f"{str(path)!r} has acceptance in a form that cannot be read"
            f" ({type(error).__name__}: {error}); known are {FORMATS}"
        ) from error
    if not requests:
        raise UserError(f"{str(path)!r} has no acceptance in a format that is known: {FORMATS}")
    return AcceptanceLog(path=str(path), requests=tuple(requests))


def _requests(text: str, options: ReadOptions) -> Iterator[RequestLog]:
    whole, lines = _json(text), [line.strip().removeprefix("data:") for line in text.splitlines()]
    lists: list[list[int]] = []
    for value in [_json(line) or line for line in lines] if whole is None else [whole]:
        plain = _plain_lists(value)
        lists += plain
        yield from [] if plain else _found(value, "", options)
    own = _own_token([length for part in lists for length in part], options)
    note = "with the target's own token, since none is 0" if own else "without it, since one is 0"
    notes = (f"lengths of lists taken {note}",) if options.lengths == "auto" else ()
    for part in filter(None, lists):
        yield replace(
            of_passes(_whole(part, "the list", own) - own, options.draft_tokens), notes=notes
        )


def _json(text: str) -> Any:
    try:
        return parse_json(text) if text.lstrip()[:1] in ("{", "[") else None
    except ValueError:
        return None


def _plain_lists(value: Any) -> list[list[int]]:
    if isinstance(value, str):
        plain = re.fullmatch(r"[\d, ]+", value) and not _MATCHES.fullmatch(value)
        return [[int(part) for part in re.findall(r"\d+", value)]] if plain else []
    parts = list(value.values() if isinstance(value, Mapping) else value)
    if isinstance(value, list) and not any(isinstance(part, list) for part in parts):
        parts = [parts]
    lists = parts if all(isinstance(part, list) for part in parts) else []
    known = isinstance(value, Mapping) and value.keys() & _READERS.keys()
    return [] if known or any(type(n) is not int for part in lists for n in part) else lists


def _found(value: Any, name: str, options: ReadOptions) -> Iterator[RequestLog]:
    """Yields the requests in a JSON value; ``name`` is the key of the nearest enclosing object."""
    if isinstance(value, str) and _MATCHES.fullmatch(value):
        yield replace(of_matches(value), method=name)
    elif isinstance(value, str):
        yield from _found(_line(value), name, options)
    elif isinstance(value, list):
        for part in value:
            yield from _found(part, name, options)
    elif isinstance(value, Mapping):
        for key, reader in _READERS.items():
            if value.get(key) and (found := reader(value, options)) is not None:
                yield replace(found, method=name) if key == "acc_len" else found
                return
        for key, part in value.items():
            yield from _found(part, name if isinstance(part, str) else key, options)


def _chosen(requests: list[RequestLog], method: str | None) -> list[RequestLog]:
    methods = list(dict.fromkeys(request.method for request in requests))
    parts = [name for name in methods if not name or (method or "") in name]
    fitting = [name for name in methods if name == method] or parts
    if len(fitting) != 1 and methods:
        raise UserError(
            f"method={method} fits {len(fitting)} of several pairs or methods: choose one of"
            f" {', '.join(map(repr, methods[:24]))} (a part of the name is enough)"
        )
    return [request for request in requests if request.method in fitting]


def _line(line: str) -> Node | None:
    """Converts a log line of vLLM or llama.cpp to an object for ``_READERS``; None for others."""
    if found := _VLLM_LINE.search(line):
        drafted, mean, rates = found[1], 0.0, found[2]
    elif found := _LLAMA_LINE.search(line):
        drafted, mean, rates = found[2], float(found[3] or 0.0), found[4]
    else:
        return None
    passes = int(found[1]) / (mean - 1.0) if mean > 1.0 else 0.0
    if rates:
        shares = [float(share) for share in re.findall(r"[\d.]+", rates)]
        # Lines without totals get equal weight.
        passes = passes or (int(drafted) / len(shares) if drafted else 1.0)
        return {"acceptance_rate_by_position": shares, "speculation_steps": passes}
    accepted = int(found[1])
    return {"draft_n": int(drafted), "draft_n_accepted": accepted, "predicted_n": accepted + passes}


def _vllm(node: Node, options: ReadOptions) -> RequestLog:
    longest = node.get("num_spec_tokens") or options.draft_tokens
    if node.get("per_step_accepted"):
        return of_passes(_whole(node["per_step_accepted"], "per_step_accepted"), longest)
    return of_histogram(node["acceptance_histogram"], longest)


def _sglang(node: Node, options: ReadOptions) -> RequestLog:
    """Reads SGLang's ``meta_info``; older servers name accepted and drafted totals differently."""
    passes = node["spec_verify_ct"]
    accepted = node.get("spec_num_correct_drafts", node.get("spec_accept_token_num"))
    drafted = node.get("spec_num_proposed_drafts", node.get("spec_draft_token_num"))
    longest = max(round(drafted / passes), 1) if drafted else options.draft_tokens
    for key in ("spec_correct_drafts_histogram", "spec_accept_histogram"):
        if node.get(key):
            return of_histogram(node[key], longest)
    accepted = node["completion_tokens"] - passes if accepted is None else accepted
    return of_totals(max(accepted, 0), passes * (longest or 0), passes, longest)


def _sglang_lengths(node: Node, _: ReadOptions) -> RequestLog:
    """Reads SGLang's lists of lengths, which count the target's own token unless one is 0."""
    accepted = _whole(node["accept_lengths"], "accept_lengths")
    own = int(accepted.min() > 0)
    return of_passes(accepted - own, _whole(node["verify_lengths"], "verify_lengths") - own)


def _llama_cpp(node: Node, options: ReadOptions) -> RequestLog:
    accepted = node["draft_n_accepted"]
    passes = max(node.get("predicted_n", 0) - accepted, 0)
    return of_totals(accepted, node["draft_n"], passes, options.draft_tokens)


def _lengths(key: str, node: Node, options: ReadOptions) -> RequestLog | None:
    values, turns = node[key], node.get("decoding_steps", ())
    if not isinstance(values, list):
        return None  # a total beside other keys
    if all(isinstance(part, list) for part in values):
        values = values[int(options.method or -1)]
    if key == "pre_num":  # its first entry is the token from the prefill
        values, turns = values[1:], ()
    own = _own_token(values, options)
    return of_passes(_whole(values, key, own) - own, options.draft_tokens, turns)


def _trace(node: Node, options: ReadOptions) -> RequestLog:
    """Reads ``acc_len``, the number of tokens that a pass from each position emits. Keeps the
    passes that one decoding makes, with at most ``draft_tokens`` accepted tokens each.
    """
    emitted = _whole(node["acc_len"], "acc_len", 1)
    longest = options.draft_tokens or max(int(emitted.max()) - 1, 1)
    accepted, at = [], 0
    while at < len(emitted):
        accepted.append(min(int(emitted[at]) - 1, longest))
        at += accepted[-1] + 1
    return of_passes(np.array(accepted), longest)


def _by_position(node: Node, _: ReadOptions) -> RequestLog | None:
    if "acceptance_rate_by_position" in node:
        return of_rates(node["speculation_steps"], node["acceptance_rate_by_position"])
    counts, passes = node["accepted_by_pos"], node.get("drafts")
    counts = json.loads(counts) if isinstance(counts, str) else counts
    if not counts or not passes:
        return None  # a run without speculation
    found = of_rates(passes, [counts[at] / passes for at in sorted(counts, key=int)])
    return replace(found, method=f"{node.get('model', '')} {node.get('method', '')}".strip())


_READERS: dict[str, Callable[[Node, ReadOptions], RequestLog | None]] = {
    "per_step_accepted": _vllm,
    "acceptance_histogram": _vllm,
    "verify_lengths": _sglang_lengths,
    "spec_verify_ct": _sglang,
    "draft_n": _llama_cpp,
    "acceptance_rate_by_position": _by_position,
    "accepted_by_pos": _by_position,
    "acc_len": _trace,
    **{key: partial(_lengths, key) for key in ("accept_lengths", "pre_num", "accepted_tokens")},
}
"""Key -> reader; the first key that an object has decides."""


def _own_token(lengths: list[int], options: ReadOptions) -> int:
    """Returns 1 if the lengths count the target's own token, otherwise 0."""
    if options.lengths == "emitted" and 0 in lengths:
        raise UserError(
            "lengths=emitted counts the target's own token, so no length can be 0; use"
            " lengths=accepted"
        )
    return int(options.lengths != "accepted" and 0 not in lengths)


def _whole(values: Any, key: str, least: int = 0) -> IntArray:
    if not values or not all(type(v) is int and least <= v <= _MOST for v in values):
        raise UserError(f"{key} must be a list of whole numbers from {least} to {_MOST}")
    return np.array(values)
