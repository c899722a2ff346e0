"""Describes the conditions of a run, and notes why rows are not comparable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.pairs import ModelPair
from specdec.runs.runners import Runner


def conditions_of(
    cfg: Mapping[str, Any], pair: ModelPair, num_prompts: int, cut: int, repeats: int
) -> dict[str, Any]:
    """Collects the conditions of a run, in which ``cut`` prompts were shortened."""
    clock, model, models = cfg.get("clock", {}), cfg["model"], pair.section()
    names = {}
    for role in ("target", "draft"):  # of a path only its last folder is shown
        path = models.get(role)
        names[role] = Path(path).name if path and Path(path).expanduser().exists() else path
    conditions: dict[str, Any] = {
        "clock": clock.get("kind", "measured"),
        **names,
        "data": cfg["data"]["name"] if pair.tokenizer is not None else "random tokens",
        "num_prompts": num_prompts,
        "prompts_truncated": cut,
        "max_new_tokens": cfg["max_new_tokens"],
        "sampling": (cfg.get("choices") or {}).get("sampling", cfg["sampling"]),
        "seed": cfg["seed"],
        "batch_size": cfg["batch_size"],
        "model": model["kind"],
        "dtype": pair.dtype if "dtype" in model else None,
        "quantization": models.get("quantization"),
        "backend": pair.backend,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    if getattr(pair.tokenizer, "chat_template", None) and cfg["data"].get("chat") != "never":
        conditions["chat_template"] = True
    if "profile" in clock and "_target_" not in clock:
        conditions["clock_profile"] = clock["profile"]
        conditions["clock_scale"] = clock["scale"]
    return conditions | pair.conditions()


def with_pair(cfg: Mapping[str, Any], pair: ModelPair) -> dict[str, Any]:
    """Returns the configuration with the models of a pair that the caller has built."""
    choices = {**(cfg.get("choices") or {}), "model": type(pair).__name__}
    return {**cfg, "model": pair.section(), "choices": choices}


def further_metrics(cfg: Mapping[str, Any], pair: ModelPair, runner: Runner) -> dict[str, Any]:
    """Returns metrics that ``summarise`` cannot know.

    The tokens of a replay are made up: its ``loop_share`` is that of the record. ``caveat`` says
    why the row is not comparable or representative, and is absent if it is.
    """
    source = None if runner.parts is None else runner.parts.source
    caveats = (cfg.get("clock", {}).get("caveat"), source and source.caveat)
    recorded = {"loop_share": pair.about.get("loop_share")} if pair.about else {}
    caveat = "; ".join(filter(None, caveats))
    return {"runtime": runner.runtime, **recorded, **({"caveat": caveat} if caveat else {})}


def note_replay(pair: ModelPair, note: Callable[[str], None]) -> None:
    """Notes that a replay has the data and sampling of its record, not the configuration's."""
    if conditions := pair.conditions():
        about = {k: v for k, v in conditions.items() if isinstance(v, str) and k != "replay"}
        shown = ", ".join(f"{key}={value}" for key, value in about.items())
        note(f"model={pair.option} plays what was recorded: {shown or 'an acceptance trace'}")


def note_levels_on_one_stage(runners: Sequence[Runner], note: Callable[[str], None]) -> None:
    """Warns if a policy that feeds one tree level per step runs on a single stage."""
    for runner in runners:
        if (parts := runner.parts) is None:
            continue
        if parts.executor.latency == parts.policy.levels_per_step == 1:
            note(
                f"{runner.name} feeds one tree level per step, and on one stage a step yields one"
                " token, as plain decoding does: use executor=pipeline with executor.stages=2 or"
                " more, or strategy=best_first, which verifies a whole tree at once"
            )


def note_unused_options(
    cfgs: Sequence[Mapping[str, Any]], pair: ModelPair, note: Callable[[str], None]
) -> None:
    """Notes options for faster passes that have no effect, with the rows concerned."""
    rows: dict[str, list[str]] = {}
    for cfg in cfgs:
        for limit in limits(cfg, pair.device):
            rows.setdefault(limit, []).append(cfg["strategy"]["name"])
    for limit, names in rows.items():
        note(f"{', '.join(names)}: {limit}")


def limits(config: Mapping[str, Any], device: str) -> list[str]:
    """Returns why options for faster passes have no effect, as sentences without a full stop."""
    model = config["model"]
    graphs = str(model.get("graphs", "off"))
    captures = graphs in ("cuda", "replay") or (graphs == "auto" and device.startswith("cuda"))
    options = [f"model.graphs={graphs}"] if captures else []
    if model.get("kernels", "torch") != "torch":
        options.append(f"model.kernels={model['kernels']}")
    if model.get("compile"):
        options.append("model.compile=true")
    if not options:
        return []
    if config["strategy"]["kind"] != "parts":
        return [f"{', '.join(options)}: not used by another program, which runs its own passes"]
    notes = []
    executor, kv_tokens = config["executor"], config["serving"].get("kv_tokens")
    degrees = {key: executor.get(key) or 1 for key in ("target_degree", "draft_degree")}
    shared = [f"executor.{key}={degree}" for key, degree in degrees.items() if degree > 1]
    if shared and executor.get("transport") == "distributed":
        notes.append(
            f"{', '.join(options)}: not used for shares of a tensor-parallel group"
            f" ({', '.join(shared)}), which run uncaptured and unfused"
        )
    if captures and kv_tokens is not None:
        notes.append(
            f"model.graphs={graphs}: not used for the target, whose paged caches"
            f" (serving.kv_tokens={kv_tokens}) have no fixed addresses"
        )
    return notes
