"""Keys, types and bounds of the sections of the configuration that have fixed keys.

Source, policy and verifier, and every section with a ``_target_``, are not listed here: the
signature of their class is their schema (``parts.build``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from specdec.parts.fields import Count, Model, PositiveShare, Share, expects, model_of


def _rises(counts: list[int]) -> list[int]:
    assert all(a < b for a, b in pairwise(counts))
    return counts


Text = Annotated[str, Field(min_length=1)]
Index = Annotated[int, Field(ge=0)]
Limit = Annotated[int, Field(ge=0), expects("it must be a whole number of at least 0 (0 is off)")]
Positive = Annotated[float, Field(gt=0, lt=1e9)]
StopString = Annotated[str, Field(min_length=1, max_length=200)]
Shares = Annotated[list[Share], Field(min_length=1)]
Counts = Annotated[
    list[Count],
    Field(min_length=1),
    AfterValidator(_rises),
    expects("it must be a list of increasing whole numbers of at least 1"),
]

TOP: dict[str, Any] = {
    "max_new_tokens": Count,
    "stop_strings": list[StopString],
    "ignore_eos": bool,
    "seed": Index,
    "batch_size": Count,
    "prefill_chunk": Count,
    "trace": bool,
    "threads": Count | None,
    "record": bool,
    "output_dir": Text | None,
}
"""Keys outside any section."""

COMPARE: dict[str, Any] = {
    "strategies": list[str],
    "repeats": Count,
    "curve_profile": Text,
    "cross_profile": Text | None,
    "curve_replay": bool,
}
"""Further keys of ``specdec compare``."""

_TITLES = {"name": Text, "title": Text, "baseline": bool}
_PROFILED = {"profile": Text, "scale": Positive}
_LOADED = {
    "exit_layer": Count | None,
    "exit_head": Literal["norm", "transformer"],
    "dtype": Literal["float64", "float32", "bfloat16", "float16"],
    "device": Annotated[
        str,
        Field(pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$"),
        expects("it must be auto, cpu, mps, cuda or cuda:NUMBER"),
    ],
    "attention": Literal["auto", "dense", "two_level", "triton", "flash", "flex"],
    "graphs": Literal["off", "auto", "cuda", "replay"],
    "kernels": Literal["torch", "triton"],
    "compile": bool,
    "quantization": Literal["none", "int8", "int4"],
}

_SECTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("strategy", "parts"): _TITLES,
    ("strategy", "hf"): {
        **_TITLES,
        "method": Literal["hf_generate", "hf_assisted", "hf_prompt_lookup"],
        "options": dict[str, Any],
    },
    ("sampling", ""): {
        "temperature": Annotated[float, Field(ge=0, lt=1e6)],
        "top_k": Limit,
        "top_p": PositiveShare,
        "no_repeat_ngram": Limit,
    },
    ("serving", ""): {
        "feeding": Literal["dynamic", "micro_batches", "iteration"],
        "prefill": Literal["mixed", "first"],
        "arrivals": Text,
        "rate_per_s": Positive | None,
        "kv_tokens": Count | None,
        "block_tokens": Count,
    },
    ("data", ""): {
        "name": Text,
        "limit": Count | None,
        "path": Text | None,
        "field": Text | None,
        "template": Text | None,
        "subset": Text | None,
        "sets": list[str] | None,
        "origin": Literal["local", "hub"],
        "sample_seed": Index | None,
        "chat": Literal["auto", "never", "always"],
        "max_prompt_tokens": Count | None,
        "truncation": Literal["error", "left"],
    },
    ("clock", "measured"): {},
    ("clock", "simulated"): _PROFILED,
    ("clock", "paced"): _PROFILED,
    ("logger", "none"): {},
    ("logger", "wandb"): {"project": Text, "mode": Literal["offline", "online", "disabled"]},
    ("model", "pretrained"): {
        "target": Text,
        "draft": Text | None,
        "ngram": Text | None,
        "exit_heads": Text | None,
        **_LOADED,
    },
    ("model", "random"): {
        "family": Text,
        "num_layers": Count,
        "draft_layers": Count,
        "hidden_size": Annotated[int, Field(ge=8)],
        "num_heads": Count,
        "vocab_size": Annotated[int, Field(ge=2)],
        "max_positions": Annotated[int, Field(ge=2)],
        "seed": Index,
        **_LOADED,
    },
    ("model", "synthetic"): {
        "vocab_size": Annotated[int, Field(ge=256)],
        "num_layers": Count,
        "weights": Shares,
        "top1": Shares,
        "decay": Annotated[list[Annotated[float, Field(gt=0, le=100)]], Field(min_length=1)],
        "miss": Shares,
        "seed": Index,
    },
    ("model", "replay"): {
        "record": Text,
        "method": Text | None,
        "num_layers": Count,
        "seed": Index,
    },
    ("executor", "specdec.executors.LocalExecutor"): {},
    ("executor", "specdec.executors.EarlyExitExecutor"): {"stages": Count | None},
    ("executor", "specdec.executors.PipelineExecutor"): {
        "stages": Count | None,
        "groups": Annotated[list[Count], Field(min_length=1)] | None,
        "split": Literal["even", "balanced"],
        "target_degree": Count | None,
        "draft_degree": Count | None,
        "shared": bool,
        "transport": Literal["in_process", "distributed"],
        "timeout_s": Annotated[float, Field(ge=1, lt=1e6)],
    },
    ("profiling", ""): {
        "name": Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9_-]+$"),
            expects("it must be a name of letters, digits, - and _"),
        ],
        "use": Text | None,
        "tokens": Counts,
        "repeats": Count,
        "context": Count,
        "transfer": bool,
        "widths": Counts,
        "children": Counts,
        "groups": Counts,
        "devices": Annotated[int, Field(ge=2)] | None,
        "targets": Counts,
        "bs": Counts,
        "w": Counts,
    },
}

SECTIONS: dict[tuple[str, str], Model] = {
    section: model_of({key: (hint, True) for key, hint in keys.items()})
    for section, keys in _SECTIONS.items()
}
"""(section, its ``kind`` or ``_target_``) -> model of its other keys; "" where it has no kinds."""
