"""Costs by the number of devices that share a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def curve_at(curves: Mapping[Any, Mapping[str, Any]], degree: int) -> dict[str, Any]:
    """The cost curve of a degree; between two of the profile's, linear in the degree.

    Args:
        curves: degree -> curve, all over the same numbers of tokens.
        degree: within those.
    """
    by_degree = {int(number): curve for number, curve in curves.items()}
    if degree in by_degree:
        return dict(by_degree[degree])
    low = max(number for number in by_degree if number < degree)
    high = min(number for number in by_degree if number > degree)
    share = (degree - low) / (high - low)
    left, right = by_degree[low], by_degree[high]

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    found = dict(left)
    found["ms"] = [between(a, b) for a, b in zip(left["ms"], right["ms"], strict=True)]
    if "block_ms" in left:
        found["block_ms"] = between(left["block_ms"], right.get("block_ms", 0.0))
    return found
