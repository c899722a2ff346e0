"""Measures the passes of a plan's models on this machine, and decodes candidates with them.

``profile=measured`` measures passes as ``specdec profile`` does, but over the context of the
record and over as many requests as are planned for, and adds the controller's own time
(``specdec.planning.controller``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.clocks import Work
from specdec.clocks.timed_runs import timed_run
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.models.loading import DTYPES
from specdec.pairs import HuggingFacePair
from specdec.planning.candidates import PLAIN
from specdec.planning.layouts import Layout
from specdec.planning.machines import CLOCK_ERROR, Profiled, fullest_gb
from specdec.planning.simulate import TIMES, Unit, unit_of
from specdec.profiling.job import profile_of
from specdec.profiling.limits import kv_bytes
from specdec.profiling.passes import measure_model
from specdec.profiling.proposal import costs_node
from specdec.profiling.transfer import measure_transfer
from specdec.report.provenance import host_memory
from specdec.runs.interleaved import run_interleaved
from specdec.runs.jobs import Progress, prepare, stop_rules
from specdec.runs.runners import PartsRunner, TokenPrompt

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
_REPEATS = 9


class ModelsHere:
    """The models and prompts of a plan, loaded when they are first needed."""

    def __init__(self, words: Sequence[str], extra: Sequence[Path], progress: Progress) -> None:
        """``words`` must not contain strategy, clock and output folder."""
        self.words, self.extra, self.progress = tuple(words), tuple(extra), progress

    def config(self, name: str, sizes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the resolved configuration of a preset; ``sizes`` replaces keys of its policy."""
        config = run_job_of([*self.words, f"strategy={name}"], self.extra).config
        return {**config, "policy": {**config["policy"], **(sizes or {})}}

    @cached_property
    def _loaded(self) -> tuple[HuggingFacePair, list[TokenPrompt]]:
        config = self.config(PLAIN)
        if config.get("threads"):
            torch.set_num_threads(int(config["threads"]))
        self.progress.phase("loading models", None)
        pair, prompts, _ = prepare(config)
        if not isinstance(pair, HuggingFacePair):
            raise UserError("profile=measured measures models: use model=tiny, hf or random")
        return pair, prompts

    @property
    def pair(self) -> HuggingFacePair:
        return self._loaded[0]

    @property
    def prompts(self) -> list[TokenPrompt]:
        """The prompts, in the order of the record."""
        return self._loaded[1]

    def decode(
        self,
        configs: Sequence[Mapping[str, Any]],
        *,
        batch: int,
        count: int,
        length: int,
        rounds: int = 1,
        on_turn: Callable[[], None] = lambda: None,
    ) -> list[list[Unit]]:
        """Runs configurations in turns of a fraction of a second; returns counts of every unit.

        A unit is ``batch`` prompts, as in ``Simulator.units``. Each runs ``rounds`` times, and
        ``typical`` combines the runs. ``on_turn`` is called after every unit of every
        configuration. The clock of the configurations is replaced.
        """
        groups = [self.prompts[at * batch : (at + 1) * batch] for at in range(count)]
        groups = [group for group in groups if len(group) == batch] or groups[:1]
        measured: list[list[list[Unit]]] = [[[] for _ in groups] for _ in configs]
        runners: list[PartsRunner] = []
        try:
            for config in configs:
                cfg = {**config, "batch_size": batch, "max_new_tokens": length}
                cfg |= {"clock": {"kind": "measured"}, "trace": False}
                stop = stop_rules(cfg, self.pair)
                runners.append(PartsRunner(cfg=cfg, pair=self.pair, stop=stop))
                runners[-1].run(_others(groups[0]), lambda _: None)
            for turn in range(rounds * len(groups)):
                unit = turn % len(groups)
                order = np.roll(np.arange(len(runners)), turn).tolist()
                with timed_run():
                    done = run_interleaved([runners[at] for at in order], groups[unit])
                for at, (results, totals) in zip(order, done, strict=True):
                    measured[at][unit].append(unit_of(results, totals))
                    on_turn()
        finally:
            for runner in runners:
                runner.close()
        return [[typical(units) for units in of] for of in measured]


def _others(group: Sequence[TokenPrompt]) -> list[TokenPrompt]:
    """Returns prompts to warm up with, reversed so that no source can learn from them."""
    return [TokenPrompt(prompt.id, prompt.tokens[::-1].copy()) for prompt in group]


def typical(units: Sequence[Unit]) -> Unit:
    """Returns the run of median time; for an even number, with mean times of the middle two."""
    ordered = sorted(units, key=lambda unit: unit.clock_s)
    low, high = ordered[(len(units) - 1) // 2], ordered[len(units) // 2]
    lower, upper = asdict(low), asdict(high)
    means = {name: (lower[name] + upper[name]) / 2 for name in TIMES}
    return replace(low, **means)


def measured_costs(
    models: ModelsHere, *, stages: int, requests: int, context: int
) -> dict[str, Any]:
    """Returns cost curves of the models on this machine.

    ``stages`` is that of the target; ``requests`` share a pass, each with ``context`` cached
    tokens.
    """
    pair, progress = models.pair, models.progress
    tokens = sorted({*_TOKENS, requests})
    progress.phase(f"measuring passes of {requests} request{'s' * (requests > 1)}", None)
    samples = measure_model(
        pair,
        tokens=tokens,
        repeats=_REPEATS,
        stages=stages,
        context=context,
        requests=requests,
        on_repeat=lambda kind: progress.advance(detail=kind),
    )
    if stages > 1:
        width = int(pair.target.config.get_text_config().hidden_size)
        dtype = next(pair.target.parameters()).dtype
        samples[Work.TRANSFER] = measure_transfer(
            width=width, dtype=dtype, tokens=tokens, repeats=_REPEATS
        )
    return costs_node(profile_of(samples, name="measured", note=""))


def memory_here(pair: HuggingFacePair, devices: int) -> dict[str, float] | None:
    """Returns what the models occupy on this machine, and what there is; None if that is unknown.

    The keys are target_gb and draft_gb of weights; kv_kb of the target's keys and values per token;
    and limit_gb of a GPU, or of the processes' equal share of the machine's memory.
    """
    on_gpu = torch.device(pair.device).type == "cuda"
    total = torch.cuda.mem_get_info(pair.device)[1] if on_gpu else host_memory()
    if total is None:
        return None
    config, weights = pair.target.config.get_text_config(), pair.weight_bytes
    return {
        "target_gb": weights["target"] / 1e9,
        "draft_gb": weights.get("draft", 0) / 1e9,
        "kv_kb": pair.num_layers * kv_bytes(config, DTYPES[str(pair.dtype)].itemsize) / 1e3,
        "limit_gb": round(total / (1 if on_gpu else devices) / 1e9, 1),
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """This machine, measured for some numbers of requests at a time (``by_batch``)."""

    by_batch: Mapping[int, Profiled]
    held: Mapping[str, float] | None = None

    @staticmethod
    def of(entries: Sequence[Mapping[str, Any]], *, stages: int, devices: int) -> Measured:
        """Expects measurements with the keys ``batch``, ``costs``, ``note`` and ``memory``."""
        machines = {}
        for entry in entries:
            profile = {"costs": entry["costs"], "note": entry["note"], "stages": stages}
            machine = Profiled(name="measured", profile=profile, devices=devices)
            machines[int(entry["batch"])] = machine
        return Measured(machines, entries[0].get("memory"))

    @property
    def name(self) -> str:
        return "measured"

    @property
    def note(self) -> str:
        return next(iter(self.by_batch.values())).note

    @property
    def devices(self) -> int:
        return next(iter(self.by_batch.values())).devices

    @property
    def error(self) -> float:
        return CLOCK_ERROR

    @property
    def prices_context(self) -> bool:
        """Always False: passes are measured over the context of the record alone."""
        return False

    @property
    def limit_gb(self) -> float | None:
        return None if self.held is None else self.held["limit_gb"]

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(self.by_batch)

    def costs(self, layout: Layout, batch: int, context: int) -> dict[str, Any]:
        """Uses the measurement with the nearest number of requests, on a logarithmic scale."""
        nearest = min(self.by_batch, key=lambda known: abs(np.log(known / batch)))
        return self.by_batch[nearest].costs(layout, batch, context)

    def memory_gb(self, layout: Layout, batch: int, context: int) -> float | None:
        """Includes the weights of all models, and the target's keys and values."""
        held = self.held
        if held is None:
            return None
        keys_values = 1e-6 * held["kv_kb"] * batch * context
        return fullest_gb(
            layout, target_gb=held["target_gb"] + keys_values, draft_gb=held["draft_gb"]
        )
