"""Reports acceptance under the keys of vLLM's ``metrics.speculative_decoding``.

The keys and definitions are those of vLLM #48915, which SGLang and llama.cpp share, so readers of
such objects (``specdec fit``) also read this library's result files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specdec.metrics.counters import RequestCounters


def speculative_decoding(
    counters: Sequence[RequestCounters], *, whole_tree: bool, each_step: bool = False
) -> dict[str, Any] | None:
    """Returns acceptance over requests; None without draft tokens or unless ``whole_tree``.

    Args:
        whole_tree: see ``RunTotals``.
        each_step: adds ``per_step_accepted`` in the order of the steps; for one request only.

    Returns:
        ``mean_acceptance_length`` (1 + accepted / steps), ``draft_acceptance_rate`` (accepted /
        drafted), ``acceptance_histogram`` (number of steps that accepted 0, 1, ... draft tokens),
        ``num_spec_steps``, ``num_accepted_draft_tokens``, ``num_draft_tokens`` (tree nodes),
        ``num_spec_tokens`` (depth of the deepest draft token that the target judged).
    """
    drafted = sum(c.proposed for c in counters)
    lengths = sum((c.path_lengths for c in counters), Counter[int]())
    if not whole_tree or not drafted or not lengths:
        return None
    steps, accepted = lengths.total(), sum(c.accepted for c in counters)
    deepest = max((depth for c in counters for depth in c.judged_by_depth), default=0)
    keys = {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": [lengths[j + 1] for j in range(max(lengths))],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": deepest,
    }
    if each_step and len(counters[0].decided) == steps:
        keys["per_step_accepted"] = [length - 1 for length in counters[0].decided]
    return keys
