"""Which keys every section of the configuration has, and which values they take.

Parts (source, policy, verifier) have no table: their constructors' signatures are the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

_LONGEST_STOP = 200


@dataclass(frozen=True, slots=True)
class Rule:
    """What one value must be.

    Attributes:
        expects: completes the sentence "it must be ...".
        test: whether a value is.
    """

    expects: str
    test: Callable[[object], bool]


def whole(minimum: int, *, optional: bool = False, off: bool = False) -> Rule:
    """A whole number of at least ``minimum``, or None where ``optional``; ``off``: 0 is off."""

    def test(value: object) -> bool:
        if value is None:
            return optional
        return isinstance(value, int) and not isinstance(value, bool) and value >= minimum

    also = " or null" if optional else " (0 is off)" if off else ""
    return Rule(f"a whole number of at least {minimum}{also}", test)


def number(expects: str, test: Callable[[float], bool], *, optional: bool = False) -> Rule:
    """A number for which ``test`` holds; or None, where it is ``optional``."""

    def fits(value: object) -> bool:
        if value is None:
            return optional
        return isinstance(value, int | float) and not isinstance(value, bool) and test(float(value))

    return Rule(expects, fits)


def one_of(*words: str) -> Rule:
    """One of some words."""
    return Rule(f"one of {', '.join(words)}", lambda v: v in words)


def text(*, optional: bool = False) -> Rule:
    """A text that is not empty."""
    expects = "a text that is not empty" + (" or null" if optional else "")
    return Rule(expects, lambda v: (v is None and optional) or (isinstance(v, str) and v != ""))


def _is_stop_list(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, str) and 0 < len(item) <= _LONGEST_STOP for item in value
    )


def _is_names(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value))


def _is_groups(value: object) -> bool:
    return value is None or (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in value)
    )


def _numbers(value: object, low: float, high: float) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(v, int | float) and low <= v <= high for v in value)
    )


_SHARES = Rule("a list of numbers between 0 and 1", lambda v: _numbers(v, 0.0, 1.0))
FLAG = Rule("true or false", lambda v: isinstance(v, bool))
DTYPES = ("float64", "float32", "bfloat16", "float16")

TOP: Mapping[str, Rule] = {
    "max_new_tokens": whole(1),
    "stop_strings": Rule(f"a list of texts of 1 to {_LONGEST_STOP} characters", _is_stop_list),
    "ignore_eos": FLAG,
    "seed": whole(0),
    "batch_size": whole(1),
    "prefill_chunk": whole(1),
    "trace": FLAG,
    "threads": whole(1, optional=True),
    "record": FLAG,
    "output_dir": text(optional=True),
}
"""Keys outside any section."""

COMPARE: Mapping[str, Rule] = {
    "repeats": whole(1),
    "curve_profile": text(),
    "cross_profile": text(optional=True),
    "curve_replay": FLAG,
}
"""Further keys of ``specdec compare``, ``strategies`` apart."""

_TITLES = {"name": text(), "title": text(), "baseline": FLAG}
_MODEL = {
    "dtype": one_of(*DTYPES),
    "device": Rule(
        "auto, cpu, mps, cuda or cuda:NUMBER",
        lambda v: (
            v in ("auto", "cpu", "mps", "cuda")
            or (isinstance(v, str) and v.startswith("cuda:") and v[5:].isdigit())
        ),
    ),
    "attention": one_of("auto", "dense", "two_level", "triton", "flash", "flex"),
    "graphs": one_of("off", "auto", "cuda", "replay"),
    "kernels": one_of("torch", "triton"),
    "compile": FLAG,
    "quantization": one_of("none", "int8", "int4"),
}

_EXIT = {
    "exit_layer": whole(1, optional=True),
    "exit_head": one_of("norm", "transformer"),
}

_PROFILED = {
    "profile": text(),
    "scale": number("a number above 0", lambda v: 0 < v < 1e9),
}

SECTIONS: Mapping[tuple[str, str], Mapping[str, Rule]] = {
    ("strategy", "parts"): _TITLES,
    ("strategy", "hf"): {
        **_TITLES,
        "method": one_of("hf_generate", "hf_assisted", "hf_prompt_lookup"),
        "options": Rule("a mapping", lambda v: isinstance(v, dict)),
    },
    ("sampling", ""): {
        "temperature": number("a number of at least 0 (0 is greedy)", lambda v: 0 <= v < 1e6),
        "top_k": whole(0, off=True),
        "top_p": number("above 0 and at most 1 (1 is off)", lambda v: 0 < v <= 1),
        "no_repeat_ngram": whole(0, off=True),
    },
    ("serving", ""): {
        "feeding": one_of("dynamic", "micro_batches", "iteration"),
        "prefill": one_of("mixed", "first"),
        "arrivals": text(),
        "rate_per_s": number("a number above 0 or null", lambda v: 0 < v < 1e9, optional=True),
        "kv_tokens": whole(1, optional=True),
        "block_tokens": whole(1),
    },
    ("data", ""): {
        "name": text(),
        "limit": whole(1, optional=True),
        "path": text(optional=True),
        "field": text(optional=True),
        "template": text(optional=True),
        "subset": text(optional=True),
        "sets": Rule("null or a list of data sets", _is_names),
        "origin": one_of("local", "hub"),
        "sample_seed": whole(0, optional=True),
        "chat": one_of("auto", "never", "always"),
        "max_prompt_tokens": whole(1, optional=True),
        "truncation": one_of("error", "left"),
    },
    ("clock", "measured"): {},
    ("clock", "simulated"): _PROFILED,
    ("clock", "paced"): _PROFILED,
    ("logger", "none"): {},
    ("logger", "wandb"): {
        "project": text(),
        "mode": one_of("offline", "online", "disabled"),
    },
    ("model", "pretrained"): {
        "target": text(),
        "draft": text(optional=True),
        "ngram": text(optional=True),
        "exit_heads": text(optional=True),
        **_EXIT,
        **_MODEL,
    },
    ("model", "synthetic"): {
        "vocab_size": whole(256),
        "num_layers": whole(1),
        "weights": _SHARES,
        "top1": _SHARES,
        "decay": Rule("a list of numbers above 0", lambda v: _numbers(v, 1e-9, 100.0)),
        "miss": _SHARES,
        "seed": whole(0),
    },
    ("model", "replay"): {
        "record": text(),
        "method": text(optional=True),
        "num_layers": whole(1),
        "seed": whole(0),
    },
    ("model", "random"): {
        "family": text(),
        "num_layers": whole(1),
        "draft_layers": whole(1),
        "hidden_size": whole(8),
        "num_heads": whole(1),
        "vocab_size": whole(2),
        "max_positions": whole(2),
        "seed": whole(0),
        **_EXIT,
        **_MODEL,
    },
    ("executor", "LocalExecutor"): {},
    ("executor", "EarlyExitExecutor"): {"stages": whole(1, optional=True)},
    ("executor", "PipelineExecutor"): {
        "stages": whole(1, optional=True),
        "groups": Rule("null or a list of device counts, one per stage", _is_groups),
        "split": one_of("even", "balanced"),
        "target_degree": whole(1, optional=True),
        "draft_degree": whole(1, optional=True),
        "shared": FLAG,
        "transport": one_of("in_process", "distributed"),
        "timeout_s": number("a number of seconds of at least 1", lambda v: 1 <= v < 1e6),
    },
}
"""(section, kind) -> keys besides ``kind``; the executor's kind is its class."""
