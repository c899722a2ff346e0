"""Records what every preset of this library's parts does, to the token, the count and the second.

    python -m tests.matrix.record_presets            (all presets)
    python -m tests.matrix.record_presets ar medusa  (these; the other records stay)

writes ``recorded_presets.json``, which ``test_recorded_presets.py`` compares with the present code.
Record again only where a change of a figure is meant, and say in the commit which and why.

Each preset is composed from its resolved configuration as `specdec run` does, and decodes a few
prompts on the simulated clock. What is made small: random float64 models, so that tokens are the
same on every machine; pipelines of ``STAGES`` stages; a profile that prices every kind of work and
every row. The target's later layers are weakened, so that drafts, exits and looked-up tokens are
often right, and often not. What is read of a run is in ``_of_run`` and ``_of_request`` alone.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.compose.workbench import Parts, compose
from specdec.config.job import run_job_of
from specdec.config.options import options, own_values
from specdec.executors.pipeline import PipelineExecutor
from specdec.pairs import RandomPair, build_pair
from specdec.runs.runners import sampling_params
from specdec.state import DecodeState, RequestState, StopRules
from tests.matrix.cells import constructed, option

FILE = Path(__file__).with_name("recorded_presets.json")
PROFILE = Path(__file__).with_name("recorded_profile.yaml")
COMMAND = "python -m tests.matrix.record_presets"

STAGES = 4
MAX_NEW_TOKENS = 24
PREFILL_CHUNK = 4  # the longer prompts take several steps to enter
SEED = 20
END = 8  # ends a request, also inside an accepted path
PROMPTS = {  # id -> tokens; the ids key the draws
    2: [5, 1, 4, 1, 5, 9, 2, 6, 5],
    11: [8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2],
    7: [3],
    4: [6, 6, 7],
    9: [1, 2, 3, 4, 1, 2, 3],
}
MODEL = {
    "num_layers": 8,
    "draft_layers": 7,
    "middle_layers": 7,
    "hidden_size": 32,
    "vocab_size": 64,
    "max_positions": 128,
    "exit_layer": 2,
    "seed": 7,
    "logit_scale": 4.0,  # peaked distributions: drafts are right when sampled, too
    "dtype": "float64",
    "device": "cpu",
}
STRONG_LAYERS, WEAKNESS = 2, 0.4  # of the further layers' output
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)")

Record = dict[str, str]
"""One run: what is counted -> the figures as text; names of a request's begin with its id."""


@dataclass(frozen=True, slots=True)
class Case:
    """How a preset is run: an option of ``sampling=``, and how many requests at a time."""

    sampling: str
    prompts: int
    batch_size: int


BATCHED = "batched"
CASES = {
    "greedy": Case("greedy", prompts=2, batch_size=1),
    "sampled": Case("t08", prompts=2, batch_size=1),
    BATCHED: Case("t08", prompts=5, batch_size=4),
}


@cache
def presets() -> tuple[str, ...]:
    """All presets in conf/strategy but those of transformers' own decoding."""
    kinds = {
        name: own_values(path)["strategy"]["kind"] for name, path in options("strategy").items()
    }
    return tuple(sorted(name for name, kind in kinds.items() if kind == "parts"))


@cache
def pair() -> RandomPair:
    found = build_pair({"kind": "random", **MODEL})
    assert isinstance(found, RandomPair)
    with torch.no_grad():
        for layer in found.target.model.layers[STRONG_LAYERS:]:
            layer.self_attn.o_proj.weight *= WEAKNESS
            layer.mlp.down_proj.weight *= WEAKNESS
    return found


@cache
def _resolved(preset: str) -> dict[str, Any]:
    clock = ["clock=simulated", f"clock.profile={PROFILE}"]
    model = ["model=random", f"model.middle_layers={MODEL['middle_layers']}"]
    config = run_job_of([f"strategy={preset}", *model, *clock, f"seed={SEED}"]).config
    config["model"].update(MODEL)
    if (config["executor"].get("stages") or 0) > STAGES:
        config["executor"]["stages"] = STAGES
    return config


def record(preset: str, case: str) -> Record:
    how = CASES[case]
    with constructed():
        parts = compose(deepcopy(_resolved(preset)), pair())
    state = parts.new_state()
    requests = [
        RequestState(
            request_id=number,
            prompt=np.array(tokens, np.int64),
            stop=StopRules(max_new_tokens=MAX_NEW_TOKENS, eos_ids=frozenset([END])),
            sampling=sampling_params(option("sampling", how.sampling)),
        )
        for number, tokens in list(PROMPTS.items())[: how.prompts]
    ]
    try:
        for _ in parts.decode(
            state, requests, batch_size=how.batch_size, prefill_chunk=PREFILL_CHUNK
        ):
            pass
        return _of_run(parts, state) | {
            f"{request.id} {name}": text
            for request in requests
            for name, text in _of_request(request).items()
        }
    finally:
        parts.executor.shutdown()


def _of_run(parts: Parts, state: DecodeState) -> Record:
    clock: Any = parts.clock
    stages = parts.executor.stages if isinstance(parts.executor, PipelineExecutor) else []
    found = {
        "clock_us": _us(clock.now()),
        "busy_us": " ".join(f"{rank}:{_us(s)}" for rank, s in sorted(clock.busy_s.items())),
        "drafted_us": " ".join(map(_us, (clock.drafted.total_s, clock.drafted.hidden_s))),
        "steps": str(state.step),
        "load": _counts(state.load),
        "executor": _counts(parts.executor.counters),
        "stage_rows": " ".join(str(stage.rows) for stage in stages),
        "source": _counts(parts.source.counters),
        "model_calls": _counts_of(parts.meter.calls),
    }
    return {name: text for name, text in found.items() if text}


def _of_request(request: RequestState) -> Record:
    after = [_us(b - a) for a, b in pairwise([0.0, *request.emitted_s])]
    return {
        "tokens": f"{' '.join(map(str, request.output))} {request.finish_reason}",
        "origins": _runs(map(str, request.output_origins)),
        "times_us": f"admitted {_us(request.admitted_s)} emitted {_runs(after)}",
        "counters": _counts(request.counters),
    }


def _us(seconds: float) -> str:
    """Microseconds, to the nanosecond; whole ones, as all costs of the profile are."""
    return f"{round(seconds * 1e6, 3):.12g}"


def _runs(values: Iterable[str]) -> str:
    """A sequence, with "5*3" for 5 5 5."""
    counted = ((value, len(list(same))) for value, same in groupby(values))
    return " ".join(value if number == 1 else f"{value}*{number}" for value, number in counted)


def _counts(counters: Any) -> str:
    """A dataclass of counts; zeros are left out, and lists, whose counts it has too."""
    found = {field.name: getattr(counters, field.name) for field in fields(counters)}
    return _counts_of({k: v for k, v in found.items() if not isinstance(v, list)})


def _counts_of(counts: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_count(counts[name])}" for name in sorted(counts) if counts[name])


def _count(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{int(value[key])}" for key in sorted(value))
    return str(int(value))


def differences(recorded: Record, now: Record) -> list[str]:
    """What differs, as lines to read; times may differ by 1e-9 of their value."""
    lines = []
    for name in dict.fromkeys([*recorded, *now]):
        old, new = recorded.get(name, ""), now.get(name, "")
        if not _same(old, new):
            lines += [f"{name}: {_first(old.split(), new.split())}"]
            lines += [f"    recorded {old}", f"    now      {new}"]
    return lines


def _same(old: str, new: str) -> bool:
    """Equal, but for fractions, which only times have."""
    left, right = _NUMBER.split(old), _NUMBER.split(new)
    return len(left) == len(right) and all(
        a == b or (i % 2 == 1 and "." in a + b and math.isclose(float(a), float(b), rel_tol=1e-9))
        for i, (a, b) in enumerate(zip(left, right, strict=True))
    )


def _first(old: Sequence[str], new: Sequence[str]) -> str:
    """Where two sequences begin to differ."""
    for i, (one, other) in enumerate(zip(old, new, strict=False)):
        if not _same(one, other):
            return f"item {i} was {one} and is {other}"
    return f"had {len(old)} items and has {len(new)}"


def read() -> dict[str, dict[str, Record]]:
    """Preset -> case -> record; empty without the file."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def main(names: Sequence[str]) -> None:
    """Records the presets of these names, or all, and drops records of presets that are gone."""
    torch.set_num_threads(1)
    unknown = sorted({*names} - {*presets()})
    if unknown:
        sys.exit(f"no such preset: {', '.join(unknown)}")
    kept = read()
    records = {}
    for preset in presets():
        old = kept.get(preset, {})
        if preset in names or not names or not old:
            records[preset] = {case: record(preset, case) for case in CASES}
            changed = [c for c in CASES if differences(old.get(c, {}), records[preset][c])]
            print(f"{preset}: {'changed: ' + ', '.join(changed) if changed else 'as before'}")
        else:
            records[preset] = old
    FILE.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
