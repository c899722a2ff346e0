"""Beside a run's figures: the conditions they hold under, and what forbids to compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specdec.pairs import ModelPair, ReplayModels


def conditions_of(
    cfg: Mapping[str, Any], pair: ModelPair, num_prompts: int, cut: int, repeats: int
) -> dict[str, Any]:
    """What was decoded, where and how; ``cut``: prompts that were shortened."""
    clock, model = cfg.get("clock", {}), cfg["model"]
    found: dict[str, Any] = {
        "clock": clock.get("kind", "measured"),
        "data": cfg["data"]["name"] if pair.tokenizer is not None else "random tokens",
        "num_prompts": num_prompts,
        "prompts_truncated": cut,
        "max_new_tokens": cfg["max_new_tokens"],
        "sampling": (cfg.get("choices") or {}).get("sampling", cfg["sampling"]),
        "seed": cfg["seed"],
        "batch_size": cfg["batch_size"],
        "model": model["kind"],
        "dtype": model.get("dtype"),
        "threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    if "profile" in clock:
        found["clock_profile"] = clock["profile"]
        found["clock_scale"] = clock["scale"]
    if isinstance(pair, ReplayModels):
        found |= pair.conditions()
    return found


def recorded_figures(pair: ModelPair) -> dict[str, Any]:
    """What made-up tokens cannot show: how much of the recorded text was loops."""
    if not isinstance(pair, ReplayModels):
        return {}
    return {"loop_share": pair.about.get("loop_share")}


def caveat(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Why a row's times are not to be compared with others', where that is so."""
    text = cfg.get("clock", {}).get("caveat")
    return {"caveat": text} if text else {}


def tell_what_is_replayed(pair: ModelPair, note: Callable[[str], None]) -> None:
    """Data and sampling of a replay are the record's, whatever the configuration says."""
    if isinstance(pair, ReplayModels):
        about = {k: v for k, v in pair.conditions().items() if isinstance(v, str) and k != "replay"}
        told = ", ".join(f"{key}={value}" for key, value in about.items()) or "an acceptance trace"
        note(f"model=replay plays what was recorded: {told}")


def tell_what_is_not_captured(
    cfgs: Sequence[Mapping[str, Any]], pair: ModelPair, note: Callable[[str], None]
) -> None:
    """Where faster passes were asked for and cannot be had."""
    told: dict[str, list[str]] = {}
    for cfg in cfgs:
        for limit in limits(cfg, getattr(pair, "device", "cpu")):
            told.setdefault(limit, []).append(cfg["strategy"]["name"])
    for limit, names in told.items():
        note(f"{', '.join(names)}: {limit}")


def limits(config: Mapping[str, Any], device: str) -> list[str]:
    """What a user is told who asked for faster passes and gets plain ones.

    Args:
        config: resolved configuration of one strategy.
        device: that its models run on.

    Returns:
        Sentences without a full stop; empty where every choice holds, or none was made.
    """
    model = config["model"]
    graphs = str(model.get("graphs", "off"))
    captures = graphs in ("cuda", "replay") or (graphs == "auto" and device.startswith("cuda"))
    asked = [f"model.graphs={graphs}"] if captures else []
    if model.get("kernels", "torch") != "torch":
        asked.append(f"model.kernels={model['kernels']}")
    if model.get("compile"):
        asked.append("model.compile=true")
    if not asked:
        return []
    if config["strategy"]["kind"] == "hf":
        return [f"{', '.join(asked)}: not used, transformers' own generate runs its own passes"]
    found = []
    executor, kv_tokens = config["executor"], config["serving"].get("kv_tokens")
    degrees = {key: executor.get(key) or 1 for key in ("target_degree", "draft_degree")}
    shared = [f"executor.{key}={degree}" for key, degree in degrees.items() if degree > 1]
    if shared and executor.get("transport") == "distributed":
        found.append(
            f"{', '.join(asked)}: not used for shares of a tensor-parallel group"
            f" ({', '.join(shared)}), which run uncaptured and unfused"
        )
    if captures and kv_tokens is not None:
        found.append(
            f"model.graphs={graphs}: not used for the target, whose paged caches"
            f" (serving.kv_tokens={kv_tokens}) have no fixed addresses"
        )
    return found
