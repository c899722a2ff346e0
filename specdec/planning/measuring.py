"""Measures a plan's models on this machine: times of passes, and the search's last candidates.

Passes are measured as ``specdec profile`` does, at the context length of the recorded prompts and
the planned batch sizes. A real step also selects nodes, packs rows, samples and verifies tokens and
moves cache entries, all of which take no time in a simulation.

After the search, the last candidates decode prompts on the models, in turns of a fraction of a
second, and the same prompts in simulation. The ratio of the two times per token scales a
candidate's costs (``calibrated``), so that ranking, intervals and written profile fit real runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from specdec.clocks.timed_runs import timed_run
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.files import parse_json, write_json
from specdec.models.config_values import config_value
from specdec.models.loading import DTYPES
from specdec.models.onnx.support import head_size
from specdec.pairs import HuggingFacePair
from specdec.planning.acceptance import Acceptance
from specdec.planning.candidates import PLAIN, TIMES, Candidate, Times, Unit
from specdec.planning.search import Search
from specdec.profiling.passes import costs_of, measure_model
from specdec.report.provenance import host_memory
from specdec.runs.jobs import prepare, stop_rules
from specdec.runs.progress import Progress
from specdec.runs.runners import PartsRunner, TokenPrompt, run_interleaved

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
_REPEATS = 9  # of passes
_RUNS = 16  # runs of each last candidate, on different prompts as far as possible
_STEADY = 1.1  # a note is given if plain decoding's fastest run exceeds this times the slowest


class ModelsHere:
    def __init__(self, words: Sequence[str], extra: Sequence[Path], progress: Progress) -> None:
        self.words, self.extra, self.progress = tuple(words), tuple(extra), progress

    def config(self, name: str) -> dict[str, Any]:
        return run_job_of([*self.words, f"strategy={name}"], self.extra).config

    @cached_property
    def loaded(self) -> tuple[HuggingFacePair, list[TokenPrompt]]:
        config = self.config(PLAIN)
        if config.get("threads"):
            torch.set_num_threads(int(config["threads"]))
        pair, prompts, _ = prepare(config, progress=self.progress)
        if not isinstance(pair, HuggingFacePair):
            raise UserError("profile=measured measures models: use model=tiny, hf or random")
        return pair, prompts

    def decode(
        self,
        configs: Sequence[Mapping[str, Any]],
        *,
        batch: int,
        count: int,
        length: int,
        rounds: int = 1,
        on_turn: Callable[[], None] = lambda: None,
        until: float = inf,
    ) -> list[list[Unit]]:
        """Decodes the same prompts with each configuration on the wall clock, in turns of a
        fraction of a second. Returns, per configuration and unit (``batch`` prompts), the
        ``typical`` one of ``rounds`` runs. After the first unit it stops at the time ``until`` (of
        ``monotonic``) or on an interruption. ``on_turn`` is called after each run of a unit.
        """
        pair, prompts = self.loaded
        groups = [prompts[at * batch : (at + 1) * batch] for at in range(count)]
        groups = [group for group in groups if len(group) == batch] or groups[:1]
        # Prompts to warm up with, reversed so that no source can learn from them.
        others = [TokenPrompt(prompt.id, prompt.tokens[::-1].copy()) for prompt in groups[0]]
        changes = {"batch_size": batch, "max_new_tokens": length, "trace": False}
        measured: list[list[list[Unit]]] = [[[] for _ in groups] for _ in configs]
        runners: list[PartsRunner] = []
        try:
            for config in configs:
                cfg = {**config, **changes, "clock": {"kind": "measured"}}
                runners.append(PartsRunner(cfg=cfg, pair=pair, stop=stop_rules(cfg, pair)))
                runners[-1].run(others, lambda _: None)
            for turn in range(rounds * len(groups)):
                if turn and monotonic() > until:
                    break
                unit = turn % len(groups)
                order = np.roll(np.arange(len(runners)), turn).tolist()
                with timed_run():
                    done = run_interleaved([runners[at] for at in order], groups[unit])
                for at, (results, totals) in zip(order, done, strict=True):
                    measured[at][unit].append(Unit.of(results, totals))
                    on_turn()
        except KeyboardInterrupt:
            if not measured[0][0]:
                raise
        finally:
            for runner in runners:
                runner.close()
        return [[typical(units) for units in of if units] for of in measured]


def typical(units: Sequence[Unit]) -> Unit:
    """Returns the run with the median time; for an even number, the middle two's times averaged."""
    ordered = sorted(units, key=lambda unit: unit.clock_s)
    low, high = ordered[(len(units) - 1) // 2], ordered[len(units) // 2]
    return replace(low, **{name: (getattr(low, name) + getattr(high, name)) / 2 for name in TIMES})


def measured_here(
    models: ModelsHere,
    acceptance: Acceptance,
    *,
    batches: Sequence[int],
    stages: int,
    devices: int,
) -> dict[str, Any]:
    """Measures this machine; returns keyword arguments of ``Profiled``: costs by batch size and, if
    known, sizes of memory and weights. Passes are timed at the mean context of ``acceptance``.
    """
    pair, progress = models.loaded[0], models.progress
    by_batch = {}
    for batch in batches:
        progress.phase(f"measuring passes of {batch} request{'s' * (batch > 1)}", None)
        samples = measure_model(
            pair,
            tokens=sorted({*_TOKENS, batch}),
            repeats=_REPEATS,
            stages=stages,
            context=acceptance.context,
            requests=batch,
            transfer=stages > 1,
            on_repeat=lambda kind: progress.advance(detail=kind),
        )
        by_batch[batch] = costs_of(samples)
    fields = {"by_batch": by_batch, "note": "measured here"}
    on_gpu = torch.device(pair.device).type == "cuda"
    memory = torch.cuda.mem_get_info(pair.device)[1] if on_gpu else host_memory()
    config, weights = pair.target.config.get_text_config(), pair.weight_bytes
    heads = config_value(config, "num_key_value_heads", config.num_attention_heads)
    layer_bytes = 2 * heads * head_size(config) * DTYPES[str(pair.dtype)].itemsize
    return {
        **fields,
        "target_gb": weights["target"] / 1e9,
        "draft_gb": weights.get("draft", 0) / 1e9,
        "kv_kb": pair.num_layers * layer_bytes / 1e3,
        "memory_gb": round(memory / (1 if on_gpu else devices) / 1e9, 1),  # of a process, on a CPU
    }


def calibrated(
    candidates: Sequence[Candidate], *, search: Search, models: ModelsHere, path: Path
) -> list[Candidate]:
    """Returns the candidates with costs scaled to measured runs, without those that cannot run here
    (``search.left_out`` says why). The file ``path`` keeps the ratios for a resumed search.
    """
    known: dict[str, dict[str, Any]] = parse_json(path.read_bytes()) if path.is_file() else {}
    runnable = []
    for made in candidates:
        if made.key not in known:
            parts = {part: made.config[part] for part in ("policy", "executor")}
            try:
                config = {**models.config(made.name), **parts}
                models.decode([config], batch=1, count=1, length=2)
                runnable.append((made, config))
            except UserError as error:
                search.left_out[made.name] = f"{made} does not run here: {error}"
    if runnable:
        known |= _trials(runnable, search, models)
        write_json(path, known)
    changed, ratios = [], []
    for made in candidates:
        if made.key not in known:
            continue
        ratios.append(ratio := float(known[made.key]["ratio"]))
        changed.append(made.rescaled(dict.fromkeys(made.config["clock"]["costs"], ratio)))
        search.simulator.copy_scaled(made, changed[-1], ratio)
        speeds = known[made.key].get("tokens_per_s")
        # A pass of plain decoding costs nearly the same on all prompts.
        if made.name == PLAIN and speeds and max(speeds) > _STEADY * min(speeds):
            search.notes.append(
                f"plain decoding ran at {min(speeds):.4g} to {max(speeds):.4g} tokens/s per request"
                f" in its {len(speeds)} runs: this machine's speed changes, and tokens/s at another"
                " time may differ as much; gains were measured in turns of a fraction of a second"
            )
    search.notes.append(
        f"runs of the {len(changed)} best candidates took {min(ratios):.2f} to {max(ratios):.2f} of"
        " their simulated times on the same prompts; the plan's times are those of the runs"
    )
    return changed


def _trials(
    candidates: Sequence[tuple[Candidate, Mapping[str, Any]]], search: Search, models: ModelsHere
) -> dict[str, dict[str, Any]]:
    batch = int(candidates[0][0].config["batch_size"])
    count = min(_RUNS, max(search.simulator.num_prompts // batch, 1))
    rounds, progress = _RUNS // count, search.progress
    progress.phase("runs of the best candidates", len(candidates) * count * rounds)
    shape = {"batch": batch, "count": count, "length": search.length, "rounds": rounds}
    configs = [config for _, config in candidates]
    real = models.decode(configs, **shape, on_turn=progress.advance, until=search.until)
    rows = {}
    for (made, _), units in zip(candidates, real, strict=True):
        measured = Times.of(units, search.chosen.objective, made.layout.devices).mean
        rows[made.key] = {
            "candidate": str(made),
            "ratio": measured / search.times(made, len(units)).mean,
            "tokens_per_s": [round(u.tokens / u.seconds, 2) for u in units if u.seconds > 0.0],
        }
    return rows
