"""Where a run's other choices leave ``model.graphs``, ``kernels`` or ``compile`` without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
